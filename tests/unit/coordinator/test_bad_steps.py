"""Steps in a row without a finite loss."""

from __future__ import annotations

from math import inf, nan

from manyhands.coordinator.bad_steps import BadSteps


def fed(limit: int, *losses: float) -> BadSteps:
    bad = BadSteps(limit)
    for step, loss in enumerate(losses, 1):
        bad.add(step, loss)
    return bad


def test_too_many_in_a_row() -> None:
    assert not fed(3, 1.0, nan, inf).too_many
    bad = fed(3, 1.0, nan, inf, -inf)
    assert bad.too_many
    assert str(bad) == "no finite loss since step 2 (3 steps)"


def test_a_finite_loss_ends_the_row() -> None:
    bad = fed(3, nan, nan, 0.5, nan)
    assert (bad.since, bad.count, bad.too_many) == (4, 1, False)
    assert str(bad) == "no finite loss since step 4 (1 step)"


def test_a_limit_of_zero_is_never_reached() -> None:
    assert not fed(0, *[nan] * 100).too_many


def test_a_row_starts_at_its_lowest_step() -> None:
    bad = BadSteps(2)
    for step, loss in ((8, 0.1), (10, nan), (9, nan)):
        bad.add(step, loss)
    assert bad.since == 9
    assert bad.too_many


def test_a_step_without_weight_has_no_loss() -> None:
    bad = fed(3, nan, nan)
    bad.add(3, nan, weight=0.0)
    assert (bad.count, bad.too_many) == (2, False)
    bad.add(4, nan)
    assert bad.too_many


def test_too_many_stays_true() -> None:
    bad = fed(2, nan, nan, 1.0, nan)
    assert bad.too_many
    assert str(bad) == "no finite loss since step 1 (2 steps)"
