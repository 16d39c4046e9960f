"""Hints about schedules that seem to expect one step per epoch, although they are stepped once per step.

This mistake fails silently: StepLR(step_size=30), meant for 90 epochs, lowers the rate every 30 steps, and
reaches almost zero within the first epoch. Checking costs a few milliseconds at the start.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch.optim import Optimizer

from manyhands.job import Job

NEGLIGIBLE = 1e-6
"""A rate below this fraction of its maximum trains nothing."""
MAX_TRIED = 2_000
"""Number of steps of a schedule that are tried."""


@dataclass(frozen=True)
class TrainingLength:
    """How long the training is, and how a job writes the length of an epoch in steps."""

    num_steps: int
    epochs: int
    """Passes over the data, rounded up."""
    epoch: str = "num_steps // self.epochs"
    """Steps of an epoch, as the job may write it."""
    epochs_of_step: str = "step * self.epochs / num_steps"
    """A step in epochs."""
    epochs_per_step: str = "self.epochs / num_steps"

    @classmethod
    def of(cls, job: Job, *, num_steps: int, steps_per_epoch: int) -> TrainingLength:
        if job.steps is None:
            return cls(num_steps, job.epochs or 1)
        epochs, each = math.ceil(num_steps / steps_per_epoch), str(steps_per_epoch)
        return cls(num_steps, epochs, each, f"step / {each}", f"1 / {each}")


def schedule_hint(scheduler: Any, optimizer: Optimizer, length: TrainingLength) -> str:
    """Return a hint if a schedule seems to count epochs; otherwise an empty string.

    Steps the scheduler, so it must belong to an optimizer that is not trained.
    """
    if scheduler is None or length.num_steps <= length.epochs:
        return ""
    known = (_known_mistake(part, length) for part in _parts(scheduler))
    hint = next(filter(None, known), "") or _vanishing_rate(scheduler, optimizer, length)
    return f"{hint} A schedule is stepped once per step, not once per epoch" if hint else ""


def _known_mistake(scheduler: Any, length: TrainingLength) -> str:
    num_steps, epochs, epoch = length.num_steps, length.epochs, length.epoch
    steps = f"{num_steps:,} steps"
    match type(scheduler).__name__:
        case "CosineAnnealingLR" if scheduler.T_max <= epochs:
            return (
                f"CosineAnnealingLR(T_max={scheduler.T_max}) reaches its minimum after {scheduler.T_max} of "
                f"{steps}, and rises again. Write  T_max=num_steps."
            )
        case "CosineAnnealingWarmRestarts" if epochs >= scheduler.T_0:
            return (
                f"CosineAnnealingWarmRestarts(T_0={scheduler.T_0}) restarts after {scheduler.T_0} of "
                f"{steps}. For epochs, write  T_0={scheduler.T_0} * {epoch}."
            )
        case "MultiStepLR" if scheduler.milestones and max(scheduler.milestones) <= epochs:
            milestones = sorted(scheduler.milestones)
            return (
                f"MultiStepLR(milestones={milestones}) reaches the last one after {milestones[-1]} of "
                f"{steps}. For epochs, write  milestones=[m * {epoch} for m in "
                f"{milestones}]."
            )
        case "StepLR" if scheduler.step_size <= epochs:
            times = num_steps // scheduler.step_size
            if abs(scheduler.gamma) ** times < NEGLIGIBLE:
                return (
                    f"StepLR(step_size={scheduler.step_size}) lowers the learning rate {times:,} times in "
                    f"{steps}. For epochs, write  step_size={scheduler.step_size} * {epoch}."
                )
    return ""


def _vanishing_rate(scheduler: Any, optimizer: Optimizer, length: TrainingLength) -> str:
    largest, num_steps = _rate(optimizer), length.num_steps
    # Not up to the end, where a schedule for this number of steps may reach zero on purpose.
    for step in range(1, min(9 * num_steps // 10, MAX_TRIED) + 1):
        scheduler.step()
        rate = _rate(optimizer)
        largest = max(largest, rate)
        if rate < NEGLIGIBLE * largest:
            return (
                f"{type(scheduler).__name__} lowers the learning rate to {rate:.2g} within {step:,} of "
                f"{num_steps:,} steps. For epochs, make it a function of  {length.epochs_of_step}  "
                f"(ExponentialLR: gamma ** ({length.epochs_per_step}))."
            )
    return ""


def _rate(optimizer: Optimizer) -> float:
    return float(optimizer.param_groups[0]["lr"])


def _parts(scheduler: Any) -> Iterator[Any]:
    """Yield a scheduler and the schedulers that it consists of."""
    yield scheduler
    for inner in getattr(scheduler, "_schedulers", ()):
        yield from _parts(inner)
