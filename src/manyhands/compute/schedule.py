"""The learning-rate schedule of a job: its number of steps, and how a resumed run continues it.

A checkpoint holds the optimizer's moments, the position of the schedule, and a description of the optimizer
and schedule that the job made at the start. When a run is resumed:

    nothing changed         everything is as it was saved, bit for bit
    the job changed         (--set lr=0.1): the groups and the schedule are those of the job as it is now,
                            and the schedule is stepped to where the saved one was
    more steps              a schedule that depends on their number needs an answer, --schedule:
        stretch             made for all steps; continues at its position
        restart             made anew for the remaining steps
        keep                as it was; at its end, the rate stays the same

Cost: if something changed, one scheduler step for each step so far, a few microseconds each.
"""

from __future__ import annotations

import copy
import json
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from manyhands.errors import UsageError

if TYPE_CHECKING:
    from torch.optim import Optimizer

SCHEDULES = KEEP, STRETCH, RESTART = ("keep", "stretch", "restart")
"""Ways in which a resumed run may continue the schedule of its learning rate."""

MakeSchedule = Callable[["Optimizer", int], Any]
"""A job's schedule(): makes a scheduler for an optimizer and a number of steps, or returns None."""
Settings = list[dict[str, Any]]
"""Settings of each group of an optimizer, without its parameters."""

OVERTIME = "manyhands_overtime"
_OWN = ("params", "param_names")
_TUNING = ("fused", "foreach")
"""Options that change how an optimizer computes, not what."""


@dataclass(frozen=True)
class SchedulePlan:
    """The steps that a schedule was made for; saved in checkpoints."""

    steps: int = 0
    """Steps of the schedule."""
    of: int = 0
    """Steps of the whole training."""
    began: int = 0
    """Steps of the training before the schedule's first."""
    holds: bool = False
    """If true, the rate stays where it is after the last step of the schedule."""
    made_of: str = ""
    """The optimizer's groups and the schedule as the job made them."""


class HeldSchedule:
    """A scheduler that stops at the number of steps that it was made for."""

    def __init__(self, inner: Any, steps: int) -> None:
        self._inner = inner
        self._steps = steps
        self._overtime = 0
        """Steps since its end."""

    @property
    def last_epoch(self) -> int:
        return position(self._inner) + self._overtime

    def step(self) -> None:
        if position(self._inner) < self._steps:
            self._inner.step()
        else:
            self._overtime += 1

    def state_dict(self) -> dict[str, Any]:
        return {**self._inner.state_dict(), OVERTIME: self._overtime}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._overtime = state.get(OVERTIME, 0)
        self._inner.load_state_dict({k: v for k, v in state.items() if k != OVERTIME})


def position(scheduler: Any) -> int:
    """Return how many times a scheduler was stepped."""
    while hasattr(scheduler, "_schedulers") and not hasattr(scheduler, "last_epoch"):
        scheduler = scheduler._schedulers[0]
    return int(getattr(scheduler, "last_epoch", 0))


def settings_of(optimizer: Optimizer) -> Settings:
    return [{k: v for k, v in g.items() if k not in _OWN} for g in optimizer.param_groups]


def put_settings(optimizer: Optimizer, settings: Settings) -> None:
    """Replace the settings of all groups. Removes everything else, such as marks of an earlier schedule."""
    for group, given in zip(optimizer.param_groups, settings, strict=True):
        kept = {key: group[key] for key in _OWN if key in group}
        group.clear()
        group.update({**kept, **copy.deepcopy(given)})


def describe(optimizer: Optimizer, settings: Settings, scheduler: Any) -> str:
    """Return a text that is equal for two jobs only if they make the same groups and schedule."""
    groups = [
        [
            [list(p.shape) for p in group["params"]],
            {k: v for k, v in each.items() if k not in _TUNING},
        ]
        for group, each in zip(optimizer.param_groups, settings, strict=True)
    ]
    state = scheduler.state_dict() if scheduler is not None else None
    return json.dumps([groups, state], default=_named, skipkeys=True)


def _named(value: Any) -> Any:
    """Encode tensors by their values, other objects by their type (an address would differ each time)."""
    return value.tolist() if hasattr(value, "tolist") else type(value).__name__


def twin_of(optimizer: Optimizer, settings: Settings) -> Optimizer:
    """Make an optimizer like the job's with these settings, which is never stepped."""
    twin = copy.copy(optimizer)
    twin.param_groups = [
        {**copy.deepcopy(each), "params": group["params"]}
        for each, group in zip(settings, optimizer.param_groups, strict=True)
    ]
    twin.state = defaultdict(dict)
    twin._opt_called = True  # type: ignore[attr-defined]
    return twin


class Resuming:
    """Settings of the optimizer and the schedule with which a resumed run continues."""

    def __init__(
        self, optimizer: Optimizer, settings: Settings, make: MakeSchedule, *, num_steps: int
    ) -> None:
        """`settings`: those of the groups as the job's optimizer() made them, without a schedule.
        `num_steps`: the total number of steps as it is now."""
        self._optimizer = optimizer
        self._settings = settings
        self._make = make
        self._num_steps = num_steps

    def decide(self, saved: SchedulePlan, at: int, mode: str) -> SchedulePlan:
        """Return the new plan of a schedule that was saved after `at` of its steps."""
        longer = self._num_steps - saved.began
        if mode == RESTART:
            began = saved.began + at
            left = max(1, self._num_steps - began)
            plan = SchedulePlan(left, self._num_steps, began)
        elif mode == STRETCH:
            plan = SchedulePlan(max(1, longer), self._num_steps, saved.began)
        elif self._num_steps <= saved.of:
            plan = saved
        elif not self.depends_on_steps(saved.steps, longer):
            plan = replace(saved, steps=longer, of=self._num_steps)
        elif mode == KEEP:
            plan = replace(saved, of=self._num_steps, holds=True)
        else:
            raise UsageError(self._question(saved, at))
        return replace(plan, made_of=self._made_of(plan.steps))

    def depends_on_steps(self, few: int, many: int) -> bool:
        """Return true if the job's schedule for `many` steps begins differently from the one for `few`."""
        pairs = zip(self._rates(few, few), self._rates(many, few), strict=False)
        return any(short != long for short, long in pairs)

    def _rates(self, steps: int, up_to: int) -> Iterator[list[float]]:
        """Yield the rates of the groups at each step from 0 to `up_to`, in the schedule for `steps` steps."""
        twin = twin_of(self._optimizer, self._settings)
        scheduler = self._make(twin, steps)
        for number in range(up_to + 1):
            if number and scheduler is not None:
                scheduler.step()
            yield [float(group["lr"]) for group in twin.param_groups]

    def _rate(self, steps: int, at: int) -> float:
        *_, last = self._rates(steps, at)
        return last[0]

    def _made_of(self, steps: int) -> str:
        return describe(
            self._optimizer,
            self._settings,
            self._make(twin_of(self._optimizer, self._settings), steps),
        )

    def _question(self, saved: SchedulePlan, at: int) -> str:
        now, done = self._num_steps, saved.began + at
        longer, end = now - saved.began, saved.began + saved.steps
        left = now - done
        return (
            f"The learning-rate schedule was made for {saved.of} steps, {done} of which are done, and the "
            f"run now has {now}. Choose how it continues:\n"
            f"  --schedule stretch   over all {now} steps; the next rate is {self._rate(longer, at):.4g}\n"
            f"  --schedule restart   anew, over the remaining {left}; the next rate is "
            f"{self._rate(left, 0):.4g}\n"
            f"  --schedule keep      as it was; from step {end + 1} on, the rate stays at "
            f"{self._rate(saved.steps, saved.steps):.4g}"
        )


def saved_plan(
    saved: Mapping[str, Any], scheduler_state: Mapping[str, Any], num_steps: int
) -> SchedulePlan:
    """Return the plan of a checkpoint; for a checkpoint of an earlier version, the most likely one."""
    if saved:
        return SchedulePlan(**saved)
    steps = scheduler_state.get("total_steps") or scheduler_state.get("T_max") or num_steps
    return SchedulePlan(int(steps), int(steps))


def same_rates(settings: Settings, saved: Sequence[Mapping[str, Any]]) -> bool:
    """Return true if the base rates of the groups are those of the saved groups."""
    before = [float(group.get("initial_lr", group["lr"])) for group in saved]
    return before == [float(group["lr"]) for group in settings]
