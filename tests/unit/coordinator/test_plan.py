"""The training plan: every sample of every epoch is used once, however it is interrupted."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_driver import assert_once_an_epoch, drive, finish, plan_configs, through_json

from manyhands.coordinator.plan import (
    Checkpoint,
    Evaluate,
    PlanConfig,
    StepPlan,
    Stop,
    TrainingPlan,
    TrainSteps,
)
from manyhands.errors import CheckpointError


def due(plan_config: PlanConfig) -> list[int]:
    """The epochs after which to evaluate."""
    if not plan_config.has_eval:
        return []
    last = plan_config.epochs - 1
    return [
        e for e in range(plan_config.epochs) if (e + 1) % plan_config.eval_every == 0 or e == last
    ]


PLANS = plan_configs(epochs=st.integers(1, 4))


@settings(max_examples=150)
@given(plan_config=PLANS, seed=st.integers(0, 2**32), max_lease=st.integers(1, 6))
def test_a_whole_plan(plan_config: PlanConfig, seed: int, max_lease: int) -> None:
    training_plan = TrainingPlan(plan_config)
    life = drive(training_plan, chance=random.Random(seed), max_lease=max_lease)
    assert life.stop == "finished"
    assert_once_an_epoch(life.committed, plan_config, plan_config.epochs)
    assert len(life.committed) == plan_config.num_steps
    assert training_plan.samples_used == plan_config.num_samples * plan_config.epochs
    assert [epoch for _, epoch in life.evaluations] == due(plan_config)
    per_epoch = plan_config.steps_per_epoch
    assert all(step == (epoch + 1) * per_epoch for step, epoch in life.evaluations)
    saved = [checkpoint.step for checkpoint in life.checkpoints]
    every = plan_config.checkpoint_every
    wanted = {s for s in range(1, plan_config.num_steps) if every and s % every == 0}
    ends = {(e + 1) * per_epoch for e in range(plan_config.epochs)}
    assert set(saved) == wanted | ends
    assert len(saved) == len(set(saved))
    assert isinstance(life.orders[-2], Checkpoint)
    assert life.orders[-2].step == plan_config.num_steps


@settings(max_examples=250)
@given(
    plan_config=PLANS,
    seed=st.integers(0, 2**32),
    moment=st.integers(0, 120),
    kill=st.booleans(),
    other_batch=st.integers(1, 15),
)
def test_an_interrupted_plan_resumes(
    plan_config: PlanConfig, seed: int, moment: int, kill: bool, other_batch: int
) -> None:
    """Stopped or killed anywhere, then resumed from the newest checkpoint, with another batch size."""
    chance = random.Random(seed)
    how = {"cut_after": moment} if kill else {"stop_after": moment}
    first = drive(TrainingPlan(plan_config), chance=chance, **how)
    if not kill:
        assert first.stop in ("interrupted", "finished")
        assert first.checkpoints[-1].step == len(first.committed), "stopped with all of it saved"
    kept = first.checkpoints[-1] if first.checkpoints else None
    again = PlanConfig(**{**vars(plan_config), "batch_size": other_batch})
    training_plan = TrainingPlan(again, through_json(kept.state) if kept else None)
    start = kept.step if kept else 0
    assert training_plan.step == start
    second = drive(training_plan, chance=chance)
    assert second.stop == "finished"
    plans = [plan for plan in first.committed if plan.step <= start] + second.committed
    wide = PlanConfig(
        **{**vars(plan_config), "batch_size": max(other_batch, plan_config.batch_size)}
    )
    assert_once_an_epoch(plans, wide, plan_config.epochs)
    assert training_plan.samples_used == plan_config.num_samples * plan_config.epochs
    # An evaluation whose result no checkpoint holds is done again; none is left out.
    epochs = [epoch for _, epoch in second.evaluations]
    before = [e for _, e in first.evaluations if e not in epochs]
    assert sorted(before + epochs) == due(plan_config)
    if second.committed:
        assert second.checkpoints[-1].step == plans[-1].step


@given(plan_config=PLANS, seed=st.integers(0, 2**32), moment=st.integers(0, 60))
def test_the_state_survives_json(plan_config: PlanConfig, seed: int, moment: int) -> None:
    training_plan = TrainingPlan(plan_config)
    drive(training_plan, chance=random.Random(seed), cut_after=moment)
    state = through_json(training_plan.state())
    assert TrainingPlan(plan_config, state).state() == state == training_plan.state()


def test_nothing_is_ordered_while_an_evaluation_is_awaited() -> None:
    training_plan = TrainingPlan(PlanConfig(num_samples=3, batch_size=2, epochs=2))
    assert isinstance(training_plan.next(9), TrainSteps)
    assert training_plan.next(9) == Evaluate(2, 0)
    assert training_plan.awaiting
    assert training_plan.next(9) is None
    training_plan.stop("interrupted")
    saved = training_plan.next(9)
    assert isinstance(saved, Checkpoint)
    assert training_plan.next(9) == Stop("interrupted")
    # The evaluation that was awaited is the first thing that a resumed run does.
    assert TrainingPlan(training_plan.config, through_json(saved.state)).next(9) == Evaluate(2, 0)


def test_an_evaluation_that_is_done_is_not_done_again() -> None:
    training_plan = TrainingPlan(PlanConfig(num_samples=3, batch_size=3, epochs=2))
    training_plan.next(1)
    training_plan.commit(1)
    assert training_plan.next(1) == Evaluate(1, 0)
    training_plan.evaluated({"loss": 1.0})
    training_plan.stop("interrupted")
    saved = training_plan.next(1)
    assert isinstance(saved, Checkpoint)
    again = TrainingPlan(training_plan.config, through_json(saved.state))
    assert isinstance(again.next(1), Checkpoint)
    order = again.next(1)
    assert isinstance(order, TrainSteps)
    assert [(plan.step, plan.epoch) for plan in order.plans] == [(2, 1)]


def test_a_finished_plan_with_more_epochs_continues() -> None:
    training_plan, life = finish([3.0, 2.0])
    state = through_json(life.checkpoints[-1].state)
    assert TrainingPlan(training_plan.config, state).next(5) == Stop("finished")
    longer = PlanConfig(**{**vars(training_plan.config), "epochs": 3})
    order = TrainingPlan(longer, state).next(5)
    assert isinstance(order, TrainSteps)
    assert [(plan.step, plan.epoch) for plan in order.plans] == [(3, 2)]


def test_data_of_another_size_is_refused_in_the_middle_of_an_epoch_only() -> None:
    training_plan = TrainingPlan(PlanConfig(num_samples=10, batch_size=4, epochs=2))
    training_plan.next(1)
    training_plan.commit(1)
    smaller = PlanConfig(num_samples=8, batch_size=4, epochs=2)
    with pytest.raises(CheckpointError, match=r"epoch of 10 samples, and data\(\) has 8 now"):
        TrainingPlan(smaller, through_json(training_plan.state()))
    training_plan.next(5)
    training_plan.next(5)
    training_plan.evaluated({"loss": 1.0})
    between = training_plan.next(5)
    assert isinstance(between, Checkpoint)
    order = TrainingPlan(smaller, through_json(between.state)).next(5)
    assert isinstance(order, TrainSteps)
    assert sum(plan.samples for plan in order.plans) == 8


def test_a_step_is_committed_once() -> None:
    training_plan = TrainingPlan(PlanConfig(num_samples=10, batch_size=4, epochs=2))
    training_plan.next(3)
    training_plan.commit(2)
    with pytest.raises(AssertionError, match="step 2 is committed and not open"):
        training_plan.commit(2)
    assert (training_plan.committed_step, training_plan.samples_used) == (0, 4)
    training_plan.commit(1)
    assert (training_plan.committed_step, training_plan.samples_used) == (2, 8)


@settings(max_examples=100)
@given(plan_config=PLANS, seed=st.integers(0, 2**32), max_lease=st.integers(1, 6))
def test_a_whole_plan_committed_in_any_order(
    plan_config: PlanConfig, seed: int, max_lease: int
) -> None:
    training_plan = TrainingPlan(plan_config)
    life = drive(training_plan, chance=random.Random(seed), max_lease=max_lease, in_order=False)
    assert life.stop == "finished"
    life.committed.sort(key=lambda plan: plan.step)
    assert_once_an_epoch(life.committed, plan_config, plan_config.epochs)
    assert training_plan.samples_used == plan_config.num_samples * plan_config.epochs
    assert training_plan.committed_step == plan_config.num_steps


@settings(max_examples=250)
@given(
    plan_config=PLANS,
    seed=st.integers(0, 2**32),
    max_lease=st.integers(1, 6),
    moments=st.lists(st.integers(0, 120), max_size=6),
    stop=st.one_of(st.none(), st.integers(0, 120)),
)
def test_steps_that_are_taken_back_are_ordered_again(
    plan_config: PlanConfig, seed: int, max_lease: int, moments: list[int], stop: int | None
) -> None:
    """Whenever what is open is void, the same steps come again with the same samples, and so do the
    evaluations and checkpoints among them."""
    training_plan = TrainingPlan(plan_config)
    life = drive(
        training_plan,
        chance=random.Random(seed),
        max_lease=max_lease,
        back_after=moments,
        stop_after=stop,
    )
    given = {}
    for order in life.orders:
        for plan in order.plans if isinstance(order, TrainSteps) else ():
            assert given.setdefault(plan.step, plan) == plan
    assert life.stop in ("finished", "interrupted")
    assert training_plan.samples_used == sum(plan.samples for plan in life.committed)
    if life.stop == "finished":
        assert_once_an_epoch(life.committed, plan_config, plan_config.epochs)
        assert [epoch for _, epoch in life.results] == due(plan_config)
        every, ends = plan_config.checkpoint_every, plan_config.steps_per_epoch
        wanted = {s for s in given if every and s % every == 0 and s % ends}
        assert {checkpoint.step for checkpoint in life.checkpoints} >= wanted
    if life.committed:
        assert life.checkpoints[-1].step == life.committed[-1].step
    for saved in life.checkpoints:
        used = sum(plan.samples for plan in life.committed if plan.step <= saved.step)
        assert TrainingPlan(plan_config, through_json(saved.state)).samples_used == used


def test_a_repeated_checkpoint_comes_first() -> None:
    training_plan = TrainingPlan(PlanConfig(num_samples=12, batch_size=4, epochs=1))
    training_plan.next(1)
    training_plan.next(1)
    training_plan.commit(1)
    training_plan.take_back()
    training_plan.repeat_checkpoint()
    saved = training_plan.next(5)
    assert isinstance(saved, Checkpoint)
    assert (saved.step, saved.state["committed"]) == (1, [[0, 4]])
    order = training_plan.next(5)
    assert isinstance(order, TrainSteps)
    assert [(p.step, p.ranges) for p in order.plans] == [(2, ((4, 8),)), (3, ((8, 12),))]


@given(st.integers(1, 30), st.lists(st.integers(1, 9), min_size=1, max_size=5))
def test_a_step_is_shared_out_whole(samples: int, weights: list[int]) -> None:
    plan = StepPlan(1, 0, ((2, 2 + samples), (40, 45)))
    parts = plan.share_out(weights)
    assert len(parts) == len(weights)
    used = [i for part in parts for low, high in part for i in range(low, high)]
    assert used == [*range(2, 2 + samples), *range(40, 45)]
