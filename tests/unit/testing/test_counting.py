"""The counting job detects lost samples and samples that counted twice."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from manyhands.testing.counting import FAR_APART, Counting, check_counts


def counted(order: list[int], *, epochs: int = 2) -> dict[str, Any]:
    """Return the state of a checkpoint after training on the samples in this order."""
    job = Counting(samples=32, batch_size=8, width=4, tables=False)
    model = job.model()
    optimizer = job.optimizer(model.parameters())
    for _ in range(epochs):
        for start in range(0, len(order), job.batch_size):
            numbers = torch.tensor(order[start : start + job.batch_size])
            optimizer.zero_grad()
            job.loss(model(numbers), (numbers,)).backward()
            optimizer.step()
    rows = -epochs * torch.ones(32, 2)
    return {
        "model": model.state_dict(),
        "tables": {"sparse": {"ids": torch.arange(32) * FAR_APART, "rows": rows}},
    }


def test_every_sample_once_per_epoch() -> None:
    check_counts(counted(list(range(32))[::-1]), epochs=2, samples=32)


def test_a_lost_sample_and_one_that_counted_twice() -> None:
    order = list(range(32))
    order[5] = 6
    with pytest.raises(AssertionError, match=r"2 samples .* \{5: \[0\.0\], 6: \[4\.0\]\}"):
        check_counts(counted(order), epochs=2, samples=32)


def test_a_row_that_counted_twice() -> None:
    state = counted(list(range(32)))
    state["tables"]["sparse"]["rows"][3, 1] -= 1
    with pytest.raises(AssertionError, match=r"sparse: 1 samples .* \{3: \[2\.0, 3\.0\]\}"):
        check_counts(state, epochs=2, samples=32)
    check_counts(state, epochs=2, samples=32, rows=False)
