"""Hints about schedules that seem to expect one step per epoch, although they are stepped once per step.

This mistake fails silently: StepLR(step_size=30), meant for 90 epochs, lowers the rate every 30 steps, and
reaches almost zero within the first epoch. Checking costs a few milliseconds at the start.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.optim import Optimizer

NEGLIGIBLE = 1e-6
"""A rate below this fraction of its maximum trains nothing."""
MAX_TRIED = 2_000
"""Number of steps of a schedule that are tried."""


def schedule_hint(scheduler: Any, optimizer: Optimizer, *, num_steps: int, epochs: int) -> str:
    """Return a hint if a schedule seems to count epochs; otherwise an empty string.

    Steps the scheduler, so it must belong to an optimizer that is not trained.
    """
    if scheduler is None or num_steps <= epochs:
        return ""
    known = (_known_mistake(part, num_steps, epochs) for part in _parts(scheduler))
    hint = next(filter(None, known), "") or _vanishing_rate(scheduler, optimizer, num_steps)
    return f"{hint} A schedule is stepped once per step, not once per epoch" if hint else ""


def _known_mistake(scheduler: Any, num_steps: int, epochs: int) -> str:
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
                f"{steps}. For epochs, write  T_0={scheduler.T_0} * num_steps // self.epochs."
            )
        case "MultiStepLR" if scheduler.milestones and max(scheduler.milestones) <= epochs:
            milestones = sorted(scheduler.milestones)
            return (
                f"MultiStepLR(milestones={milestones}) reaches the last one after {milestones[-1]} of "
                f"{steps}. For epochs, write  milestones=[m * num_steps // self.epochs for m in "
                f"{milestones}]."
            )
        case "StepLR" if scheduler.step_size <= epochs:
            times = num_steps // scheduler.step_size
            if abs(scheduler.gamma) ** times < NEGLIGIBLE:
                return (
                    f"StepLR(step_size={scheduler.step_size}) lowers the learning rate {times:,} times in "
                    f"{steps}. For epochs, write  step_size={scheduler.step_size} * num_steps // self.epochs."
                )
    return ""


def _vanishing_rate(scheduler: Any, optimizer: Optimizer, num_steps: int) -> str:
    largest = _rate(optimizer)
    # Not up to the end, where a schedule for this number of steps may reach zero on purpose.
    for step in range(1, min(9 * num_steps // 10, MAX_TRIED) + 1):
        scheduler.step()
        rate = _rate(optimizer)
        largest = max(largest, rate)
        if rate < NEGLIGIBLE * largest:
            return (
                f"{type(scheduler).__name__} lowers the learning rate to {rate:.2g} within {step:,} of "
                f"{num_steps:,} steps. For epochs, make it a function of  step * self.epochs / num_steps  "
                "(ExponentialLR: gamma ** (self.epochs / num_steps))."
            )
    return ""


def _rate(optimizer: Optimizer) -> float:
    return float(optimizer.param_groups[0]["lr"])


def _parts(scheduler: Any) -> Iterator[Any]:
    """Yield a scheduler and the schedulers that it consists of."""
    yield scheduler
    for inner in getattr(scheduler, "_schedulers", ()):
        yield from _parts(inner)
