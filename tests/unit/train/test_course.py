"""The course of a training: whatever interrupts it, every sample of every epoch is used once."""

from __future__ import annotations

import json
import math
import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from manyhands.errors import CheckpointError
from manyhands.state.files import jsonable
from manyhands.train.course import Checkpoint, Course, Evaluate, StepPlan, Steps, Stop, Syllabus


@dataclass
class Life:
    """What came of driving a course until it stopped, or was cut off."""

    committed: list[StepPlan] = field(default_factory=list)
    evaluations: list[tuple[int, int]] = field(default_factory=list)
    """(step, epoch)"""
    checkpoints: list[Checkpoint] = field(default_factory=list)
    """Those that count: every step up to them is committed."""
    orders: list[Any] = field(default_factory=list)
    stop: str | None = None


def drive(
    course: Course,
    *,
    chance: random.Random,
    max_lease: int = 4,
    metric: Any = lambda epoch: 1.0 / (1 + epoch),
    stop_after: int | None = None,
    cut_after: int | None = None,
) -> Life:
    """Play conductor and workers: orders ahead, commits behind, by chance; stop or cut by count."""
    life = Life()
    written: list[Checkpoint] = []
    for moment in range(100_000):
        if moment == cut_after:
            return life
        if moment == stop_after:
            course.stop("interrupted")
        if course.open_steps and chance.random() < 0.5:
            life.committed.append(course.commit(course.open_steps[0].step))
        elif (order := course.next(chance.randint(1, max_lease))) is None:
            if not course.open_steps:
                monitor = course.syllabus.monitor
                course.evaluated({"other": 0.5, monitor: metric(course.epoch)})
        else:
            life.orders.append(order)
            if isinstance(order, Evaluate):
                life.evaluations.append((order.step, order.epoch))
            elif isinstance(order, Checkpoint):
                written.append(order)
            elif isinstance(order, Stop):
                while course.open_steps:
                    life.committed.append(course.commit(course.open_steps[0].step))
                life.checkpoints += written
                life.stop = order.reason
                return life
        done = [c for c in written if c.step <= course.committed_step]
        written = [c for c in written if c not in done]
        life.checkpoints += done
    raise AssertionError("the course has no end")


def through_json(state: Any) -> Any:
    return json.loads(json.dumps(jsonable(state), allow_nan=False))


def assert_once_an_epoch(plans: list[StepPlan], syllabus: Syllabus, epochs: int) -> None:
    assert [plan.step for plan in plans] == list(range(1, len(plans) + 1))
    assert [plan.epoch for plan in plans] == sorted(plan.epoch for plan in plans)
    used = Counter((p.epoch, i) for p in plans for low, high in p.ranges for i in range(low, high))
    assert used == Counter((e, i) for e in range(epochs) for i in range(syllabus.num_samples))
    assert all(1 <= plan.samples <= syllabus.batch_size for plan in plans)


def due(syllabus: Syllabus) -> list[int]:
    """The epochs after which to evaluate."""
    if not syllabus.has_eval:
        return []
    last = syllabus.epochs - 1
    return [e for e in range(syllabus.epochs) if (e + 1) % syllabus.eval_every == 0 or e == last]


syllabi = st.builds(
    Syllabus,
    num_samples=st.integers(1, 40),
    batch_size=st.integers(1, 15),
    epochs=st.integers(1, 4),
    eval_every=st.integers(1, 3),
    has_eval=st.booleans(),
    checkpoint_every=st.integers(0, 5),
    checkpoints=st.booleans(),
)


@settings(max_examples=150)
@given(syllabus=syllabi, seed=st.integers(0, 2**32), max_lease=st.integers(1, 6))
def test_a_whole_course(syllabus: Syllabus, seed: int, max_lease: int) -> None:
    course = Course(syllabus)
    life = drive(course, chance=random.Random(seed), max_lease=max_lease)
    assert life.stop == "finished"
    assert_once_an_epoch(life.committed, syllabus, syllabus.epochs)
    assert len(life.committed) == syllabus.num_steps
    assert course.samples_used == syllabus.num_samples * syllabus.epochs
    assert [epoch for _, epoch in life.evaluations] == due(syllabus)
    per_epoch = syllabus.steps_per_epoch
    assert all(step == (epoch + 1) * per_epoch for step, epoch in life.evaluations)
    if syllabus.checkpoints or syllabus.checkpoint_every:
        saved = [checkpoint.step for checkpoint in life.checkpoints]
        every = syllabus.checkpoint_every
        wanted = {s for s in range(1, syllabus.num_steps) if every and s % every == 0}
        ends = {(e + 1) * per_epoch for e in range(syllabus.epochs)}
        wanted = wanted | ends if syllabus.checkpoints else wanted - ends
        assert set(saved) >= wanted
        assert len(saved) == len(set(saved))
    if syllabus.checkpoints:
        assert isinstance(life.orders[-2], Checkpoint)
        assert life.orders[-2].step == syllabus.num_steps


@settings(max_examples=250)
@given(
    syllabus=syllabi,
    seed=st.integers(0, 2**32),
    moment=st.integers(0, 120),
    kill=st.booleans(),
    other_batch=st.integers(1, 15),
)
def test_an_interrupted_course_goes_on(
    syllabus: Syllabus, seed: int, moment: int, kill: bool, other_batch: int
) -> None:
    """Stopped or killed anywhere, then resumed from the newest checkpoint, with another batch size."""
    syllabus = Syllabus(**{**vars(syllabus), "checkpoints": True})
    chance = random.Random(seed)
    how = {"cut_after": moment} if kill else {"stop_after": moment}
    first = drive(Course(syllabus), chance=chance, **how)
    if not kill:
        assert first.stop in ("interrupted", "finished")
        assert first.checkpoints[-1].step == len(first.committed), "stopped with all of it saved"
    kept = first.checkpoints[-1] if first.checkpoints else None
    again = Syllabus(**{**vars(syllabus), "batch_size": other_batch})
    course = Course(again, through_json(kept.state) if kept else None)
    start = kept.step if kept else 0
    assert course.step == start
    second = drive(course, chance=chance)
    assert second.stop == "finished"
    plans = [plan for plan in first.committed if plan.step <= start] + second.committed
    wide = Syllabus(**{**vars(syllabus), "batch_size": max(other_batch, syllabus.batch_size)})
    assert_once_an_epoch(plans, wide, syllabus.epochs)
    assert course.samples_used == syllabus.num_samples * syllabus.epochs
    # An evaluation whose result no checkpoint holds is done again; none is left out.
    epochs = [epoch for _, epoch in second.evaluations]
    before = [e for _, e in first.evaluations if e not in epochs]
    assert sorted(before + epochs) == due(syllabus)
    if second.committed:
        assert second.checkpoints[-1].step == plans[-1].step


@given(syllabus=syllabi, seed=st.integers(0, 2**32), moment=st.integers(0, 60))
def test_the_state_survives_json(syllabus: Syllabus, seed: int, moment: int) -> None:
    course = Course(syllabus)
    drive(course, chance=random.Random(seed), cut_after=moment)
    state = through_json(course.state())
    assert Course(syllabus, state).state() == state == course.state()


def finish(values: list[float], **changes: Any) -> tuple[Course, Life]:
    """One epoch of one step for each value of the monitored metric."""
    syllabus = Syllabus(num_samples=4, batch_size=4, epochs=len(values), **changes)
    course = Course(syllabus)
    return course, drive(course, chance=random.Random(0), metric=lambda epoch: values[epoch])


@pytest.mark.parametrize(
    ("monitor", "values", "epochs", "best"),
    [
        ("loss", [3.0, 2.0, 2.5, 2.0, 1.0], 4, 2),
        ("val_error", [3.0, 2.0, 2.5, 1.9, 2.0, 2.0, 1.0], 6, 4),
        ("Perplexity", [9.0, 9.0, 9.0, 1.0], 3, 1),
        ("accuracy", [0.5, 0.6, 0.55, 0.6, 0.9], 4, 2),
        ("f1", [0.1, 0.2, 0.3, 0.4], 4, 4),
        ("loss", [math.nan, math.nan, 1.0], 2, 0),
        ("accuracy", [0.1, math.nan, math.inf, 0.9], 3, 1),
    ],
)
def test_patience(monitor: str, values: list[float], epochs: int, best: int) -> None:
    course, life = finish(values, monitor=monitor, patience=2)
    assert life.stop == ("finished" if epochs == len(values) else "early-stopped")
    assert len(life.evaluations) == epochs
    assert course.best.step == best
    assert life.checkpoints[-1].step == epochs
    assert_once_an_epoch(life.committed, course.syllabus, epochs)


@given(
    values=st.lists(st.sampled_from([0.1, 0.2, 0.3, math.nan]), min_size=2, max_size=7),
    patience=st.integers(1, 3),
    monitor=st.sampled_from(["loss", "accuracy"]),
    seed=st.integers(0, 2**32),
    moment=st.integers(0, 40),
    kill=st.booleans(),
)
def test_an_interruption_changes_nothing_of_the_patience(
    values: list[float], patience: int, monitor: str, seed: int, moment: int, kill: bool
) -> None:
    whole, life = finish(values, monitor=monitor, patience=patience)
    chance = random.Random(seed)
    how = {"cut_after": moment} if kill else {"stop_after": moment}
    metric = values.__getitem__
    first = drive(Course(whole.syllabus), chance=chance, metric=metric, **how)
    if first.stop in ("finished", "early-stopped"):
        assert first.stop == life.stop
        return
    state = through_json(first.checkpoints[-1].state) if first.checkpoints else None
    course = Course(whole.syllabus, state)
    second = drive(course, chance=chance, metric=metric)
    assert (second.stop, course.step, course.epoch) == (life.stop, whole.step, whole.epoch)
    assert course.best == whole.best


def test_without_patience_a_bad_metric_stops_nothing() -> None:
    course, life = finish([1.0, 2.0, 3.0, 4.0, 5.0])
    assert (life.stop, course.best.step, course.best.waited) == ("finished", 1, 4)


@pytest.mark.parametrize("monitor", ["loss", "accuracy"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_no_number_is_never_best(monitor: str, value: float) -> None:
    course, _ = finish([value, 0.5, value], monitor=monitor)
    assert course.best.metrics == {"other": 0.5, monitor: 0.5}
    only, _ = finish([value], monitor=monitor)
    assert only.best.metrics is None


def test_a_resumed_course_compares_with_what_it_knew() -> None:
    """Also where a metric was no number, which JSON can't say."""
    syllabus = Syllabus(num_samples=4, batch_size=4, epochs=3)
    course = Course(syllabus)
    course.next(1)
    course.commit(1)
    assert isinstance(course.next(1), Evaluate)
    assert course.evaluated({"loss": 0.5, "other": math.nan})
    saved = course.next(1)
    assert isinstance(saved, Checkpoint)
    again = Course(syllabus, through_json(saved.state))
    assert math.isnan(again.last_metrics["other"])
    again.next(1)
    again.commit(2)
    again.next(1)
    assert not again.evaluated({"loss": 0.6, "other": 1.0})
    # By another monitor, which was no number then, the first number is the best.
    other = Syllabus(num_samples=4, batch_size=4, epochs=3, monitor="other")
    changed = Course(other, through_json(saved.state))
    changed.next(1)
    changed.commit(2)
    changed.next(1)
    assert changed.evaluated({"loss": 0.6, "other": 1.0})


def test_nothing_is_ordered_while_an_evaluation_is_awaited() -> None:
    course = Course(Syllabus(num_samples=3, batch_size=2, epochs=2))
    assert isinstance(course.next(9), Steps)
    assert course.next(9) == Evaluate(2, 0)
    assert course.awaiting
    assert course.next(9) is None
    course.stop("interrupted")
    saved = course.next(9)
    assert isinstance(saved, Checkpoint)
    assert course.next(9) == Stop("interrupted")
    # The evaluation that was awaited is the first thing that a resumed run does.
    assert Course(course.syllabus, through_json(saved.state)).next(9) == Evaluate(2, 0)


def test_a_finished_course_trained_longer_goes_on_with_the_next_epoch() -> None:
    course, life = finish([3.0, 2.0])
    state = through_json(life.checkpoints[-1].state)
    assert Course(course.syllabus, state).next(5) == Stop("finished")
    longer = Syllabus(**{**vars(course.syllabus), "epochs": 3})
    order = Course(longer, state).next(5)
    assert isinstance(order, Steps)
    assert [(plan.step, plan.epoch) for plan in order.plans] == [(3, 2)]


def test_data_of_another_size_is_refused_in_the_middle_of_an_epoch_only() -> None:
    course = Course(Syllabus(num_samples=10, batch_size=4, epochs=2))
    course.next(1)
    course.commit(1)
    smaller = Syllabus(num_samples=8, batch_size=4, epochs=2)
    with pytest.raises(CheckpointError, match=r"epoch of 10 samples, and data\(\) has 8 now"):
        Course(smaller, through_json(course.state()))
    course.next(5)
    course.next(5)
    course.evaluated({"loss": 1.0})
    between = course.next(5)
    assert isinstance(between, Checkpoint)
    order = Course(smaller, through_json(between.state)).next(5)
    assert isinstance(order, Steps)
    assert sum(plan.samples for plan in order.plans) == 8


def test_steps_are_committed_in_order() -> None:
    course = Course(Syllabus(num_samples=10, batch_size=4, epochs=2))
    course.next(3)
    with pytest.raises(AssertionError, match="step 2 committed before step 1"):
        course.commit(2)


@given(st.integers(1, 30), st.lists(st.integers(1, 9), min_size=1, max_size=5))
def test_a_step_is_shared_out_whole(samples: int, weights: list[int]) -> None:
    plan = StepPlan(1, 0, ((2, 2 + samples), (40, 45)))
    parts = plan.share_out(weights)
    assert len(parts) == len(weights)
    used = [i for part in parts for low, high in part for i in range(low, high)]
    assert used == [*range(2, 2 + samples), *range(40, 45)]
