"""Schedules that were written to be stepped once an epoch, and are stepped once a step: what to write.

A torch habit that fails quietly: StepLR(step_size=30) lowers the rate every 30 steps, and a training of 90
epochs is over before its first epoch is. A note costs a few milliseconds at the start.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.optim import Optimizer

NOTHING = 1e-6
"""A rate below this part of its largest trains nothing."""
MAX_TRIED = 2_000
"""Steps of a schedule that are tried."""


def schedule_hints(scheduler: Any, *, num_steps: int, epochs: int) -> Iterator[str]:
    """What a person should know of a schedule that seems to count epochs."""
    if num_steps <= epochs:
        return
    for part in _parts(scheduler):
        if hint := _hint(part, num_steps=num_steps, epochs=epochs):
            yield f"{hint} A schedule is stepped once a step, not once an epoch"
            return


def _hint(scheduler: Any, *, num_steps: int, epochs: int) -> str:
    kind = type(scheduler).__name__
    steps = f"{num_steps:,} steps"
    match kind:
        case "CosineAnnealingLR" if scheduler.T_max <= epochs:
            return (
                f"CosineAnnealingLR(T_max={scheduler.T_max}) brings the learning rate to its lowest in "
                f"{scheduler.T_max} of {steps}, and up again. Write  T_max=num_steps."
            )
        case "CosineAnnealingWarmRestarts" if epochs >= scheduler.T_0:
            return (
                f"CosineAnnealingWarmRestarts(T_0={scheduler.T_0}) restarts after {scheduler.T_0} of "
                f"{steps}. For epochs write  T_0={scheduler.T_0} * num_steps // self.epochs."
            )
        case "MultiStepLR" if scheduler.milestones and max(scheduler.milestones) <= epochs:
            milestones = sorted(scheduler.milestones)
            return (
                f"MultiStepLR(milestones={milestones}) is through with them after {milestones[-1]} of "
                f"{steps}. For epochs write  milestones=[m * num_steps // self.epochs for m in {milestones}]."
            )
        case "StepLR" if scheduler.step_size <= epochs:
            times = num_steps // scheduler.step_size
            if abs(scheduler.gamma) ** times < NOTHING:
                return (
                    f"StepLR(step_size={scheduler.step_size}) lowers the learning rate {times:,} times in "
                    f"{steps}. For epochs write  step_size={scheduler.step_size} * num_steps // self.epochs."
                )
    return ""


def vanishing_hint(scheduler: Any, optimizer: Optimizer, *, num_steps: int) -> str:
    """For any schedule, over an optimizer that is not trained: after how few steps nothing is left of the
    rate. Steps it."""
    largest = _rate(optimizer)
    # Not at the very end, where a schedule made for so many steps may reach nothing on purpose.
    for step in range(1, min(9 * num_steps // 10, MAX_TRIED) + 1):
        scheduler.step()
        rate = _rate(optimizer)
        largest = max(largest, rate)
        if rate < NOTHING * largest:
            kind = type(scheduler).__name__
            return (
                f"{kind} brings the learning rate to {rate:.2g} in {step:,} of {num_steps:,} steps. For "
                "epochs make it of  step * self.epochs / num_steps  (ExponentialLR: gamma ** (self.epochs / "
                "num_steps)). A schedule is stepped once a step, not once an epoch"
            )
    return ""


def _rate(optimizer: Optimizer) -> float:
    return float(optimizer.param_groups[0]["lr"])


def _parts(scheduler: Any) -> Iterator[Any]:
    """The scheduler, and those that it is made of."""
    yield scheduler
    for inner in getattr(scheduler, "_schedulers", ()):
        yield from _parts(inner)
