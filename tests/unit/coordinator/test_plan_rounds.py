"""Plans of a training in rounds: where rounds end, and samples that are lost with a worker."""

from __future__ import annotations

import random
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st
from plan_driver import Life, drive, due, plan_configs, through_json

from manyhands.coordinator.plan import (
    Checkpoint,
    Evaluate,
    PlanConfig,
    Stop,
    TrainingPlan,
    TrainSteps,
)
from manyhands.coordinator.plateau import Plateau

PLANS = plan_configs(
    num_samples=st.integers(1, 60),
    batch_size=st.integers(1, 9),
    steps=st.none() | st.integers(1, 40),
    eval_steps=st.integers(0, 7),
    round_steps=st.integers(1, 9),
)


def round_ends(config: PlanConfig, *lives: Life) -> set[int]:
    """The steps after which a round ended: workers end it before whatever is not a step."""
    found: set[int] = set()
    for order in (order for life in lives for order in life.orders):
        if isinstance(order, TrainSteps):
            steps = [plan.step for plan in order.plans]
            found |= {step for step in steps if step % (config.round_steps or 1) == 0}
        elif not isinstance(order, Stop):
            found.add(order.step)
    return found - {0}


@settings(max_examples=250)
@given(
    config=PLANS,
    seed=st.integers(0, 2**32),
    moment=st.integers(0, 120),
    every=st.integers(0, 5),
)
def test_neither_stops_nor_checkpoints_move_the_end_of_a_round(
    config: PlanConfig, seed: int, moment: int, every: int
) -> None:
    whole = drive(TrainingPlan(config), chance=random.Random(seed))
    other = replace(config, checkpoint_every=every)
    first = drive(TrainingPlan(other), chance=random.Random(seed), stop_after=moment)
    kept = first.checkpoints[-1] if first.checkpoints else None
    resumed = TrainingPlan(other, through_json(kept.state) if kept else None)
    second = drive(resumed, chance=random.Random(seed))
    assert second.stop == "finished"
    assert first.committed + second.committed == whole.committed
    assert round_ends(config, first, second) == round_ends(config, whole)
    assert len(whole.committed) == config.num_steps
    results = sorted({step for life in (first, second) for step, _ in life.results})
    assert results == due(config)


@settings(max_examples=100)
@given(config=PLANS, seed=st.integers(0, 2**32))
def test_rounds_change_neither_samples_nor_the_schedule(config: PlanConfig, seed: int) -> None:
    plain = replace(config, round_steps=None)
    whole, rounds = (
        drive(TrainingPlan(each), chance=random.Random(seed)) for each in (plain, config)
    )
    assert rounds.committed == whole.committed


def test_a_checkpoint_on_the_way_waits_for_the_end_of_the_round() -> None:
    config = PlanConfig(
        num_samples=100, batch_size=1, round_steps=4, checkpoint_every=5, has_eval=False
    )
    life = drive(TrainingPlan(config), chance=random.Random(0))
    assert [each.step for each in life.checkpoints][:6] == [8, 12, 16, 20, 28, 32]


def test_a_stop_waits_for_the_end_of_the_round_and_a_limit_does_not() -> None:
    config = PlanConfig(num_samples=100, batch_size=1, round_steps=10, has_eval=False)
    training_plan = TrainingPlan(config)
    training_plan.next(3)
    training_plan.stop("interrupted")
    assert training_plan.steps_to_save == 7
    order = training_plan.next(99)
    assert isinstance(order, TrainSteps)
    assert order.plans[-1].step == 10
    assert isinstance(training_plan.next(9), Checkpoint)
    assert training_plan.next(9) == Stop("interrupted")
    limited = TrainingPlan(replace(config, max_step=3))
    assert isinstance(limited.next(9), TrainSteps)
    saved = limited.next(9)
    assert isinstance(saved, Checkpoint)
    assert saved.step == 3


def test_a_stop_can_end_a_long_round_early() -> None:
    training_plan = TrainingPlan(PlanConfig(num_samples=100, batch_size=1, round_steps=50))
    training_plan.next(3)
    training_plan.stop("preempted")
    training_plan.end_round()
    assert isinstance(training_plan.next(9), Checkpoint)


def test_an_evaluation_ends_the_round() -> None:
    config = PlanConfig(num_samples=100, batch_size=1, round_steps=10, eval_steps=6)
    training_plan = TrainingPlan(config)
    training_plan.next(99)
    assert training_plan.next(9) == Evaluate(6, 0)
    training_plan.stop("interrupted")
    assert training_plan.steps_to_save == 0


def test_lost_samples_come_again_in_the_same_epoch() -> None:
    training_plan = TrainingPlan(
        PlanConfig(num_samples=10, batch_size=4, epochs=2, round_steps=2, has_eval=False)
    )
    training_plan.next(2)
    training_plan.commit(1)
    training_plan.commit(2, lost=[(5, 7)])
    training_plan.take_back()
    assert (training_plan.samples_used, training_plan.committed_step) == (6, 2)
    order = training_plan.next(9)
    assert isinstance(order, TrainSteps)
    assert [plan.ranges for plan in order.plans] == [((5, 7), (8, 10))]


def test_lost_samples_bring_back_an_epoch_that_was_over() -> None:
    """The plan was already in the next one. The schedule is stepped as often as without the loss."""
    config = PlanConfig(num_samples=8, batch_size=4, epochs=2, round_steps=5, has_eval=False)
    training_plan = TrainingPlan(config)
    orders = [training_plan.next(9) for _ in range(3)]
    assert [type(order) for order in orders] == [TrainSteps, Checkpoint, TrainSteps]
    assert (training_plan.epoch, training_plan.step) == (1, 4)
    training_plan.commit(1, lost=[(2, 4)])
    training_plan.commit(2, lost=[(4, 6)])
    training_plan.take_back()
    assert (training_plan.epoch, training_plan.step) == (0, 2)
    again = training_plan.next(9)
    assert isinstance(again, TrainSteps)
    assert [(p.epoch, p.ranges, p.ticks) for p in again.plans] == [(0, ((2, 6),), 0)]
    training_plan.commit(3)
    life = drive(training_plan, chance=random.Random(0))
    assert [(p.step, p.epoch, p.ticks) for p in life.committed] == [(4, 1, 1), (5, 1, 1)]
    assert training_plan.samples_used == 16


def test_a_plan_that_waits_for_losses_ends_the_round_there() -> None:
    rule = Plateau(patience=1, watch="train_loss", every=3)
    config = PlanConfig(num_samples=40, batch_size=1, round_steps=4, plateau=rule, has_eval=False)
    life = drive(TrainingPlan(config), chance=random.Random(0), loss=lambda step: 1.0)
    assert life.stop == "finished"
    assert {3, 6, 9} <= round_ends(config, life)
