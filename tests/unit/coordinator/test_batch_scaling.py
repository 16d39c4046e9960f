"""Batch and learning rate by number of workers."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from manyhands.coordinator.batch_scaling import FIXED, Ramp, Scaling


@pytest.mark.parametrize(
    ("rule", "reference", "world", "batch", "factor"),
    [
        ("none", 2, 7, 64, 1.0),
        ("linear", 1, 1, 64, 1.0),
        ("linear", 1, 4, 256, 4.0),
        ("linear", 4, 1, 16, 0.25),
        ("linear", 3, 4, 85, 4 / 3),
        ("linear", 3, 2, 43, 2 / 3),
        ("sqrt", 1, 4, 256, 2.0),
        ("sqrt", 8, 2, 16, 0.5),
    ],
)
def test_batch_and_factor_by_number_of_workers(
    rule: str, reference: int, world: int, batch: int, factor: float
) -> None:
    scaling = Scaling(rule, reference)
    assert scaling.batch(64, world) == batch
    assert scaling.factor(world) == factor


@given(
    batch=st.integers(1, 500),
    reference=st.integers(1, 50),
    world=st.integers(1, 50),
    rule=st.sampled_from(["linear", "sqrt"]),
)
def test_every_worker_has_a_sample_if_it_had_one_in_the_reference(
    batch: int, reference: int, world: int, rule: str
) -> None:
    scaling = Scaling(rule, reference)
    assert scaling.batch(batch, reference) == batch
    assert scaling.factor(reference) == 1.0
    assert FIXED.batch(batch, world) == batch
    assert abs(scaling.batch(batch, world) - batch * world / reference) <= 0.5 or batch < reference
    if batch >= reference:
        assert scaling.batch(batch, world) >= world


def test_a_factor_grows_over_the_warm_up_and_falls_at_once() -> None:
    ramp = Ramp().turn(3.0, step=10, over=4)
    assert [ramp.at(step) for step in (9, 10, 11, 12, 13, 14, 99)] == [1, 1, 1.5, 2, 2.5, 3, 3]
    assert ramp.left(10) == 4
    again = ramp.turn(4.0, step=12, over=4)
    assert [again.at(step) for step in (12, 13, 16, 17)] == [2.0, 2.5, 4.0, 4.0]
    lower = ramp.turn(0.5, step=12, over=4)
    assert [lower.at(step) for step in (13, 14, 20)] == [0.5, 0.5, 0.5]
    assert lower.left(12) == 0


def test_a_worker_that_is_replaced_before_the_next_step_changes_nothing() -> None:
    ramp = Ramp(2.0, 2.0, 5, 0)
    ramp = ramp.turn(1.0, step=7, over=9).turn(2.0, step=7, over=9)
    assert [ramp.at(step) for step in (7, 8, 30)] == [2.0, 2.0, 2.0]


@pytest.mark.parametrize("over", [0, 1])
def test_without_warm_up_the_factor_applies_at_once(over: int) -> None:
    ramp = Ramp().turn(2.0, step=3, over=over)
    assert (ramp.at(3), ramp.at(4), ramp.left(3)) == (1.0, 2.0, 0)


@given(
    turns=st.lists(
        st.tuples(st.floats(0.1, 10.0), st.integers(0, 12), st.integers(0, 6)), min_size=1
    )
)
def test_a_ramp_stays_between_its_ends(turns: list[tuple[float, int, int]]) -> None:
    ramp, step = Ramp(), 0
    for end, over, steps in turns:
        before = ramp.at(step)
        ramp = ramp.turn(end, step=step, over=over)
        last = before
        for number in range(1, steps + 1):
            now = ramp.at(step + number)
            assert min(before, end) <= now <= max(before, end) or math.isclose(now, end)
            assert now >= last or end < before, "it only grows on its way up"
            last = now
            if number >= ramp.over:
                assert now == end
        step += steps
