"""Progress of the open steps: combines the reports of members. Pure, and without torch.

A step is cut into parts, one per replica in lockstep. It is committed when every part of it is in the
weights, in whatever order the reports come. Its loss and its learning rate are weighted means over its
parts. In lockstep its time is that of the slowest worker; otherwise it is the workers' time for its
parts, dropped attempts included, divided by the number of workers. In a training in rounds, a step may be
committed with some of its parts, because a worker died and took the others along. An evaluation is the
weighted mean of the replicas' parts.

All workers of a replica compute the same part. The report of the first one says what the part's weight and
loss are (and it alone has what the job has logged); times, bytes and other measures are those of all.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from manyhands.contract import WHOLE
from manyhands.control.messages import EvaluationReport, StepRow
from manyhands.coordinator.plan import StepPlan
from manyhands.events.events import StepCommitted
from manyhands.measure import Measure, combine
from manyhands.ranges import Range, Ranges

PartKey = tuple[int, int]
"""(step, part)"""
Sums = tuple[float, float]
"""Weight, and sum of the losses times their weights."""


@dataclass
class OpenPart:
    ranges: tuple[Range, ...]
    holders: tuple[str, ...] = ()
    """The members whose attempt counts: the workers of a replica, in rank order."""
    rows: dict[str, StepRow] = field(default_factory=dict)
    """Reports of the holders."""
    settled: bool = False
    """If true, it is in the weights according to the members, and its row was lost."""
    sums: Sums | None = None
    """Sums that the members know of a settled part."""
    wasted: list[tuple[str, StepRow]] = field(default_factory=list)
    """Attempts that were dropped, with their members: their time was spent, and their bytes sent."""

    @property
    def done(self) -> bool:
        return self.settled or 0 < len(self.rows) == len(self.holders)

    @property
    def first_row(self) -> StepRow | None:
        """The report that counts for the samples of the part."""
        return self.rows.get(self.holders[0]) if self.rows else None


@dataclass
class OpenStep:
    plan: StepPlan
    parts: dict[int, OpenPart]
    sums: Sums | None = None
    """Sums of the whole step, if members know them and rows were lost."""
    lost: tuple[Range, ...] = ()
    """Samples that are not in the weights and never will be, as a part of this step."""
    left: int = field(init=False)
    """Number of parts that are not in the weights yet."""

    def __post_init__(self) -> None:
        self.left = len(self.parts)

    @property
    def missing(self) -> list[str]:
        """Members whose reports are missing."""
        open_parts = [part for part in self.parts.values() if not part.done]
        return [name for part in open_parts for name in part.holders if name not in part.rows]


@dataclass(frozen=True, slots=True)
class MemberPart:
    """One attempt of a member at a part of a step."""

    member: str
    samples: int
    row: StepRow | None
    """None if its report was lost."""
    applied: bool = True
    """If false, it was dropped."""


@dataclass(frozen=True)
class CommittedStep:
    event: StepCommitted
    num_parts: int
    weight: float
    """Total weight of its samples. A step without weight has no loss."""
    staleness: tuple[int, ...]
    """Staleness of each part that was reported."""
    parts: Sequence[MemberPart] = ()
    """All attempts at its parts, dropped ones included."""
    lost: tuple[Range, ...] = ()
    """Samples that were lost: they come again in another step."""


class StepProgress:
    """The steps that were dispatched, until all their parts are in the weights."""

    def __init__(self) -> None:
        self.width: int | None = None
        """Number of workers that share the time of a step; None in lockstep, where each takes all of it."""
        self.measures: Mapping[str, Measure] = {}
        """What jobs and learners report besides the columns of a row; others are means."""
        self._open: dict[int, OpenStep] = {}
        self._complete: list[OpenStep] = []
        self._last: StepCommitted | None = None

    def __len__(self) -> int:
        return len(self._open)

    @property
    def first(self) -> OpenStep | None:
        return next(iter(self._open.values()), None)

    @property
    def steps(self) -> Sequence[OpenStep]:
        """The open steps, oldest first."""
        return tuple(self._open.values())

    def expect(
        self,
        plan: StepPlan,
        parts: Mapping[int, Sequence[Range]],
        holders: Mapping[int, Sequence[str]] | None = None,
    ) -> None:
        """`holders`: the members that compute each part, if they are known already."""
        holders = holders or {}
        self._open[plan.step] = OpenStep(
            plan,
            {n: OpenPart(tuple(ranges), tuple(holders.get(n, ()))) for n, ranges in parts.items()},
        )

    def assign(self, key: PartKey, holder: str) -> None:
        """Make this member the one whose attempt at the part counts."""
        part = self._part(key)
        assert part is not None, f"part {key} is assigned and was never expected"
        assert not part.done, f"part {key} is assigned and in the weights already"
        part.holders = (holder,)

    def add(self, member: str, row: StepRow) -> bool:
        """Take in a report; True if it was awaited and its part is in the weights. Others are ignored."""
        part = self._part((row.step, row.part))
        if part is None or part.done or member not in part.holders or member in part.rows:
            return False
        if row.dropped:
            part.holders = ()
            part.wasted.append((member, row))
            return False
        part.rows[member] = row
        if part.done:
            self._count_down(row.step)
        return True

    def samples(self, key: PartKey) -> int:
        """Return the number of samples of an open part; 0 if it is not open."""
        part = self._part(key)
        return 0 if part is None else sum(stop - start for start, stop in part.ranges)

    def is_open(self, key: PartKey) -> bool:
        part = self._part(key)
        return part is not None and not part.done

    def settle(self, applied: Mapping[PartKey, Sums | None], *, whole: bool) -> None:
        """Record which parts are in the weights, reported or not, with what is known of each part or of WHOLE
        steps. `whole`: a step is in the weights as a whole or not at all."""
        for step in self.steps:
            number = step.plan.step
            in_weights = [
                n
                for n, part in step.parts.items()
                if part.settled or part.rows or (number, n) in applied
            ]
            step.sums = applied.get((number, WHOLE))
            for n in step.parts if whole and in_weights else in_weights:
                if not step.parts[n].done:
                    step.parts[n].settled = True
                    step.parts[n].sums = applied.get((number, n))
                    self._count_down(number)

    def settle_rounds(self, applied: Mapping[PartKey, Sums | None]) -> None:
        """Record which parts are in the weights, in a training in rounds. Of a step that is in them in part,
        the other parts are lost, even if all were reported: a worker that had averaged the weights may have
        died before any other had."""
        self._open = {step.plan.step: step for step in (*self._complete, *self._open.values())}
        self._complete = []
        for step in self.steps:
            number = step.plan.step
            step.sums = applied.get((number, WHOLE))
            whole, kept = (number, WHOLE) in applied, dict[int, OpenPart]()
            lost = Ranges()
            for n, part in step.parts.items():
                if whole or (number, n) in applied:
                    part.settled, part.sums = True, applied.get((number, n))
                    kept[n] = part
                else:
                    for piece in part.ranges:
                        lost.add(piece)
            if kept:
                step.parts, step.lost, step.left = kept, tuple(lost.to_list()), 0
                self._complete.append(self._open.pop(number))

    def clear(self) -> None:
        """Void what is open."""
        self._open.clear()

    def committed(self) -> Iterator[CommittedStep]:
        """Return the steps that are complete now, oldest first."""
        complete, self._complete = sorted(self._complete, key=lambda s: s.plan.step), []
        for step in complete:
            combined = self._combine(step)
            self._last = combined.event
            yield combined

    def _part(self, key: PartKey) -> OpenPart | None:
        step = self._open.get(key[0])
        return step.parts.get(key[1]) if step else None

    def _count_down(self, number: int) -> None:
        step = self._open[number]
        step.left -= 1
        if not step.left:
            self._complete.append(self._open.pop(number))

    def _combine(self, step: OpenStep) -> CommittedStep:
        # In the order of parts, not of arrival: sums of floats depend on it, and two runs must be equal.
        parts = [step.parts[n] for n in sorted(step.parts)]
        rows = [row for part in parts if (row := part.first_row) is not None]
        every = [part.rows[name] for part in parts for name in part.holders if name in part.rows]
        held: dict[str, Ranges] = {}
        for part in parts:
            if part.holders:
                ranges = held.setdefault(part.holders[0], Ranges())
                for piece in part.ranges:
                    ranges.add(piece)
        last = self._last
        known = [
            (row.weight, row.loss_sum) if (row := part.first_row) is not None else part.sums
            for part in parts
        ]
        sums = [pair for pair in known if pair is not None]
        if len(rows) < len(parts) and step.sums is not None and step.sums[0]:
            sums = [step.sums]
        weight = sum(pair[0] for pair in sums)
        wasted = [attempt for part in parts for attempt in part.wasted]
        spent = [row for _, row in wasted] + every
        loss = sum(pair[1] for pair in sums) / weight if weight else math.nan
        if not weight and len(rows) < len(parts) and last is not None:
            loss = last.loss  # nothing is known of its parts except that they count
        staleness = tuple(row.staleness for row in rows)
        event = StepCommitted(
            step=step.plan.step,
            epoch=step.plan.epoch,
            samples=step.plan.samples - sum(stop - start for start, stop in step.lost),
            shares={name: tuple(ranges.to_list()) for name, ranges in held.items()},
            loss=loss,
            lr=_mean_lr(rows) if rows else last.lr if last else math.nan,
            step_s=self._seconds(spent) if every else last.step_s if last else 0.0,
            compute_s=self._mean([row.compute_s for row in spent]),
            wait_s=self._mean([row.wait_s for row in spent]),
            bytes_sent=sum(row.bytes_sent for row in spent),
            staleness=sum(staleness) / len(rows) if self.width and rows else None,
            measures=combine([row.measures for row in every if row.measures], self.measures),
        )
        attempts = [MemberPart(member, 0, row, applied=False) for member, row in wasted]
        attempts += [
            MemberPart(name, sum(stop - start for start, stop in part.ranges), part.rows.get(name))
            for part in parts
            for name in part.holders
        ]
        return CommittedStep(event, len(parts), weight, staleness, attempts, step.lost)

    def _seconds(self, rows: Sequence[StepRow]) -> float:
        if self.width is None:
            return max(row.step_s for row in rows)
        return sum(row.step_s for row in rows) / self.width

    def _mean(self, values: Sequence[float | None]) -> float | None:
        """Return the mean over workers of the known values."""
        known = [value for value in values if value is not None]
        return sum(known) / (self.width or len(known)) if known else None


def _mean_lr(rows: Sequence[StepRow]) -> float:
    """Return the mean learning rate of the parts, by weight."""
    first, whole = rows[0].lr, sum(row.weight for row in rows)
    if not whole or all(row.lr == first for row in rows):
        return first
    return sum(row.lr * row.weight for row in rows) / whole


def evaluation_of(
    parts: Sequence[EvaluationReport], measures: Mapping[str, Measure]
) -> tuple[int, dict[str, float]]:
    """Combine all replicas' parts of an evaluation into (samples, metrics)."""
    return sum(part.samples for part in parts), combine([part.sums for part in parts], measures)
