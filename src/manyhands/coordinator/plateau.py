"""The plateau rule: when a metric stops improving, the learning rate is lowered. Pure.

    plateau  = option (";" option)*
    option   = "factor=" NUMBER | "patience=" N | "watch=" METRIC | "every=" N
             | "threshold=" NUMBER | "cooldown=" N | "lowest=" NUMBER
    METRIC   = a name, or "min " or "max " and a name (metric_monitor.py)

It watches all workers together: a metric of the evaluation, judged after each one, or the mean of the
training losses over an epoch or a number of steps. The coordinator decides between two steps, so that
the learning rate of all workers falls at the same step.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

from manyhands.coordinator.metric_monitor import Monitor, formerly_lower, metric_name, read_monitor
from manyhands.errors import JobError, closest

TRAIN_LOSS = "train_loss"
EXAMPLE = "factor=0.5; patience=3"


@dataclass(frozen=True)
class Plateau:
    factor: float = 0.1
    """Factor on the learning rate."""
    patience: int = 10
    """Number of values in a row that are no better than the best, before it is lowered."""
    watch: str = ""
    """A metric of the evaluation, or train_loss, as "accuracy" or "min mae"; empty: the job's monitor, or
    train_loss without one."""
    every: int = 0
    """Steps over which train_loss is a mean; 0: an epoch."""
    threshold: float = 1e-4
    """Minimum relative improvement over the best value that counts as better."""
    cooldown: int = 0
    """Number of values that are not counted after the learning rate was lowered."""
    lowest: float = 0.0
    """The smallest total factor of the learning rate."""

    def __str__(self) -> str:
        said = {f.name: getattr(self, f.name) for f in fields(self)}
        changed = [f"{f.name}={said[f.name]}" for f in fields(self) if said[f.name] != f.default]
        return "; ".join(changed)

    @property
    def counts_losses(self) -> bool:
        return self.metric.name == TRAIN_LOSS

    @cached_property
    def metric(self) -> Monitor:
        return read_monitor(self.watch, option="watch={}")

    def describe_patience(self, number: int) -> str:
        """Describe a number of the values that patience counts: "3 evaluations"."""
        what = "epoch" if self.counts_losses else "evaluation"
        what = "mean" if self.every else what
        over = f" over {self.every} steps" if self.every else ""
        return f"{number} {what}{'' if number == 1 else 's'}{over}"

    def better(self, value: float, best: float | None) -> bool:
        if not math.isfinite(value):
            return False
        if best is None:
            return True
        by = self.threshold * abs(best)
        return self.metric.better(value, best - by if self.metric.lower else best + by)


def parse_plateau(text: str) -> Plateau:
    """Return the rule of a job's field `plateau`."""
    known = {f.name: f for f in fields(Plateau)}
    given: dict[str, Any] = {}
    for option in filter(str.strip, text.split(";")):
        name, equals, value = (part.strip() for part in option.partition("="))
        if not equals:
            raise _wrong(option, "an option is NAME=VALUE.")
        if name not in known:
            there = ", ".join(known)
            raise _wrong(option, f"there is no {name!r}{closest(name, known)} There are: {there}.")
        if name in given:
            raise _wrong(option, f"{name} is given twice.")
        given[name] = _value(option, name, value)
    return Plateau(**given)


def resolve(
    plateau: Plateau, *, monitor: str, metrics: list[str] | None, saved: Monitor | None = None
) -> Plateau:
    """Return the rule for a job whose evaluation gives these metrics. The watched metric gets a direction,
    that of the job's `monitor` if it is the same metric. `saved`: the metric that a resumed run has
    watched."""
    evaluates = metrics is None or bool(metrics)
    text = plateau.watch or (monitor if evaluates else TRAIN_LOSS)
    if text == metric_name(monitor):
        text = monitor
    watch = metric_name(text)
    if metrics is not None and watch not in (TRAIN_LOSS, *metrics):
        gives = f"the evaluation gives {', '.join(metrics)}" if metrics else "nothing is evaluated"
        raise JobError(
            f'plateau "{plateau}": {watch!r} can\'t be watched: {gives}'
            f"{closest(watch, metrics)} Watch one of these, or {TRAIN_LOSS}."
        )
    if plateau.every and watch != TRAIN_LOSS:
        raise JobError(
            f'plateau "{plateau}": every={plateau.every} is for watch={TRAIN_LOSS}; {watch} is known '
            "after each evaluation, which the job's eval_every sets."
        )
    option = f'plateau="{replace(plateau, watch="{}")}"'
    return replace(plateau, watch=str(read_monitor(text, option=option, saved=saved)))


def saved_watch(plan: Mapping[str, Any] | None) -> Monitor | None:
    """Return the metric that the plateau rule of a saved plan has watched."""
    state = (plan or {}).get("rates", {}).get("plateau", {})
    if not state.get("watch"):
        return None
    return Monitor(state["watch"], state.get("lower", formerly_lower(state["watch"])))


_WHOLE = {"patience": 1, "every": 1, "cooldown": 0}
"""Options that are whole numbers, and the least of each."""


def _value(option: str, name: str, text: str) -> Any:
    if name == "watch":
        if not text:
            raise _wrong(option, "the metric is missing.")
        return text
    if name in _WHOLE:
        if not text.isdecimal() or int(text) < _WHOLE[name]:
            raise _wrong(option, f"{name} is a whole number of at least {_WHOLE[name]}.")
        return int(text)
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    within = 0.0 < value < 1.0 if name == "factor" else 0.0 <= value < 1.0
    if not within:
        least = "above 0" if name == "factor" else "from 0"
        raise _wrong(option, f"{name} is a number {least} and below 1.")
    return value


def _wrong(option: str, complaint: str) -> JobError:
    return JobError(
        f'plateau "{option.strip()}": {complaint} Write, for example,  plateau="{EXAMPLE}".'
    )


class PlateauWatch:
    """The values seen so far, and the decisions of the rule."""

    def __init__(self, rule: Plateau | None, state: Mapping[str, Any] | None = None) -> None:
        state = state or {}
        self.rule = rule
        self.factor: float = state.get("factor", 1.0)
        """Product of all reductions so far. It stays if the rule is removed."""
        if rule is None or saved_watch({"rates": {"plateau": state}}) != rule.metric:
            state = {}  # the best of another metric does not compare
        self.best: float | None = state.get("best")
        self.waited: int = state.get("waited", 0)
        self.cooling: int = state.get("cooling", 0)
        self.num_steps: int = state.get("num_steps", 0)
        """Number of steps in the current mean."""
        self._sum = _number(state.get("sum", 0.0))
        self._samples: int = state.get("samples", 0)

    def state(self) -> dict[str, Any]:
        return {
            "watch": self.rule.metric.name if self.rule else "",
            "lower": self.rule.metric.lower if self.rule else None,
            "factor": self.factor,
            "best": self.best,
            "waited": self.waited,
            "cooling": self.cooling,
            "num_steps": self.num_steps,
            "sum": self._sum,
            "samples": self._samples,
        }

    def add(self, loss: float, samples: int) -> None:
        """Count a committed step."""
        self._sum += loss * samples
        self._samples += samples
        self.num_steps += 1

    def close(self) -> str:
        """Judge the mean over its steps, which is complete."""
        mean = self._sum / self._samples if self._samples else math.nan
        self._sum, self._samples, self.num_steps = 0.0, 0, 0
        return self.judge(mean)

    def judge(self, value: float) -> str:
        """Judge one more value. Returns why the learning rate is lowered now, or an empty string."""
        rule = self.rule
        assert rule is not None
        if rule.better(value, self.best):
            self.best, self.waited = value, 0
        else:
            self.waited += 1
        if self.cooling:
            self.cooling, self.waited = self.cooling - 1, 0
        lower = max(rule.lowest, self.factor * rule.factor)
        if self.waited < rule.patience or lower >= self.factor:
            return ""
        than = "a number" if self.best is None else f"better than {self.best:.4g}"
        why = f"{rule.metric.name} has not been {than} for {rule.describe_patience(self.waited)}"
        self.factor, self.waited, self.cooling = lower, 0, rule.cooldown
        return why


def _number(value: float | None) -> float:
    """Return a number from JSON, which has None for what is not a number."""
    return math.nan if value is None else value
