"""One worker: the effect of the learning-rate factor of an order."""

from __future__ import annotations

from typing import cast

import numpy as np
import pytest
import torch

from manyhands.compute.feed import Feed
from manyhands.compute.train_state import TrainState
from manyhands.contract import Context
from manyhands.control.messages import Portion
from manyhands.hosts.me import Me
from manyhands.strategies.single import SingleLearner
from manyhands.testing.jobs import Sparse


def moved(factor: float) -> tuple[float, dict[str, np.ndarray], list[torch.Tensor]]:
    """The learning rate of a first step, and by how much it moved rows and parameters."""
    job = Sparse(optim="sgd", table_optim="sgd", clip_norm=None, anneal=False)
    train_state = TrainState.of(job, device="cpu", num_steps=10)
    learner = SingleLearner(Context(train_state, cast(Me, None)))
    share = Feed(job, job.data(), device="cpu").share(Portion(1, 0, 16, ((0, 16),)))
    ids = np.unique(share.batches[0][0][2].numpy())
    tables = train_state.tables

    def rows() -> dict[str, np.ndarray]:
        return {name: tables.look(name, torch.from_numpy(ids)).numpy() for name in tables.specs}

    for name in tables.specs:
        tables.stores.store(name).find(ids, create=True)
    before, weights = rows(), [p.detach().clone() for p in train_state.model.parameters()]
    train_state.lr_factor = factor
    report = learner.step(share)
    after = rows()
    return (
        report.lr,
        {name: after[name] - before[name] for name in before},
        [p.detach() - w for p, w in zip(train_state.model.parameters(), weights, strict=True)],
    )


def test_the_learning_rate_factor_scales_parameters_and_rows() -> None:
    lr, rows, weights = moved(1.0)
    faster, further, heavier = moved(3.0)
    assert faster == pytest.approx(3 * lr)
    assert set(rows) == {"rows", "bags"}, "one with a learning rate of its own, one without"
    for name, by in rows.items():
        assert np.abs(by).max() > 0
        np.testing.assert_allclose(further[name], 3 * by, rtol=1e-4, atol=1e-6)
    for by, more in zip(weights, heavier, strict=True):
        torch.testing.assert_close(more, 3 * by, rtol=1e-4, atol=1e-6)
