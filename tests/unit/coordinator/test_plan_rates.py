"""Plans whose batch follows the workers and whose learning rate follows the losses."""

from __future__ import annotations

import random
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st
from plan_driver import assert_once_an_epoch, drive, plan_configs, scalings, through_json

from manyhands.coordinator.batch_scaling import Scaling
from manyhands.coordinator.plan import (
    Checkpoint,
    Evaluate,
    PlanConfig,
    StepPlan,
    TrainingPlan,
    TrainSteps,
    Wait,
)
from manyhands.coordinator.plateau import Plateau

PLANS = plan_configs(
    num_samples=st.integers(1, 60), batch_size=st.integers(1, 12), scaling=scalings
)
moments = st.dictionaries(st.integers(0, 80), st.integers(1, 6), max_size=5)


def widest(plan_config: PlanConfig) -> PlanConfig:
    """With the largest batch that any of these worlds has."""
    return replace(plan_config, batch_size=plan_config.scaling.batch(plan_config.batch_size, 6))


def assert_scheduled(plans: list[StepPlan], plan_config: PlanConfig) -> None:
    """The schedule is stepped as often as it should be after each step, and all of it after the last."""
    ticks = used = 0
    for plan in plans:
        ticks, used = ticks + plan.ticks, used + plan.samples
        within = used - plan.epoch * plan_config.num_samples
        whole = within // plan_config.batch_size
        if within == plan_config.num_samples:
            whole = plan_config.steps_per_epoch
        assert ticks == plan.epoch * plan_config.steps_per_epoch + whole
    assert ticks == plan_config.num_steps


@settings(max_examples=200)
@given(
    plan_config=PLANS,
    worlds=moments,
    seed=st.integers(0, 2**32),
    max_lease=st.integers(1, 6),
)
def test_any_sequence_of_numbers_of_workers(
    plan_config: PlanConfig, worlds: dict[int, int], seed: int, max_lease: int
) -> None:
    training_plan = TrainingPlan(plan_config)
    life = drive(training_plan, chance=random.Random(seed), max_lease=max_lease, worlds=worlds)
    assert life.stop == "finished"
    assert_once_an_epoch(life.committed, widest(plan_config), plan_config.epochs)
    assert_scheduled(life.committed, plan_config)
    assert training_plan.samples_used == plan_config.num_samples * plan_config.epochs
    assert training_plan.num_steps == len(life.committed)
    scaling = plan_config.scaling
    targets = {scaling.factor(world) for world in worlds.values()} | {1.0}
    assert all(min(targets) <= plan.lr_factor <= max(targets) for plan in life.committed)


@settings(max_examples=200)
@given(
    plan_config=PLANS,
    worlds=moments,
    later=moments,
    seed=st.integers(0, 2**32),
    moment=st.integers(0, 80),
    kill=st.booleans(),
)
def test_an_interruption_changes_nothing_of_it(
    plan_config: PlanConfig,
    worlds: dict[int, int],
    later: dict[int, int],
    seed: int,
    moment: int,
    kill: bool,
) -> None:
    chance = random.Random(seed)
    how = {"cut_after": moment} if kill else {"stop_after": moment}
    first = drive(TrainingPlan(plan_config), chance=chance, worlds=worlds, **how)
    kept = first.checkpoints[-1] if first.checkpoints else None
    training_plan = TrainingPlan(plan_config, through_json(kept.state) if kept else None)
    start = kept.step if kept else 0
    before = [plan for plan in first.committed if plan.step <= start]
    second = drive(training_plan, chance=chance, worlds=later)
    plans = before + second.committed
    assert_once_an_epoch(plans, widest(plan_config), plan_config.epochs)
    assert_scheduled(plans, plan_config)


@settings(max_examples=100)
@given(
    plan_config=PLANS,
    seed=st.integers(0, 2**32),
    back=st.lists(st.integers(0, 80), max_size=4),
)
def test_the_reference_number_of_workers_changes_nothing(
    plan_config: PlanConfig, seed: int, back: list[int]
) -> None:
    plain = replace(plan_config, scaling=Scaling())
    worlds = {0: plan_config.scaling.reference}
    lives = [
        drive(TrainingPlan(each), chance=random.Random(seed), worlds=worlds, back_after=back)
        for each in (plan_config, plain)
    ]
    assert lives[0].committed == lives[1].committed
    assert {(plan.lr_factor, plan.ticks) for plan in lives[1].committed} == {(1.0, 1)}


def test_step_by_step() -> None:
    """One worker is the reference; two come after the second step, and one is left after the fifth."""
    scaling = Scaling("linear", reference=1, warmup=4)
    training_plan = TrainingPlan(
        PlanConfig(num_samples=22, batch_size=2, epochs=1, scaling=scaling)
    )
    training_plan.set_world(1)
    assert not training_plan.take_changes()
    first = training_plan.next(2)
    assert isinstance(first, TrainSteps)
    assert training_plan.num_steps == 11
    for plan in first.plans:
        training_plan.commit(plan.step)
    training_plan.set_world(2)
    (grown,) = training_plan.take_changes()
    assert (grown.step, grown.factor, grown.over, grown.reason) == (3, 2.0, 4, "2 workers")
    assert (training_plan.batch_size, training_plan.num_steps) == (4, 7)
    second = training_plan.next(3)
    assert isinstance(second, TrainSteps)
    training_plan.set_world(2)
    assert not training_plan.take_changes(), "as many as before: nothing new"
    for plan in second.plans:
        training_plan.commit(plan.step)
    training_plan.set_world(1)
    (fallen,) = training_plan.take_changes()
    assert (fallen.step, fallen.factor, fallen.over, fallen.reason) == (6, 1.0, 0, "1 worker")
    third = training_plan.next(99)
    assert isinstance(third, TrainSteps)
    told = [
        (plan.samples, plan.lr_factor, plan.ticks)
        for plan in (*first.plans, *second.plans, *third.plans)
    ]
    assert told == [
        (2, 1.0, 1),
        (2, 1.0, 1),
        (4, 1.25, 2),
        (4, 1.5, 2),
        (4, 1.75, 2),
        (2, 1.0, 1),
        (2, 1.0, 1),
        (2, 1.0, 1),
    ]


def test_half_a_batch_moves_the_schedule_every_second_time() -> None:
    scaling = Scaling("sqrt", reference=2)
    training_plan = TrainingPlan(
        PlanConfig(num_samples=11, batch_size=4, epochs=2, scaling=scaling)
    )
    training_plan.set_world(1)
    steps = training_plan.next(99)
    assert isinstance(steps, TrainSteps)
    assert [(plan.samples, plan.ticks) for plan in steps.plans] == [
        *((2, 0), (2, 1), (2, 0), (2, 1)),
        *((2, 0), (1, 1)),  # the epoch is over: three steps of the schedule
    ]


# The plateau rule ---------------------------------------------------------------------------------


def lowered_by_hand(
    plan_config: PlanConfig, losses: list[float], plans: list[StepPlan]
) -> list[float]:
    """The factor of each step, as the rule says it: the mean over steps is no better than the best."""
    rule = plan_config.plateau
    assert rule is not None
    factors, factor, best, waited = [], 1.0, None, 0
    window: list[StepPlan] = []
    for number, plan in enumerate(plans):
        factors.append(factor)
        window.append(plan)
        last = number == len(plans) - 1 or plans[number + 1].epoch != plan.epoch
        if len(window) < rule.every if rule.every else not last:
            continue
        total = 0.0
        for each in window:
            total += losses[each.step] * each.samples
        mean = total / sum(each.samples for each in window)
        window = []
        if best is None or mean < best - rule.threshold * abs(best):
            best, waited = mean, 0
        else:
            waited += 1
        if waited >= rule.patience:
            factor, waited = factor * rule.factor, 0
    return factors


@settings(max_examples=200)
@given(
    plan_config=st.builds(
        PlanConfig,
        num_samples=st.integers(1, 40),
        batch_size=st.integers(1, 8),
        epochs=st.integers(1, 4),
        has_eval=st.booleans(),
        checkpoint_every=st.integers(0, 4),
        plateau=st.builds(
            Plateau,
            factor=st.just(0.5),
            patience=st.integers(1, 3),
            watch=st.just("train_loss"),
            every=st.integers(0, 6),
        ),
    ),
    seed=st.integers(0, 2**32),
    max_lease=st.integers(1, 6),
    back=st.lists(st.integers(0, 120), max_size=5),
    moment=st.one_of(st.none(), st.integers(0, 120)),
    kill=st.booleans(),
)
def test_interruptions_do_not_move_the_step_that_lowers_the_rate(
    plan_config: PlanConfig,
    seed: int,
    max_lease: int,
    back: list[int],
    moment: int | None,
    kill: bool,
) -> None:
    chance = random.Random(seed)
    losses = [chance.uniform(0.5, 1.0) for _ in range(1000)]
    how = {"cut_after": moment} if kill else {"stop_after": moment}
    drives = {"chance": chance, "max_lease": max_lease, "loss": losses.__getitem__}
    training_plan = TrainingPlan(plan_config)
    first = drive(training_plan, back_after=back, **drives, **how)
    plans = first.committed
    if first.stop != "finished":
        kept = first.checkpoints[-1] if first.checkpoints else None
        start = kept.step if kept else 0
        training_plan = TrainingPlan(plan_config, through_json(kept.state) if kept else None)
        again = drive(training_plan, **drives)
        plans = [plan for plan in plans if plan.step <= start] + again.committed
    assert_once_an_epoch(plans, plan_config, plan_config.epochs)
    assert [plan.lr_factor for plan in plans] == lowered_by_hand(plan_config, losses, plans)


def test_nothing_is_ordered_before_the_losses_of_a_mean_are_known() -> None:
    rule = Plateau(factor=0.5, patience=1, watch="train_loss", every=2)
    plan_config = PlanConfig(num_samples=12, batch_size=2, epochs=1, has_eval=False, plateau=rule)
    training_plan = TrainingPlan(plan_config)
    factors = []
    for loss in (1.0, 2.0, 3.0):
        order = training_plan.next(9)
        assert isinstance(order, TrainSteps)
        assert len(order.plans) == 2, "as many as the mean is over"
        factors += [plan.lr_factor for plan in order.plans]
        for plan in order.plans:
            assert training_plan.next(9) == Wait(training_plan.step)
            training_plan.commit(plan.step, loss=loss)
    assert factors == [1.0, 1.0, 1.0, 1.0, 0.5, 0.5]
    assert isinstance(training_plan.next(9), Checkpoint)
    told = [(change.step, change.factor) for change in training_plan.take_changes()]
    assert told == [(5, 0.5), (7, 0.25)]


def test_an_evaluation_lowers_the_rate_of_the_next_epoch_and_both_factors_hold() -> None:
    rule = Plateau(factor=0.5, patience=1, watch="loss")
    scaling = Scaling("linear", reference=1, warmup=0)
    plan_config = PlanConfig(num_samples=4, batch_size=2, epochs=3, scaling=scaling, plateau=rule)
    training_plan = TrainingPlan(plan_config)
    training_plan.set_world(2)
    seen = []
    for value in (1.0, 2.0, 3.0):
        order = training_plan.next(9)
        assert isinstance(order, TrainSteps)
        seen += [(plan.step, plan.lr_factor) for plan in order.plans]
        for plan in order.plans:
            training_plan.commit(plan.step)
        assert isinstance(training_plan.next(9), Evaluate)
        training_plan.evaluated({"loss": value})
        assert isinstance(training_plan.next(9), Checkpoint)
    assert seen == [(1, 2.0), (2, 2.0), (3, 1.0)]
    told = [(change.step, change.factor, change.reason) for change in training_plan.take_changes()]
    why = "loss has not been better than 1 for 1 evaluation"
    assert told == [(1, 2.0, "2 workers"), (3, 1.0, why), (4, 0.5, why)]
    state = through_json(training_plan.state())
    again = TrainingPlan(plan_config, state)
    again.set_world(2)
    assert again.state() == state
    (change,) = again.take_changes()
    assert (change.factor, change.over) == (0.5, 0), "said anew at each start"


def test_a_plan_without_rules_saves_no_rates() -> None:
    training_plan = TrainingPlan(PlanConfig(num_samples=4, batch_size=2, epochs=1))
    training_plan.set_world(3)
    training_plan.next(1)
    assert "rates" not in training_plan.state()
    assert not training_plan.take_changes()
