"""What strategies say that they cost, against the kernel's count of bytes and memory in real runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from manyhands.testing.cost_trial import (
    MEMORY,
    THROUGH_MEMORY,
    TRAFFIC,
    CostCase,
    memory,
    traffic,
)

WITHIN = 0.05
SHORT = {
    "allreduce(transport=tcp) x2",
    "ps:sync(transport=tcp) x3 GatedRows",
}
"""Those of `make test`; the others are in `make long`."""
SHORT_MEMORY = {"allreduce x2"}


def marked(cases: tuple[CostCase, ...], short: set[str]) -> list[object]:
    assert short <= {str(case) for case in cases}
    return [
        pytest.param(case, id=str(case), marks=[pytest.mark.long] * (str(case) not in short))
        for case in cases
    ]


@pytest.mark.parametrize("case", marked(TRAFFIC, SHORT))
def test_bytes_of_a_step_are_as_forecast(case: CostCase, tmp_path: Path) -> None:
    found = traffic(case, tmp_path)
    assert found.forecast == pytest.approx(found.measured, rel=WITHIN)


@pytest.mark.parametrize("case", marked(THROUGH_MEMORY, {"allreduce x2"}))
def test_what_passes_through_memory_is_not_sent(case: CostCase, tmp_path: Path) -> None:
    found = traffic(case, tmp_path)
    assert found.forecast == 0
    assert found.measured < 1000  # of a gradient of 2 MB


@pytest.mark.parametrize("case", marked(MEMORY, SHORT_MEMORY))
def test_memory_is_as_forecast(case: CostCase, tmp_path: Path) -> None:
    found = memory(case, tmp_path)
    assert found.forecast == pytest.approx(found.measured, rel=WITHIN)
