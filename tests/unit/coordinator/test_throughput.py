"""Shares of a batch follow the speed of workers: equal until a change pays off, then all finish together."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from manyhands.coordinator.plan import StepPlan
from manyhands.coordinator.throughput import KNOWN_AFTER_S, LEAST, WORTH, Throughput
from manyhands.ranges import shares

NAMES = ["a", "b", "c", "d"]


def train(
    throughput: Throughput, seconds_a_sample: list[float], *, steps: int = 200, batch: int = 64
) -> float:
    """So many steps; the seconds of the last."""
    workers = NAMES[: len(seconds_a_sample)]
    took = 0.0
    for _ in range(steps):
        counts = shares(batch, throughput.weights([[name] for name in workers]))
        times = [n * s for n, s in zip(counts, seconds_a_sample, strict=True)]
        for worker, count, seconds in zip(workers, counts, times, strict=True):
            throughput.note(worker, count, seconds)
        took = max(times)
    return took


def test_equal_workers_have_equal_parts() -> None:
    throughput = Throughput()
    train(throughput, [0.01, 0.01, 0.0105])
    assert throughput.weights([[name] for name in NAMES[:3]]) == [1.0, 1.0, 1.0]
    assert throughput.news(NAMES[:3]) == []


def test_half_the_speed_gets_half_the_share() -> None:
    throughput = Throughput()
    assert train(throughput, [0.01, 0.02], batch=60) == pytest.approx(0.4)
    assert throughput.weights([["a"], ["b"]]) == [1.0, 0.5]
    assert throughput.news(["a", "b"]) == [("b", pytest.approx(2.0))]
    assert throughput.news(["a", "b"]) == [], "it is told once"


@given(st.lists(st.floats(0.002, 0.06), min_size=2, max_size=4))
def test_no_step_takes_much_longer_than_necessary(speeds: list[float]) -> None:
    took = train(Throughput(), speeds, steps=1500, batch=4096)
    best = 4096 / sum(1 / seconds for seconds in speeds)
    assert took < WORTH * best * 1.05


def test_parts_follow_when_speeds_change() -> None:
    throughput = Throughput()
    train(throughput, [0.01, 0.03])
    assert train(throughput, [0.03, 0.01], steps=600) < WORTH * 64 * 0.0075 * 1.1
    assert [name for name, _ in throughput.news(["a", "b"])] == ["a"]


def test_nothing_changes_before_all_are_known() -> None:
    throughput = Throughput()
    throughput.note("a", 10, KNOWN_AFTER_S)
    throughput.note("b", 1, KNOWN_AFTER_S / 2)
    assert throughput.weights([["a"], ["b"]]) == [1.0, 1.0]
    throughput.note("b", 1, KNOWN_AFTER_S / 2)
    assert throughput.weights([["a"], ["b"]]) == [1.0, pytest.approx(0.2)]
    assert throughput.weights([["a"], ["b"], ["new"]]) == [1.0, 0.2, pytest.approx(0.6)]


def test_even_the_slowest_has_a_share() -> None:
    throughput = Throughput()
    throughput.note("a", 10_000, 2.0)
    throughput.note("b", 1, 2.0)
    assert throughput.weights([["a"], ["b"]]) == [1.0, LEAST]


def test_a_fixed_cost_per_step_is_not_shared() -> None:
    """Whoever takes as long for few samples as for many keeps the least; the others have the rest."""
    throughput = Throughput()
    for _ in range(500):
        counts = shares(100, throughput.weights([["a"], ["b"]]))
        throughput.note("a", counts[0], 0.001 * counts[0])
        throughput.note("b", counts[1], 0.2)
    assert counts[1] <= 5


def test_a_worker_too_slow_for_a_share_gets_a_sample_now_and_then() -> None:
    plan = StepPlan(1, 0, ((0, 10),))
    assert plan.share_out([1.0, 1e-4, 0.0]) == [[(0, 10)], [], []]
    assert plan.share_out([1.0, 1e-4, 0.0], least=1) == [[(0, 9)], [(9, 10)], []]
    assert plan.share_out([1.0, 1.0], least=1) == plan.share_out([1.0, 1.0])
    assert StepPlan(1, 0, ((0, 1),)).share_out([1.0, 1e-4], least=1) == [[(0, 1)], []]


def test_a_replica_is_as_fast_as_its_slowest_worker() -> None:
    throughput = Throughput()
    for worker, samples in zip(NAMES, (100, 20, 50, 80), strict=True):
        throughput.note(worker, samples, KNOWN_AFTER_S)
    assert throughput.weights([["a", "b"], ["c", "d"]]) == [0.4, 1.0]
    assert throughput.parts == dict(zip(NAMES, (0.4, 0.4, 1.0, 1.0), strict=True))
