"""Plans that end, and are evaluated, in the middle of an epoch."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_driver import Life, drive, due, plan_configs, scalings, through_json

from manyhands.coordinator.plan import (
    Checkpoint,
    Evaluate,
    PlanConfig,
    StepPlan,
    Stop,
    TrainingPlan,
    TrainSteps,
)

PLANS = plan_configs(steps=st.none() | st.integers(1, 40), eval_steps=st.integers(0, 7))
SCALED_PLANS = plan_configs(
    num_samples=st.integers(1, 60),
    batch_size=st.integers(1, 12),
    steps=st.integers(1, 30),
    eval_steps=st.integers(0, 7),
    scaling=scalings,
)


def assert_uses_each_sample_once(plans: list[StepPlan], config: PlanConfig) -> None:
    """Whole epochs, then the beginning of one; no sample of an epoch twice."""
    assert [plan.step for plan in plans] == list(range(1, len(plans) + 1))
    assert [plan.epoch for plan in plans] == sorted(plan.epoch for plan in plans)
    used = Counter((p.epoch, i) for p in plans for low, high in p.ranges for i in range(low, high))
    assert set(used.values()) <= {1}
    last = plans[-1].epoch
    for epoch in range(last):
        assert all((epoch, sample) in used for sample in range(config.num_samples))


def evaluated(life: Life) -> list[int]:
    return [step for step, _ in life.results]


@settings(max_examples=200)
@given(
    config=PLANS,
    seed=st.integers(0, 2**32),
    max_lease=st.integers(1, 6),
    in_order=st.booleans(),
)
def test_a_whole_plan(config: PlanConfig, seed: int, max_lease: int, in_order: bool) -> None:
    training_plan = TrainingPlan(config)
    assert training_plan.num_steps == config.num_steps
    chance = random.Random(seed)
    life = drive(training_plan, chance=chance, max_lease=max_lease, in_order=in_order)
    assert life.stop == "finished"
    plans = sorted(life.committed, key=lambda plan: plan.step)
    assert len(plans) == config.num_steps == training_plan.num_steps
    assert_uses_each_sample_once(plans, config)
    assert training_plan.samples_used == sum(plan.samples for plan in plans)
    assert evaluated(life) == due(config)
    assert all(order.step == config.num_steps for order in life.orders[-2:-1])
    assert isinstance(life.orders[-2], Checkpoint)


@settings(max_examples=200)
@given(config=PLANS, seed=st.integers(0, 2**32), moment=st.integers(0, 120), kill=st.booleans())
def test_an_interruption_changes_nothing(
    config: PlanConfig, seed: int, moment: int, kill: bool
) -> None:
    """Stopped or killed anywhere, and resumed: the same samples in the same steps, the same evaluations."""
    chance = random.Random(seed)
    whole = drive(TrainingPlan(config), chance=random.Random(seed))
    how = {"cut_after": moment} if kill else {"stop_after": moment}
    first = drive(TrainingPlan(config), chance=chance, **how)
    kept = first.checkpoints[-1] if first.checkpoints else None
    training_plan = TrainingPlan(config, through_json(kept.state) if kept else None)
    start = kept.step if kept else 0
    second = drive(training_plan, chance=chance)
    assert second.stop == "finished"
    before = [plan for plan in first.committed if plan.step <= start]
    assert before + second.committed == whole.committed
    # An evaluation whose result no checkpoint has is done again; none is left out.
    again = evaluated(second)
    assert sorted({*evaluated(first), *again}) == due(config)
    assert all(step >= start for step in again)


@settings(max_examples=200)
@given(
    config=PLANS,
    seed=st.integers(0, 2**32),
    moments=st.lists(st.integers(0, 120), max_size=6),
)
def test_what_is_taken_back_comes_again(config: PlanConfig, seed: int, moments: list[int]) -> None:
    training_plan = TrainingPlan(config)
    life = drive(training_plan, chance=random.Random(seed), back_after=moments)
    assert life.stop == "finished"
    assert life.committed == drive(TrainingPlan(config), chance=random.Random(seed)).committed
    assert evaluated(life) == due(config)
    assert life.checkpoints[-1].step == config.num_steps


@settings(max_examples=200)
@given(
    config=SCALED_PLANS,
    worlds=st.dictionaries(st.integers(0, 80), st.integers(1, 6), max_size=5),
    seed=st.integers(0, 2**32),
    moment=st.none() | st.integers(0, 80),
)
def test_steps_are_those_of_the_reference_if_the_batch_follows_the_workers(
    config: PlanConfig, worlds: dict[int, int], seed: int, moment: int | None
) -> None:
    """As many samples, and as many steps of the schedule, whatever the batches are."""
    chance = random.Random(seed)
    first = drive(TrainingPlan(config), chance=chance, worlds=worlds, stop_after=moment)
    state = through_json(first.checkpoints[-1].state) if first.checkpoints else None
    training_plan = TrainingPlan(config, state)
    plans = first.committed + drive(training_plan, chance=chance).committed
    assert_uses_each_sample_once(plans, config)
    epochs, steps = divmod(config.num_steps, config.steps_per_epoch)
    assert training_plan.samples_used == epochs * config.num_samples + steps * config.batch_size
    assert sum(plan.ticks for plan in plans) == config.num_steps
    assert training_plan.num_steps == len(plans)


@given(config=PLANS, more=st.integers(1, 20), seed=st.integers(0, 2**32))
def test_more_steps_continue_from_the_end(config: PlanConfig, more: int, seed: int) -> None:
    config = replace(config, steps=config.num_steps)
    life = drive(TrainingPlan(config), chance=random.Random(seed))
    longer = replace(config, steps=config.num_steps + more)
    resumed = TrainingPlan(longer, through_json(life.checkpoints[-1].state))
    second = drive(resumed, chance=random.Random(seed))
    assert second.stop == "finished"
    assert_uses_each_sample_once(life.committed + second.committed, longer)
    assert len(life.committed) + len(second.committed) == longer.num_steps
    later = [step for step in due(longer) if step > config.num_steps]
    assert evaluated(second) == later


@settings(max_examples=200)
@given(
    config=PLANS,
    seed=st.integers(0, 2**32),
    max_steps=st.integers(1, 12),
    moments=st.lists(st.integers(0, 120), max_size=4),
)
def test_one_start_after_the_other_up_to_a_limit(
    config: PlanConfig, seed: int, max_steps: int, moments: list[int]
) -> None:
    """Each start ends at its limit, evaluated and saved if due; together they are the whole training."""
    whole = drive(TrainingPlan(config), chance=random.Random(seed))
    chance, state, step = random.Random(seed), None, 0
    plans: list[StepPlan] = []
    results: list[int] = []
    while True:
        limited = replace(config, max_step=step + max_steps)
        training_plan = TrainingPlan(limited, state)
        life = drive(training_plan, chance=chance, back_after=moments)
        assert training_plan.num_steps == config.num_steps
        plans += life.committed
        results += evaluated(life)
        step, state = life.checkpoints[-1].step, through_json(life.checkpoints[-1].state)
        assert step == min(limited.max_step or 0, config.num_steps)
        assert results == [each for each in due(config) if each <= step]
        if life.stop == "finished":
            break
        assert life.stop == "limit"
    assert step == config.num_steps
    assert plans == whole.committed


def test_fewer_steps_than_are_done_end_at_once() -> None:
    config = PlanConfig(num_samples=10, batch_size=4, steps=7)
    life = drive(TrainingPlan(config), chance=random.Random(0))
    state = through_json(life.checkpoints[-1].state)
    assert TrainingPlan(replace(config, steps=5), state).next(9) == Stop("finished")


def test_a_stop_before_the_last_evaluation_is_no_end() -> None:
    config = PlanConfig(num_samples=10, batch_size=4, steps=4, eval_every=9)
    training_plan = TrainingPlan(config)
    for _ in range(4):
        order = training_plan.next(9)
        if isinstance(order, Evaluate):
            break
    while training_plan.committed_step < training_plan.step:
        training_plan.commit(training_plan.committed_step + 1)
    assert training_plan.awaiting
    training_plan.stop("interrupted")
    saved = training_plan.next(9)
    assert isinstance(saved, Checkpoint)
    assert training_plan.next(9) == Stop("interrupted")
    resumed = TrainingPlan(config, through_json(saved.state))
    assert resumed.next(9) == Evaluate(4, 1)
    resumed.evaluated({"loss": 1.0})
    assert isinstance(resumed.next(9), Checkpoint)
    assert resumed.next(9) == Stop("finished")


@pytest.mark.parametrize("values", [[3.0, 1.0, 2.0, 2.5, 0.5], [1.0, 2.0, 3.0, 4.0, 5.0]])
def test_the_best_model_is_saved_in_the_middle_of_an_epoch(values: list[float]) -> None:
    config = PlanConfig(num_samples=100, batch_size=2, steps=10, eval_steps=2)
    training_plan, saved, found = TrainingPlan(config), [], iter(values)
    while not isinstance(order := training_plan.next(9), Stop):
        match order:
            case TrainSteps(plans):
                for plan in plans:
                    training_plan.commit(plan.step)
            case Evaluate():
                training_plan.evaluated({"loss": next(found)})
            case Checkpoint(step, state):
                saved.append(step)
                assert state["best"]["step"] == training_plan.best.evaluation.step
    best_so_far = [2 * n for n in range(1, 6) if values[n - 1] == min(values[:n])]
    assert saved == sorted({*best_so_far, 10})


def test_the_patience_ends_a_plan_in_the_middle_of_an_epoch() -> None:
    config = PlanConfig(num_samples=100, batch_size=2, epochs=2, eval_steps=3, patience=2)
    life = drive(TrainingPlan(config), chance=random.Random(0), metric=lambda epoch: 1.0)
    assert life.stop == "early-stopped"
    assert evaluated(life) == [3, 6, 9]
    assert [checkpoint.step for checkpoint in life.checkpoints] == [3, 9]


def test_a_state_of_an_earlier_version_continues() -> None:
    """Between two epochs and in the middle of one, as versions saved it that evaluated after epochs only."""
    between = {"epoch": 2, "step": 6, "num_samples": 10, "committed": [], "evaluated": False}
    within = {"epoch": 1, "step": 4, "num_samples": 10, "committed": [[0, 4]], "evaluated": False}
    for state, first in ((between, 7), (within, 5)):
        for config in (
            PlanConfig(num_samples=10, batch_size=4, epochs=4),
            PlanConfig(num_samples=10, batch_size=4, steps=11, eval_steps=5),
        ):
            resumed = TrainingPlan(config, state)
            life = drive(resumed, chance=random.Random(0))
            assert [plan.step for plan in life.committed] == list(
                range(first, config.num_steps + 1)
            )
            assert evaluated(life) == [step for step in due(config) if step >= first]
