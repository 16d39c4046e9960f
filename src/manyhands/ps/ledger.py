"""What is in the weights: decisions, in the order of their versions, and what they were made of. Pure.

A *decision* says which contributions make up the next update. Every server applies all decisions in the same
order, so that a version means the same everywhere, and a survivor can finish what a dead server has begun.

The ledger remembers the last decisions (a server may be a few behind another when the membership
changes), the parts of steps that were applied lately (whoever pushed them may be dead), how many
pushes of each worker were applied since the run began (the books, for audits), and how much of the
data they were: the learning rate's schedule goes by batches, not by updates.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Annotated

from manyhands.transport.fields import Finite, Weight, at_least, at_most

KEEP_PUSHES = 64
"""Decisions are remembered for so many pushes, and four more for each worker: it has at most two under
way, so servers are at most twice the workers apart, and replicas at most two updates behind those."""
KEEP_PARTS = 4096
"""A worker reports several times a second; this many parts are not applied in between."""


MAX_NUMBER = (1 << 53) - 1
MAX_TICKS = 1 << 16
"""More steps of a schedule than any batch is."""


def _share(value: tuple[int, int]) -> tuple[int, int]:
    if not (0 <= value[0] <= value[1] <= MAX_NUMBER and value[1] > 0):
        raise ValueError("is not a part of a batch")
    return value


def _progress(value: tuple[int, int]) -> tuple[int, int]:
    if value[0] < 0 or value[1] <= 0:
        raise ValueError("is not a number of steps")
    return value


def _positive(value: float) -> float:
    if not 0 < value <= MAX_NUMBER:
        raise ValueError("is not positive")
    return value


Index = Annotated[int, at_least(0), at_most(MAX_NUMBER)]
Number = Annotated[int, at_least(1), at_most(MAX_NUMBER)]
"""As Index, counted from 1."""


@dataclass(frozen=True, slots=True)
class Contribution:
    """A worker's gradient in an update: one push."""

    worker: str
    seq: Number
    slot: Index = 0
    """Which of the worker's gradient buffers holds it."""
    step: Index = 0
    part: Index = 0
    samples: Weight = 1.0
    """Its weight: the number of samples, or the job's own weights."""
    total: Annotated[float, _positive] = 1.0
    """What the gradient was divided by already."""
    share: Annotated[tuple[int, int], _share] = (1, 1)
    """The part of a batch that it is, as a fraction."""
    staleness: Index = 0
    """Updates applied since the worker got the weights of this step."""
    scale: Weight = 1.0
    """Factor set by the policy, and by clipping on the worker."""
    lr_factor: Annotated[float, _positive] = 1.0
    """Factor on the learning rate of its step."""
    ticks: Annotated[Index, at_most(MAX_TICKS)] = 1
    """Schedule steps that its whole batch counts as."""
    loss: Finite = 0.0
    """Sum of its losses, each times its weight: the worker may die before it reports them."""

    @property
    def push(self) -> tuple[str, int]:
        """(worker, seq): what identifies it."""
        return self.worker, self.seq


@dataclass(frozen=True, slots=True)
class Decision:
    version: Number
    """The version of the weights after it."""
    contributions: tuple[Contribution, ...]
    """In rank order: the order in which they are added."""
    lr_scale: Finite = 1.0
    progress: Annotated[tuple[int, int], _progress] = (0, 1)
    """Steps of the schedule after it, since training began, as a fraction: mostly one a batch."""
    factor: Finite = 1.0
    """Factor from clipping; known once the sum is made."""

    @property
    def ticks(self) -> int:
        """Whole steps of the schedule after it."""
        return self.progress[0] // self.progress[1]

    def coefficients(self) -> list[float]:
        """What to multiply each gradient by, so that every sample counts as in the mean over its own batch,
        also where parts of several batches meet in an update, or of one not all.

        Where the batch is here as a part only, what all of it weighs by a job's own weights is not known:
        it is taken to weigh as much a sample as that part.
        """
        counts: dict[int, int] = defaultdict(int)
        weights: dict[int, float] = defaultdict(float)
        for g in self.contributions:
            counts[g.step] += g.share[0]
            weights[g.step] += g.samples
        return [
            g.scale * (g.total * counts[g.step]) / (g.share[1] * weights[g.step])
            if weights[g.step]
            else 0.0
            for g in self.contributions
        ]


@dataclass(frozen=True)
class LedgerRecord:
    """A ledger as it is sent: see Ledger."""

    version: Index
    progress: Fraction
    counts: Mapping[str, Index]
    decisions: Sequence[Decision]
    parts: Sequence[tuple[int, int, float, float]]


@dataclass
class Ledger:
    version: int = 0
    progress: Fraction = field(default_factory=Fraction)
    counts: Counter[str] = field(default_factory=Counter)
    """Pushes applied, by worker, since the run began."""
    decisions: deque[Decision] = field(default_factory=deque)
    """The last ones, newest last."""
    parts: deque[tuple[int, int, float, float]] = field(
        default_factory=lambda: deque(maxlen=KEEP_PARTS)
    )
    """Step, part, weight and loss of what was applied lately, newest last."""
    _kept: int = 0
    """Pushes in `decisions`."""

    @property
    def ticks(self) -> int:
        return int(self.progress)

    def note(self, decision: Decision) -> None:
        """Note that a decision is applied."""
        assert decision.version == self.version + 1, f"{decision.version} after {self.version}"
        self.version = decision.version
        self.progress = Fraction(*decision.progress)
        self.decisions.append(decision)
        for each in decision.contributions:
            self.counts[each.worker] += 1
            self.parts.append((each.step, each.part, each.samples, each.loss))
        self._kept += len(decision.contributions)
        most = KEEP_PUSHES + 4 * len(self.counts)
        while self._kept - len(self.decisions[0].contributions) >= most:
            self._kept -= len(self.decisions.popleft().contributions)

    def after(self, version: int) -> list[Decision]:
        """Decisions applied after `version`, oldest first."""
        missed = [d for d in self.decisions if d.version > version]
        assert len(missed) == self.version - version, f"{version} is too long ago to catch up from"
        return missed

    def between(self, version: int, last: int) -> list[Decision]:
        """Decisions applied after `version`, up to `last`."""
        return [d for d in self.after(version) if d.version <= last] if last > version else []

    def to_record(self) -> LedgerRecord:
        return LedgerRecord(
            self.version, self.progress, dict(self.counts), tuple(self.decisions), tuple(self.parts)
        )

    @classmethod
    def from_record(cls, record: LedgerRecord) -> Ledger:
        ledger = cls(record.version, record.progress, Counter(record.counts))
        ledger.decisions.extend(record.decisions)
        ledger._kept = sum(len(d.contributions) for d in ledger.decisions)
        ledger.parts.extend(record.parts)
        return ledger


def progress_after(before: Fraction, contributions: Iterable[Contribution]) -> Fraction:
    return before + sum((Fraction(*g.share) * g.ticks for g in contributions), Fraction())


def lr_factor(contributions: Sequence[Contribution]) -> float:
    """Of an update that is made of these: what all say, or their mean where they are of several steps."""
    first = contributions[0].lr_factor
    if all(g.lr_factor == first for g in contributions):
        return first
    whole = sum(g.samples for g in contributions)
    return sum(g.lr_factor * g.samples for g in contributions) / whole if whole else first
