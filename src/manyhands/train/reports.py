"""What members report, put together. Pure, and without torch.

A step is committed when every worker of the view has reported it. Its loss is the weighted mean of
the workers' losses, its time that of the slowest. An evaluation is the weighted mean of the parts.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from manyhands.train.course import StepPlan
from manyhands.train.leases import Range


@dataclass(frozen=True)
class Row:
    """One member's report of one step, as it travels."""

    step: int
    weight: float
    loss_sum: float
    lr: float
    step_s: float
    compute_s: float | None
    wait_s: float | None
    bytes_sent: int


@dataclass
class OpenStep:
    plan: StepPlan
    shares: Mapping[str, tuple[Range, ...]]
    rows: dict[str, Row]

    @property
    def missing(self) -> list[str]:
        return [name for name in self.shares if name not in self.rows]


@dataclass(frozen=True)
class Committed:
    plan: StepPlan
    shares: Mapping[str, tuple[Range, ...]]
    loss: float
    lr: float
    step_s: float
    compute_s: float | None
    wait_s: float | None
    bytes_sent: int


class Gathering:
    """The steps that were given out, until every worker has reported them."""

    def __init__(self) -> None:
        self._open: dict[int, OpenStep] = {}

    def __len__(self) -> int:
        return len(self._open)

    @property
    def first(self) -> OpenStep | None:
        return next(iter(self._open.values()), None)

    def expect(self, plan: StepPlan, shares: Mapping[str, Sequence[Range]]) -> None:
        parts = {name: tuple(ranges) for name, ranges in shares.items()}
        self._open[plan.step] = OpenStep(plan, parts, {})

    def add(self, member: str, row: Row) -> None:
        self._open[row.step].rows[member] = row

    def committed(self) -> Iterator[Committed]:
        """The steps that are complete now, in order."""
        while (first := self.first) is not None and not first.missing:
            del self._open[first.plan.step]
            yield _together(first)


def _together(step: OpenStep) -> Committed:
    # In rank order, not in that of arrival: sums of floats depend on it, and two runs must be equal.
    rows = [step.rows[name] for name in step.shares]
    weight = sum(row.weight for row in rows)
    return Committed(
        plan=step.plan,
        shares=step.shares,
        loss=sum(row.loss_sum for row in rows) / weight if weight else math.nan,
        lr=rows[0].lr,
        step_s=max(row.step_s for row in rows),
        compute_s=_mean([row.compute_s for row in rows]),
        wait_s=_mean([row.wait_s for row in rows]),
        bytes_sent=sum(row.bytes_sent for row in rows),
    )


def _mean(values: Sequence[float | None]) -> float | None:
    """The mean of what is known."""
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def combine(parts: Sequence[Mapping[str, Any]]) -> tuple[int, dict[str, float]]:
    """All workers' parts of an evaluation, as (samples, metrics)."""
    # A part may be empty, and then knows no names.
    names = dict.fromkeys(name for part in parts for name in part["sums"])
    means = {}
    for name in names:
        pairs = [part["sums"].get(name, (0.0, 0.0)) for part in parts]
        weight = sum(pair[1] for pair in pairs)
        means[name] = sum(pair[0] for pair in pairs) / weight if weight else math.nan
    return sum(part["samples"] for part in parts), means
