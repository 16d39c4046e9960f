"""Statistics of one start of a run, as the summary shows them."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import Any

from manyhands.coordinator.bad_steps import BadSteps
from manyhands.coordinator.options import RunOptions
from manyhands.coordinator.progress import CommittedStep
from manyhands.coordinator.staleness_stats import StalenessStats
from manyhands.coordinator.target import TargetWatch
from manyhands.coordinator.training_clock import TrainingClock
from manyhands.events.events import Evaluated, TargetReached


class RunStats:
    """Counts from this start on. A resumed run starts at 0; its plan does not, nor do `clock` and
    `target_watch`."""

    def __init__(
        self,
        options: RunOptions,
        *,
        saved: Mapping[str, Any] | None = None,
        before: RunStats | None = None,
    ) -> None:
        """`saved`: the plan of the checkpoint that training continues from. `before`: the statistics from
        before all members started again from it."""
        self.samples = 0
        self.parts = 0
        """Number of parts of committed steps."""
        self.pushes: Mapping[str, int] | None = None
        """Pushes applied by the servers, by worker, as reported at the end; None without servers."""
        self.bytes_sent = 0
        self.unit: tuple[str, float] = ("samples", 1.0)
        """The unit of throughput, and how many of them a sample has."""
        self.last_loss: float | None = None
        self.staleness = None if options.config.traits.lockstep else StalenessStats()
        """Staleness of every part that was reported; in lockstep there is none."""
        self.bad_steps = BadSteps(options.max_bad_steps)
        self._started: float = before._started if before else time.monotonic()
        self.clock: TrainingClock = before.clock if before else TrainingClock(self._started, saved)
        self.target_watch: TargetWatch = TargetWatch(
            saved, before=before.target_watch if before else None
        )
        self._training_since: float | None = None
        self._last_commit = 0.0
        self._finite = True

    @property
    def trains(self) -> bool:
        """If true, the members have joined, and training has begun."""
        return self._training_since is not None

    @property
    def wall_s(self) -> float:
        """Seconds since the first member of this start was started."""
        return time.monotonic() - self._started

    def training(self) -> None:
        self._training_since = time.monotonic()
        self.clock.begin(self._training_since)

    def evaluated(self, event: Evaluated, *, samples: int) -> TargetReached | None:
        """Take in an evaluation, and the number of samples trained on so far. Returns the event if it reached
        the target."""
        self.clock.evaluated(event.seconds)
        times = self.clock.read(time.monotonic())
        return self.target_watch.add(event, samples=samples, times=times)

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint keeps besides the plan, so that it adds up over all starts."""
        return {**self.clock.state(time.monotonic()), **self.target_watch.state()}

    def add(self, step: CommittedStep) -> bool:
        """Count a committed step; True if its loss is the first one that is not finite."""
        event = step.event
        self.samples += event.samples
        self.parts += step.num_parts
        self.bytes_sent += event.bytes_sent
        self.last_loss = event.loss
        self.bad_steps.add(event.step, event.loss, weight=step.weight)
        if self.staleness is not None:
            for value in step.staleness:
                self.staleness.add(value)
        self._last_commit = time.monotonic()
        finite = math.isfinite(event.loss) or not step.weight
        was_finite, self._finite = self._finite, self._finite and finite
        return was_finite and not self._finite

    def speed(self) -> dict[str, Any]:
        """Return the times of this start, for the summary."""
        training_s = self._last_commit - (self._training_since or 0.0) if self.samples else 0.0
        per_s = round(self.samples / training_s, 1) if training_s > 0 else None
        unit, each = self.unit
        return {
            "wall_s": round(self.wall_s, 3),
            "samples_per_s": per_s,
            **({} if each == 1.0 or per_s is None else {"unit": unit, "units_per_s": per_s * each}),
        }

    def to_target(self) -> dict[str, Any]:
        """Return what it took to reach the target, for the summary."""
        reached = self.target_watch.reached
        return {
            "time_to_target_s": reached.time_to_target_s if reached else None,
            "samples_to_target": reached.samples if reached else None,
            "steps_to_target": reached.step if reached else None,
        }

    def audit(self) -> dict[str, int] | None:
        """Return the counts of applied and committed parts, which are equal. None without servers."""
        if self.pushes is None:
            return None
        return {"applied": sum(self.pushes.values()), "committed": self.parts}
