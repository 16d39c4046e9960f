"""The target of a start: a value of a metric of the evaluation at which it ends. Pure.

    target    = METRIC "=" NUMBER            METRIC as in metric_monitor.py: NAME, "min NAME", "max NAME"

The first evaluation that is as good as the target, or better, reaches it. The range of each metric over all
evaluations is saved with each checkpoint, so that a resumed run knows what it has reached before.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from manyhands.control.messages import WorkerFacts
from manyhands.coordinator.metric_monitor import Monitor, metric_name, read_monitor
from manyhands.coordinator.training_clock import TrainingTimes
from manyhands.errors import UsageError, closest
from manyhands.events.events import Evaluated, TargetReached


@dataclass(frozen=True)
class Target:
    metric: Monitor
    value: float

    def is_met(self, value: float) -> bool:
        return value == self.value or self.metric.better(value, self.value)


def target_text(text: str) -> str:
    """Normalize the text of a target. Raises ValueError if it is not one."""
    name, value = _split(text)
    if not metric_name(name) or not math.isfinite(float(value)):
        raise ValueError(text)
    return f"{name}={value}"


def _split(text: str) -> tuple[str, str]:
    name, _, value = text.rpartition("=")
    return name.strip(), value.strip()


def target_of(
    text: str, facts: WorkerFacts, *, monitor: Monitor, saved: Mapping[str, Any] | None = None
) -> Target:
    """Return the target that `text` names. Raises an error if it does not fit this job. `monitor`: the job's,
    whose direction holds for its metric; `saved`: the plan of a resumed run."""
    option, (metric, number) = f"--target {text}", _split(text)
    name = metric_name(metric)
    if not facts.eval_samples:
        raise UsageError(
            f"{option} needs evaluations, and eval_data() returns no data. Return a data set from "
            "eval_data(), or leave --target out."
        )
    if facts.metrics is not None and name not in facts.metrics:
        known = ", ".join(facts.metrics)
        raise UsageError(
            f"{option}: the evaluation gives {known}{closest(name, facts.metrics)} "
            f"Type  --target {facts.metrics[-1]}=NUMBER  or return {name!r} from metrics()."
        )
    read = read_monitor(metric, option=f'--target "{{}}={number}"', saved=monitor)
    target = Target(read, float(number))
    if saved is not None:
        best = TargetWatch(saved).best(read)
        if best is not None and target.is_met(best):
            raise UsageError(
                f"{option}: an evaluation up to step {saved.get('step', 0)} has reached {best:.6g} "
                "already. Give a target that is not reached yet, or leave --target out to train on."
            )
    return target


class TargetWatch:
    """Looks for the evaluation that reaches the target."""

    def __init__(
        self, saved: Mapping[str, Any] | None = None, *, before: TargetWatch | None = None
    ) -> None:
        """`saved`: the plan that this start continues. `before`: of the same command, if its weights were
        lost and all members start again from a checkpoint."""
        saved = saved or {}
        self.target: Target | None = before.target if before else None
        self.reached: TargetReached | None = None
        if before and before.reached and before.reached.step <= saved.get("step", 0):
            self.reached = before.reached
        self._ranges: dict[str, tuple[float, float]] = {
            name: (low, high) for name, (low, high) in saved.get("metric_ranges", {}).items()
        }
        if "metric_ranges" not in saved:  # saved by an earlier version: the best and the last
            for metrics in ((saved.get("best") or {}).get("metrics"), saved.get("last_metrics")):
                self._add(metrics or {})

    @property
    def metric(self) -> Monitor | None:
        """The metric of the target."""
        return self.target.metric if self.target else None

    def best(self, metric: Monitor) -> float | None:
        """Return the best value of the metric over all evaluations."""
        low, high = self._ranges.get(metric.name, (None, None))
        return low if metric.lower else high

    def is_met(self, metrics: Mapping[str, float]) -> bool:
        """Return whether these results reach the target, for the first time."""
        target = self.target
        if target is None or self.reached is not None:
            return False
        return target.is_met(metrics[target.metric.name])

    def add(
        self, event: Evaluated, *, samples: int, times: TrainingTimes | None
    ) -> TargetReached | None:
        """Take in an evaluation. Returns the event if it reaches the target.

        `samples`: trained on so far; `times`: until now, with this evaluation.
        """
        met = self.is_met(event.metrics)
        self._add(event.metrics)
        if not met:
            return None
        assert self.target is not None
        self.reached = TargetReached(
            time=event.time,
            step=event.step,
            epoch=event.epoch,
            samples=samples,
            metric=self.target.metric.name,
            value=event.metrics[self.target.metric.name],
            target=self.target.value,
            time_to_target_s=times.training_s if times else None,
            startup_s=times.startup_s if times else None,
            evaluation_s=times.evaluation_s if times else None,
        )
        return self.reached

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint."""
        return {"metric_ranges": {name: list(ends) for name, ends in self._ranges.items()}}

    def _add(self, metrics: Mapping[str, float | None]) -> None:
        for name, value in metrics.items():
            if value is not None and math.isfinite(value):
                low, high = self._ranges.get(name, (value, value))
                self._ranges[name] = min(low, value), max(high, value)
