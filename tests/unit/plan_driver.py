"""Drives a training plan at random, as the driver and its workers would; for the tests of plans."""

from __future__ import annotations

import json
import math
import random
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from hypothesis import strategies as st

from manyhands.coordinator.batch_scaling import Scaling
from manyhands.coordinator.metric_monitor import read_monitor
from manyhands.coordinator.plan import (
    Checkpoint,
    Evaluate,
    PlanConfig,
    StepPlan,
    Stop,
    TrainingPlan,
    TrainSteps,
)
from manyhands.runs.files import jsonable

scalings = st.builds(
    Scaling,
    rule=st.sampled_from(["linear", "sqrt"]),
    reference=st.integers(1, 4),
    warmup=st.integers(0, 6),
)


def plan_configs(**fields: st.SearchStrategy[Any]) -> st.SearchStrategy[PlanConfig]:
    """Return any small plans, with these fields besides, or instead."""
    usual = {
        "num_samples": st.integers(1, 40),
        "batch_size": st.integers(1, 15),
        "epochs": st.integers(1, 3),
        "eval_every": st.integers(1, 3),
        "has_eval": st.booleans(),
        "checkpoint_every": st.integers(0, 5),
    }
    return st.builds(PlanConfig, **{**usual, **fields})


@dataclass
class Life:
    """The result of driving a plan until it stopped or was cut off."""

    committed: list[StepPlan] = field(default_factory=list)
    evaluations: list[tuple[int, int]] = field(default_factory=list)
    """(step, epoch)"""
    checkpoints: list[Checkpoint] = field(default_factory=list)
    """Those that count: every step up to them is committed."""
    results: list[tuple[int, int]] = field(default_factory=list)
    """Evaluations that came to a result: (step, epoch)."""
    orders: list[Any] = field(default_factory=list)
    stop: str | None = None


def drive(
    training_plan: TrainingPlan,
    *,
    chance: random.Random,
    max_lease: int = 4,
    metric: Any = lambda epoch: 1.0 / (1 + epoch),
    stop_after: int | None = None,
    cut_after: int | None = None,
    in_order: bool = True,
    back_after: Collection[int] = (),
    worlds: Mapping[int, int] | None = None,
    loss: Callable[[int], float] = lambda step: math.nan,
    on_target: Callable[[float], bool] = lambda value: False,
) -> Life:
    """Play driver and workers: orders ahead, commits behind, at random; stop or cut by count.

    At the moments `back_after`, what is open is void, and so is a checkpoint that does not count yet. At
    those of `worlds` so, too, and from then on there are so many workers.
    """
    worlds = worlds or {}

    def commit(step: int) -> None:
        training_plan.commit(step, loss=loss(step))
        life.committed.append(open_steps.pop(step))

    open_steps: dict[int, StepPlan] = {}
    life = Life()
    written: list[Checkpoint] = []
    for moment in range(100_000):
        if moment == cut_after:
            return life
        if moment == stop_after:
            training_plan.stop("interrupted")
        if moment in back_after or moment in worlds:
            training_plan.take_back()
            open_steps.clear()
            if moment in worlds:
                training_plan.set_world(worlds[moment])
            lost = [c for c in written if c.step > training_plan.committed_step]
            written = [c for c in written if c not in lost]
        if open_steps and chance.random() < 0.5:
            which = 0 if in_order else chance.randrange(len(open_steps))
            commit(list(open_steps)[which])
        elif (order := training_plan.next(chance.randint(1, max_lease))) is None:
            if not open_steps:
                life.results.append((training_plan.step, training_plan.epoch))
                monitor = training_plan.config.monitor.name
                value = metric(training_plan.epoch)
                found = {"other": 0.5, monitor: value}
                training_plan.evaluated(found, on_target=on_target(value))
        else:
            life.orders.append(order)
            if isinstance(order, TrainSteps):
                open_steps |= {plan.step: plan for plan in order.plans}
            elif isinstance(order, Evaluate):
                life.evaluations.append((order.step, order.epoch))
            elif isinstance(order, Checkpoint):
                written.append(order)
            elif isinstance(order, Stop):
                while open_steps:
                    commit(next(iter(open_steps)))
                life.checkpoints += written
                life.stop = order.reason
                return life
        done = [c for c in written if c.step <= training_plan.committed_step]
        written = [c for c in written if c not in done]
        life.checkpoints += done
    raise AssertionError("the plan does not end")


def due(config: PlanConfig) -> list[int]:
    """The steps after which to evaluate."""
    if not config.has_eval:
        return []
    each = config.eval_steps or config.eval_every * config.steps_per_epoch
    steps = range(1, config.num_steps + 1)
    return [step for step in steps if step % each == 0 or step == config.num_steps]


def through_json(state: Any) -> Any:
    return json.loads(json.dumps(jsonable(state), allow_nan=False))


def assert_once_an_epoch(plans: list[StepPlan], plan_config: PlanConfig, epochs: int) -> None:
    assert [plan.step for plan in plans] == list(range(1, len(plans) + 1))
    assert [plan.epoch for plan in plans] == sorted(plan.epoch for plan in plans)
    used = Counter((p.epoch, i) for p in plans for low, high in p.ranges for i in range(low, high))
    assert used == Counter((e, i) for e in range(epochs) for i in range(plan_config.num_samples))
    assert all(1 <= plan.samples <= plan_config.batch_size for plan in plans)


def finish(
    values: list[float], monitor: str | None = None, **changes: Any
) -> tuple[TrainingPlan, Life]:
    """One epoch of one step for each value of the monitored metric."""
    if monitor is not None:
        changes["monitor"] = read_monitor(monitor, option='monitor="{}"')
    plan_config = PlanConfig(num_samples=4, batch_size=4, epochs=len(values), **changes)
    training_plan = TrainingPlan(plan_config)
    return training_plan, drive(
        training_plan, chance=random.Random(0), metric=lambda epoch: values[epoch]
    )
