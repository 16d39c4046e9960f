"""The best evaluation so far, by the monitored metric. Pure."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Mapping
from typing import Any

from manyhands.coordinator.metric_monitor import Monitor


@dataclasses.dataclass(frozen=True)
class BestEvaluation:
    metrics: Mapping[str, float] | None = None
    step: int = 0
    waited: int = 0
    """Number of evaluations since."""


class BestModel:
    def __init__(self, monitor: Monitor, state: Mapping[str, Any] | None = None) -> None:
        self.monitor = monitor
        self.evaluation = BestEvaluation(**state) if state else BestEvaluation()
        if (metrics := self.evaluation.metrics) is not None:
            self.evaluation = dataclasses.replace(self.evaluation, metrics=numbers(metrics))
        self._previous: list[BestEvaluation] = []
        """Those that were the best before, oldest first."""

    def add(self, metrics: Mapping[str, float], *, step: int) -> bool:
        """Take in an evaluation; True if it is the best so far."""
        best = self.evaluation
        if not self._is_better(metrics[self.monitor.name]):
            self.evaluation = dataclasses.replace(best, waited=best.waited + 1)
            return False
        if best.metrics is not None:
            self._previous.append(best)
        self.evaluation = BestEvaluation(dict(metrics), step)
        return True

    def keep(self, saved: Collection[int]) -> None:
        """Fall back to the best of these steps: no other has a checkpoint, or will have one."""
        while self.evaluation.metrics is not None and self.evaluation.step not in saved:
            waited = self.evaluation.waited + 1
            previous = self._previous.pop() if self._previous else BestEvaluation()
            self.evaluation = dataclasses.replace(previous, waited=previous.waited + waited)

    def state(self) -> dict[str, Any]:
        return dataclasses.asdict(self.evaluation)

    def _is_better(self, value: float) -> bool:
        if not math.isfinite(value):
            return False  # infinity too: that model has diverged, and JSON has no number for it
        best = (self.evaluation.metrics or {}).get(self.monitor.name)
        if best is None or math.isnan(best):
            return True  # the first one, or the first by this monitor
        if math.isclose(value, best, rel_tol=1e-6):
            return False  # equal up to the order of summation
        return self.monitor.better(value, best)


def numbers(metrics: Mapping[str, float | None]) -> dict[str, float]:
    """Return metrics from JSON, which has None for what is not a number."""
    return {name: math.nan if value is None else value for name, value in metrics.items()}
