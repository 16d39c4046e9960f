"""What a start of a run has done so far, and the summary of it."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import Any

from manyhands.coordinator.options import RunOptions
from manyhands.coordinator.plan import TrainingPlan
from manyhands.coordinator.progress import Committed
from manyhands.coordinator.staleness_stats import StalenessStats


class RunStats:
    """Counts from this start on: a resumed run counts anew, its course does not."""

    def __init__(self, *, lockstep: bool = True, before: RunStats | None = None) -> None:
        """`before`: that of the same start, from before all began again."""
        self.samples = 0
        self.parts = 0
        """Of committed steps."""
        self.pushes: Mapping[str, int] | None = None
        """Applied, by worker, as the servers' books have it at the end; None without servers."""
        self.bytes_sent = 0
        self.unit: tuple[str, float] = ("samples", 1.0)
        """What speed is told in, and how many of them a sample has."""
        self.last_loss: float | None = None
        self.staleness = None if lockstep else StalenessStats()
        """Of every part that was reported; in lockstep there is none."""
        self._started: float = before._started if before else time.monotonic()
        self._training_since: float | None = None
        self._last_commit = 0.0
        self._finite = True

    @property
    def trains(self) -> bool:
        """The members have joined, and training has begun."""
        return self._training_since is not None

    def training(self) -> None:
        self._training_since = time.monotonic()

    def add(self, step: Committed) -> bool:
        """One more step; True if its loss is the first that is no number."""
        self.samples += step.plan.samples
        self.parts += step.num_parts
        self.bytes_sent += step.bytes_sent
        self.last_loss = step.loss
        if self.staleness is not None:
            for value in step.staleness:
                self.staleness.add(value)
        self._last_commit = time.monotonic()
        finite = math.isfinite(step.loss) or not step.weight
        was_finite, self._finite = self._finite, self._finite and finite
        return was_finite and not self._finite

    def summary(
        self,
        options: RunOptions,
        training_plan: TrainingPlan | None,
        *,
        outcome: str,
        checkpoint: str | None,
        error: str | None,
        num_lost: int = 0,
        num_replaced: int = 0,
        num_again: int = 0,
        num_injected: int = 0,
        chaos: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        """As in summary.json. Steps, samples and epochs are the whole run's, times this start's."""
        training_s = self._last_commit - (self._training_since or 0.0) if self.samples else 0.0
        final = training_plan.last_metrics if training_plan else {}
        none = None if checkpoint else 0  # one that did not come to go on has what is saved
        if not final and self.last_loss is not None:
            final = {"loss": self.last_loss}
        best = training_plan.best if training_plan else None
        per_s = round(self.samples / training_s, 1) if training_s > 0 else None
        unit, each = self.unit
        return {
            "outcome": outcome,
            "strategy": options.strategy,
            "workers": options.workers,
            "steps": training_plan.committed_step if training_plan else none,
            "samples": training_plan.samples_used if training_plan else none,
            "epochs": round(training_plan.samples_used / training_plan.plan_config.num_samples, 3)
            if training_plan
            else none,
            "wall_s": round(time.monotonic() - self._started, 3),
            "samples_per_s": per_s,
            **({} if each == 1.0 or per_s is None else {"unit": unit, "units_per_s": per_s * each}),
            "final_metrics": final,
            "monitor": str(training_plan.plan_config.monitor)
            if training_plan and training_plan.plan_config.has_eval
            else None,
            "best_metrics": {**best.metrics, "step": best.step} if best and best.metrics else None,
            "bytes_sent": self.bytes_sent,
            "pushes": self._books(),
            "staleness": self.staleness.to_dict() if self.staleness else None,
            "lost": num_lost,
            "replaced": num_replaced,
            "begun_again": num_again,
            "injected": num_injected,
            "chaos": chaos,
            "checkpoint": checkpoint,
            "error": error,
        }

    def _books(self) -> dict[str, int] | None:
        """For audits: what is in the weights is what was committed, and once. None where nobody kept any."""
        if self.pushes is None:
            return None
        return {"applied": sum(self.pushes.values()), "committed": self.parts}
