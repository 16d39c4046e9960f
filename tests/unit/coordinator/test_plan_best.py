"""The best evaluation, and the patience that ends a run, across interruptions."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from plan_driver import assert_once_an_epoch, drive, finish, through_json

from manyhands.coordinator.best_model import BestEvaluation
from manyhands.coordinator.metric_monitor import Monitor
from manyhands.coordinator.plan import Checkpoint, Evaluate, PlanConfig, Stop, TrainingPlan


@pytest.mark.parametrize(
    ("monitor", "values", "epochs", "best"),
    [
        ("loss", [3.0, 2.0, 2.5, 2.0, 1.0], 4, 2),
        ("val_error", [3.0, 2.0, 2.5, 1.9, 2.0, 2.0, 1.0], 6, 4),
        ("Perplexity", [9.0, 9.0, 9.0, 1.0], 3, 1),
        ("accuracy", [0.5, 0.6, 0.55, 0.6, 0.9], 4, 2),
        ("f1", [0.1, 0.2, 0.3, 0.4], 4, 4),
        ("mae", [3.0, 2.0, 2.5, 2.0, 1.0], 4, 2),
        ("min worst", [3.0, 2.0, 2.5, 2.0, 1.0], 4, 2),
        ("max loss", [0.1, 0.2, 0.3, 0.4], 4, 4),
        ("loss", [math.nan, math.nan, 1.0], 2, 0),
        ("accuracy", [0.1, math.nan, math.inf, 0.9], 3, 1),
    ],
)
def test_patience(monitor: str, values: list[float], epochs: int, best: int) -> None:
    training_plan, life = finish(values, monitor=monitor, patience=2)
    assert life.stop == ("finished" if epochs == len(values) else "early-stopped")
    assert len(life.evaluations) == epochs
    assert training_plan.best.evaluation.step == best
    assert life.checkpoints[-1].step == epochs
    assert_once_an_epoch(life.committed, training_plan.config, epochs)


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
    first = drive(TrainingPlan(whole.config), chance=chance, metric=metric, **how)
    if first.stop in ("finished", "early-stopped"):
        assert first.stop == life.stop
        return
    state = through_json(first.checkpoints[-1].state) if first.checkpoints else None
    training_plan = TrainingPlan(whole.config, state)
    second = drive(training_plan, chance=chance, metric=metric)
    assert (second.stop, training_plan.step, training_plan.epoch) == (
        life.stop,
        whole.step,
        whole.epoch,
    )
    assert training_plan.best.evaluation == whole.best.evaluation


def test_without_patience_a_bad_metric_stops_nothing() -> None:
    training_plan, life = finish([1.0, 2.0, 3.0, 4.0, 5.0])
    assert (
        life.stop,
        training_plan.best.evaluation.step,
        training_plan.best.evaluation.waited,
    ) == ("finished", 1, 4)


@pytest.mark.parametrize("monitor", ["loss", "accuracy"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_nan_is_never_best(monitor: str, value: float) -> None:
    training_plan, _ = finish([value, 0.5, value], monitor=monitor)
    assert training_plan.best.evaluation.metrics == {"other": 0.5, monitor: 0.5}
    only, _ = finish([value], monitor=monitor)
    assert only.best.evaluation.metrics is None


def test_a_resumed_plan_compares_with_its_saved_best() -> None:
    """Also where a metric was no number, which JSON can't say."""
    plan_config = PlanConfig(num_samples=4, batch_size=4, epochs=3)
    training_plan = TrainingPlan(plan_config)
    training_plan.next(1)
    training_plan.commit(1)
    assert isinstance(training_plan.next(1), Evaluate)
    assert training_plan.evaluated({"loss": 0.5, "other": math.nan})
    saved = training_plan.next(1)
    assert isinstance(saved, Checkpoint)
    again = TrainingPlan(plan_config, through_json(saved.state))
    assert math.isnan(again.last_metrics["other"])
    again.next(1)
    again.commit(2)
    again.next(1)
    assert not again.evaluated({"loss": 0.6, "other": 1.0})
    # By another monitor, which was no number then, the first number is the best.
    other = PlanConfig(num_samples=4, batch_size=4, epochs=3, monitor=Monitor("other", lower=False))
    changed = TrainingPlan(other, through_json(saved.state))
    changed.next(1)
    changed.commit(2)
    changed.next(1)
    assert changed.evaluated({"loss": 0.6, "other": 1.0})


def test_the_saved_best_counts_only_in_its_direction() -> None:
    """Also in runs that were saved without it."""
    training_plan, life = finish([3.0, 2.0, 2.5], monitor="max mae")
    saved = through_json(life.checkpoints[-1].state)
    assert (saved["monitor"], training_plan.best.evaluation.step) == ("max mae", 1)
    old = {name: value for name, value in saved.items() if name != "monitor"}
    for state in (saved, old):
        kept = TrainingPlan(PlanConfig(4, 4, 5, monitor=Monitor("mae", lower=False)), state)
        turned = TrainingPlan(PlanConfig(4, 4, 5, monitor=Monitor("mae", lower=True)), state)
        assert (kept.best.evaluation.step, turned.best.evaluation) == (1, BestEvaluation())


def test_the_best_is_one_that_is_saved() -> None:
    training_plan, _ = finish([3.0, 2.0, 1.0, 1.5], monitor="loss", patience=None)
    assert training_plan.best.evaluation.step == 3
    training_plan.best.keep([1, 2, 3, 4])
    assert training_plan.best.evaluation.step == 3
    training_plan.best.keep([1, 2, 4])
    assert training_plan.best.evaluation == BestEvaluation(
        {"loss": 2.0, "other": 0.5}, step=2, waited=2
    )
    training_plan.best.keep([4])
    assert training_plan.best.evaluation == BestEvaluation(waited=4)


def test_a_stop_without_saving_orders_no_checkpoint() -> None:
    training_plan = TrainingPlan(PlanConfig(6, 2, 5))
    steps = training_plan.next(2)
    training_plan.stop("diverged", save=False)
    assert [plan.step for plan in steps.plans] == [1, 2]
    assert training_plan.next(2) == Stop("diverged")


@given(
    values=st.lists(st.sampled_from([0.1, 0.2, 0.3]), min_size=1, max_size=7),
    patience=st.one_of(st.none(), st.integers(1, 3)),
    seed=st.integers(0, 2**32),
)
def test_one_start_after_the_other_up_to_a_target(
    values: list[float], patience: int | None, seed: int
) -> None:
    """Each ends at the first evaluation on target, with its epoch; together they are the training."""
    whole, life = finish(values, patience=patience)
    chance, state, committed = random.Random(seed), None, []
    metric, on_target = values.__getitem__, (0.2).__ge__
    while True:
        training_plan = TrainingPlan(whole.config, state)
        part = drive(training_plan, chance=chance, metric=metric, on_target=on_target)
        committed += part.committed
        if part.stop != "target":
            break
        assert on_target(values[part.results[-1][1]])
        assert not any(on_target(values[epoch]) for _, epoch in part.results[:-1])
        assert part.checkpoints[-1].step == training_plan.step
        state = through_json(part.checkpoints[-1].state)
        assert (state["committed"], state["epoch"]) == ([], part.results[-1][1] + 1)
    assert part.stop == life.stop
    assert committed == life.committed
