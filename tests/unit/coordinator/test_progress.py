"""Reports in any order: each step is committed once, with the right means."""

from __future__ import annotations

import itertools
import math
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from manyhands.control.messages import EvaluationReport, StepRow
from manyhands.coordinator.plan import StepPlan
from manyhands.coordinator.progress import WHOLE, MemberPart, StepProgress, evaluation_of
from manyhands.events.events import StepCommitted
from manyhands.measure import Measure
from manyhands.ranges import Range
from manyhands.transport.fields import read


def row(step: int, weight: float, loss: float, **changes: float) -> StepRow:
    values = {"lr": 0.1, "step_s": 1.0, "compute_s": 1.0, "wait_s": 0.0, "bytes_sent": 0, **changes}
    return StepRow(step, weight, weight * loss, **values)  # type: ignore[arg-type]


def expect(progress: StepProgress, steps: int, members: list[str]) -> None:
    for step in range(1, steps + 1):
        parts: dict[int, list[Range]] = {i: [(i, i + 1)] for i in range(len(members))}
        plan = StepPlan(step, 0, ((0, len(members)),))
        progress.expect(plan, parts, {n: [name] for n, name in enumerate(members)})


def events_of(progress: StepProgress) -> list[StepCommitted]:
    return [step.event for step in progress.committed()]


@given(
    num_members=st.integers(1, 4),
    steps=st.integers(1, 6),
    weights=st.lists(st.integers(1, 50), min_size=24, max_size=24),
    chance=st.randoms(use_true_random=False),
)
def test_any_order_of_members_commits_in_the_order_of_steps(
    num_members: int, steps: int, weights: list[int], chance: random.Random
) -> None:
    members = [f"worker-{i}" for i in range(num_members)]
    progress = StepProgress()
    expect(progress, steps, members)
    weight_of = dict(zip(itertools.product(range(1, 7), range(4)), weights, strict=True))
    pending = {name: list(range(1, steps + 1)) for name in members}
    committed: list[StepCommitted] = []
    while any(pending.values()):
        rank = chance.choice([i for i, name in enumerate(members) if pending[name]])
        step = pending[members[rank]].pop(0)
        one = row(step, weight_of[step, rank], loss=step + rank, part=rank)
        assert progress.add(members[rank], one)
        committed += events_of(progress)
        least = min(steps - len(left) for left in pending.values())
        assert [c.step for c in committed] == list(range(1, least + 1))
    assert len(progress) == 0
    for c in committed:
        counts = [weight_of[c.step, rank] for rank in range(num_members)]
        mean = sum(w * (c.step + i) for i, w in enumerate(counts)) / sum(counts)
        assert c.loss == pytest.approx(mean)


def test_a_loss_does_not_depend_on_the_order_of_reports() -> None:
    """Sums of floats do: 0.1 + 0.2 + 0.3 is another number than 0.3 + 0.2 + 0.1."""
    members = ["worker-0", "worker-1", "worker-2"]
    losses = set()
    for order in itertools.permutations(range(3)):
        progress = StepProgress()
        expect(progress, 1, members)
        for rank in order:
            progress.add(members[rank], row(1, 1.0, (0.1, 0.2, 0.3)[rank], part=rank))
        (committed,) = events_of(progress)
        losses.add(committed.loss)
    assert len(losses) == 1


def test_a_step_waits_for_all_and_names_who_is_missing() -> None:
    progress = StepProgress()
    expect(progress, 2, ["a", "b"])
    progress.add("b", row(1, 1.0, 1.0, part=1))
    progress.add("b", row(2, 1.0, 1.0, part=1))
    assert events_of(progress) == []
    assert progress.first is not None
    assert progress.first.missing == ["a"]
    progress.add("a", row(1, 1.0, 1.0))
    assert [c.step for c in events_of(progress)] == [1]


def test_times_and_bytes_of_a_step() -> None:
    progress = StepProgress()
    expect(progress, 1, ["a", "b"])
    slow = row(1, 3.0, 2.0, part=1, step_s=5.0, compute_s=2.0, wait_s=3.0, bytes_sent=10)
    progress.add("b", slow)
    progress.add("a", row(1, 1.0, 6.0, step_s=4.0, compute_s=4.0, wait_s=0.0, bytes_sent=20))
    (step,) = events_of(progress)
    assert (step.loss, step.step_s, step.compute_s, step.wait_s) == (3.0, 5.0, 3.0, 1.5)
    assert (step.bytes_sent, step.lr) == (30, 0.1)
    assert step.shares == {"a": ((0, 1),), "b": ((1, 2),)}


def test_times_of_parts_are_shares_of_the_time_of_all_workers() -> None:
    """Of two workers that each spent 2 s on the one part of a step, one came too late."""
    progress = StepProgress()
    progress.width = 2
    parted(progress, 1, 1)
    for member, dropped in (("a", True), ("b", False)):
        progress.assign((1, 0), member)
        times = {"step_s": 2.0, "compute_s": 0.5, "wait_s": 1.0, "bytes_sent": 5}
        progress.add(member, row(1, 1.0, 6.0, **times, dropped=dropped))
    (step,) = events_of(progress)
    assert (step.step_s, step.compute_s, step.wait_s, step.bytes_sent) == (2.0, 0.5, 1.0, 10)


def test_the_learning_rate_of_a_step_is_the_mean_over_its_parts() -> None:
    progress = StepProgress()
    expect(progress, 1, ["a", "b"])
    progress.add("a", row(1, 3.0, 1.0, lr=0.2))
    progress.add("b", row(1, 1.0, 1.0, lr=0.1, part=1))
    (step,) = events_of(progress)
    assert step.lr == pytest.approx(0.175)


def test_a_worker_without_samples_changes_no_mean() -> None:
    progress = StepProgress()
    expect(progress, 1, ["a", "b"])
    progress.add("a", row(1, 2.0, 1.5))
    progress.add("b", row(1, 0.0, 99.0, part=1))
    assert events_of(progress)[0].loss == 1.5


def test_a_step_in_which_nothing_counts_has_no_loss() -> None:
    """A job's own weights may add up to nothing, such as a batch of padding."""
    progress = StepProgress()
    expect(progress, 1, ["a"])
    progress.add("a", row(1, 0.0, 0.0))
    assert math.isnan(events_of(progress)[0].loss)


def parted(progress: StepProgress, step: int, number: int) -> None:
    """A step in parts that nobody holds yet."""
    plan = StepPlan(step, 0, ((10 * step, 10 * step + number),))
    progress.expect(plan, {n: [(10 * step + n, 10 * step + n + 1)] for n in range(number)})


@given(
    parts=st.lists(st.integers(1, 4), min_size=1, max_size=6),
    drops=st.integers(0, 8),
    chance=st.randoms(use_true_random=False),
)
def test_parts_in_any_order_commit_each_step_once(
    parts: list[int], drops: int, chance: random.Random
) -> None:
    progress = StepProgress()
    progress.width = 3
    for step, number in enumerate(parts):
        parted(progress, step, number)
    todo = [(step, part) for step, number in enumerate(parts) for part in range(number)]
    left = dict(enumerate(parts))
    committed: list[int] = []
    while todo:
        key = todo.pop(chance.randrange(len(todo)))
        member = chance.choice(["a", "b", "c"])
        progress.assign(key, member)
        assert not progress.add("d", row(key[0], 1.0, 1.0, part=key[1])), "it is not in d's hands"
        if drops and chance.random() < 0.3:
            drops -= 1
            assert not progress.add(member, row(key[0], 1.0, 9.0, part=key[1], dropped=True))
            assert progress.is_open(key)
            todo.append(key)
            continue
        assert progress.add(member, row(key[0], 1.0, 1.0, part=key[1]))
        assert not progress.add(member, row(key[0], 1.0, 5.0, part=key[1])), "once is enough"
        left[key[0]] -= 1
        for done in events_of(progress):
            committed.append(done.step)
            assert left[done.step] == 0
            assert done.loss == 1.0
            used = [
                i
                for ranges in done.shares.values()
                for low, high in ranges
                for i in range(low, high)
            ]
            assert sorted(used) == list(range(10 * done.step, 10 * done.step + parts[done.step]))
    assert sorted(committed) == list(range(len(parts)))
    assert len(progress) == 0


def test_shares_of_one_member_are_merged() -> None:
    progress = StepProgress()
    progress.width = 2
    parted(progress, 0, 3)
    for part, name in enumerate(["a", "b", "a"]):
        progress.assign((0, part), name)
        progress.add(name, row(0, 1.0, 1.0, part=part, step_s=3.0, staleness=part, bytes_sent=5))
    (step,) = progress.committed()
    assert step.event.shares == {"a": ((0, 1), (2, 3)), "b": ((1, 2),)}
    assert step.event.step_s == 4.5, "nine seconds of work, by two workers"
    assert (step.staleness, step.event.staleness) == ((0, 1, 2), 1.0)


def test_bytes_of_dropped_attempts_count() -> None:
    progress = StepProgress()
    parted(progress, 0, 1)
    for name, dropped in (("a", True), ("b", False)):
        progress.assign((0, 0), name)
        progress.add(name, row(0, 1.0, 2.0, dropped=dropped, bytes_sent=100))
    (step,) = events_of(progress)
    assert (step.bytes_sent, step.loss, step.shares) == (200, 2.0, {"b": ((0, 1),)})


def test_settled_parts_count_once_without_their_rows() -> None:
    progress = StepProgress()
    for step in range(3):
        parted(progress, step, 2)
        for part, name in enumerate("ab"):
            progress.assign((step, part), name)
    progress.add("a", row(0, 1.0, 4.0))
    progress.settle(dict.fromkeys([(0, 0), (0, 1), (1, 1), (7, 0)]), whole=False)
    (step0,) = events_of(progress)
    assert (step0.loss, step0.step) == (4.0, 0)
    assert step0.shares == {"a": ((0, 1),), "b": ((1, 2),)}
    assert not progress.add("b", row(1, 1.0, 9.0, part=1)), "it comes too late"
    assert progress.is_open((1, 0))
    assert not progress.is_open((1, 1))
    progress.settle({(1, 0): None}, whole=False)
    (step1,) = events_of(progress)
    assert step1.loss == 4.0, "the last loss that is known"
    assert [s.plan.step for s in progress.steps] == [2]


def test_in_lockstep_a_step_is_settled_whole_or_not_at_all() -> None:
    progress = StepProgress()
    expect(progress, 3, ["a", "b"])
    progress.add("a", row(1, 1.0, 1.0))
    progress.settle(dict.fromkeys([(2, 0), (2, 1)]), whole=True)
    assert [c.step for c in events_of(progress)] == [1, 2]
    assert [s.plan.step for s in progress.steps] == [3]


@pytest.mark.parametrize("known", [{(1, 1): (3.0, 9.0)}, {(1, 0): None, (1, WHOLE): (4.0, 11.0)}])
def test_the_loss_of_lost_rows_comes_from_the_members(known: dict[Any, Any]) -> None:
    progress = StepProgress()
    expect(progress, 1, ["a", "b"])
    progress.add("a", row(1, 1.0, 2.0))
    progress.settle(known, whole=True)
    (step,) = events_of(progress)
    assert step.loss == 11.0 / 4.0


def part(samples: int, sums: dict[str, list[float]]) -> EvaluationReport:
    return read(EvaluationReport, {"view": 1, "samples": samples, "sums": sums, "seconds": 0.0})


def test_an_evaluation_is_the_weighted_mean_of_its_parts() -> None:
    parts = [
        part(3, {"loss": [6.0, 3.0], "accuracy": [3.0, 3.0]}),
        part(0, {}),
        part(1, {"loss": [6.0, 1.0], "accuracy": [0.0, 1.0], "rare": [5.0, 1.0]}),
    ]
    for order in itertools.permutations(parts):
        assert evaluation_of(order, {}) == (4, {"loss": 3.0, "accuracy": 0.75, "rare": 5.0})


def test_an_evaluation_of_nothing_has_no_number() -> None:
    assert evaluation_of([part(0, {})], {}) == (0, {})
    samples, metrics = evaluation_of([part(2, {"loss": [0.0, 0.0]})], {})
    assert samples == 2
    assert math.isnan(metrics["loss"])


def test_a_committed_step_has_all_attempts_at_its_parts() -> None:
    progress = StepProgress()
    progress.width = 2
    progress.expect(StepPlan(1, 0, ((0, 6),)), {0: [(0, 2)], 1: [(2, 5)], 2: [(5, 6)]})
    for part, name in enumerate(("worker-0", "worker-1", "worker-1")):
        progress.assign((1, part), name)
    dropped = row(1, 2, 1.0, part=0)
    dropped.dropped = True
    assert not progress.add("worker-0", dropped)
    progress.assign((1, 0), "worker-1")
    first, second = row(1, 2, 1.0, part=0), row(1, 3, 1.0, part=1)
    assert progress.add("worker-1", second)
    assert progress.add("worker-1", first)
    progress.settle({(1, 2): None}, whole=False)
    (step,) = progress.committed()
    assert list(step.parts) == [
        MemberPart("worker-0", 0, dropped, applied=False),
        MemberPart("worker-1", 2, first),
        MemberPart("worker-1", 3, second),
        MemberPart("worker-1", 1, None),
    ]


def test_a_part_of_a_replica_counts_once_and_all_its_workers_spend_time_and_bytes() -> None:
    progress = StepProgress()
    progress.measures = {"sent": Measure("sent", rule="sum")}
    replicas = [["a", "b"], ["c", "d"]]
    plan = StepPlan(1, 0, ((0, 6),))
    progress.expect(plan, {0: [(0, 4)], 1: [(4, 6)]}, dict(enumerate(replicas)))
    sent = {"measures": {"sent": (5.0, 1.0)}}
    assert progress.add("b", row(1, 9.0, 9.0, step_s=3.0, compute_s=2.0, bytes_sent=10, **sent))
    assert not progress.add("b", row(1, 9.0, 9.0)), "a report counts once"
    assert not progress.add("c", row(1, 9.0, 9.0)), "its part is another"
    assert progress.add("c", row(1, 2.0, 4.0, part=1, bytes_sent=1, **sent))
    assert progress.add("d", row(1, 9.0, 9.0, part=1, bytes_sent=2))
    assert events_of(progress) == []
    assert progress.steps[0].missing == ["a"]
    assert progress.add("a", row(1, 4.0, 1.0, bytes_sent=3))
    (event,) = events_of(progress)
    assert event.loss == pytest.approx((4 * 1.0 + 2 * 4.0) / 6)
    assert event.shares == {"a": ((0, 4),), "c": ((4, 6),)}
    assert (event.step_s, event.compute_s, event.bytes_sent) == (3.0, 1.25, 16)
    assert event.measures == {"sent": 10.0}


def test_one_report_of_a_replica_says_that_a_step_is_in_the_weights() -> None:
    progress = StepProgress()
    for step in (1, 2):
        progress.expect(StepPlan(step, 0, ((0, 2),)), {0: [(0, 2)]}, {0: ["a", "b"]})
    progress.add("b", row(1, 2.0, 5.0, step_s=2.0))
    progress.settle({(1, WHOLE): (2.0, 6.0)}, whole=True)
    (event,) = events_of(progress)
    assert (event.step, event.loss, event.step_s) == (1, 3.0, 2.0)
    assert len(progress) == 1
