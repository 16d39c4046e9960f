"""What is in the weights: decisions, in the order of their versions, and what they were made of. Pure.

A *decision* says what the next update consists of. The lead, the first server of a view, makes them
out of what its policy allows; every server applies all of them in the same order, so that a version
means the same thing everywhere, and a survivor can finish what a dead one has begun.

The ledger remembers the last decisions (a server may be a few behind another when the membership
changes), the parts of steps that were applied lately (whoever pushed them may be dead), how many
pushes of each worker were applied since the run began (the books, for audits), and how much of the
data they were: the learning rate's schedule goes by batches, not by updates.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from fractions import Fraction
from typing import Any

KEEP_PUSHES = 64
"""Decisions are remembered for so many pushes, and four more for each worker: it has at most two under
way, so servers are at most twice the workers apart, and replicas at most two updates behind those."""
KEEP_PARTS = 4096
"""A worker reports several times a second; this many parts are not applied in between."""


@dataclass(frozen=True, slots=True)
class Contribution:
    """A worker's gradient in an update: one push."""

    worker: str
    seq: int
    slot: int = 0
    """Which of the worker's gradient buffers holds it."""
    step: int = 0
    part: int = 0
    samples: float = 1.0
    """Its weight: the number of samples, or the job's own weights."""
    total: float = 1.0
    """What the gradient was divided by already."""
    share: tuple[int, int] = (1, 1)
    """The part of a batch that it is, as a fraction."""
    staleness: int = 0
    """Updates applied since the worker got the weights of this step."""
    scale: float = 1.0
    """Factor set by the policy, and by clipping on the worker."""
    lr_factor: float = 1.0
    """Factor on the learning rate of its step."""
    ticks: int = 1
    """Schedule steps that its whole batch counts as."""
    loss: float = 0.0
    """Sum of its losses, each times its weight: the worker may die before it reports them."""

    @property
    def push(self) -> tuple[str, int]:
        """(worker, seq): what identifies it."""
        return self.worker, self.seq


_FIELDS = tuple(each.name for each in fields(Contribution))


@dataclass(frozen=True, slots=True)
class Decision:
    version: int
    """The version that it makes."""
    contributions: tuple[Contribution, ...]
    """In rank order: the order in which they are added."""
    lr_scale: float = 1.0
    progress: tuple[int, int] = (0, 1)
    """Steps of the schedule after it, since training began, as a fraction: mostly one a batch."""
    factor: float = 1.0
    """What clipping multiplied the sum by; known once it is applied."""

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

    def to_dict(self) -> dict[str, Any]:
        return {
            "v": self.version,
            "contributions": [[getattr(g, name) for name in _FIELDS] for g in self.contributions],
            "lr": self.lr_scale,
            "progress": self.progress,
            "factor": self.factor,
        }

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> Decision:
        contributions = tuple(
            Contribution(str(w), int(q), int(slot), int(step), int(part), float(n), float(t), _pair(share),
                  int(stale), float(scale), float(factor), int(ticks), float(loss))
            for w, q, slot, step, part, n, t, share, stale, scale, factor, ticks, loss
            in record["contributions"]
        )  # fmt: skip
        return cls(
            int(record["v"]),
            contributions,
            float(record["lr"]),
            _pair(record["progress"]),
            float(record["factor"]),
        )


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
        """It is applied."""
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
        """What was applied after `version`, oldest first."""
        missed = [d for d in self.decisions if d.version > version]
        assert len(missed) == self.version - version, f"{version} is too long ago to catch up from"
        return missed

    def between(self, version: int, last: int) -> list[Decision]:
        """What was applied after `version`, up to `last`."""
        return [d for d in self.after(version) if d.version <= last] if last > version else []

    def to_dict(self) -> dict[str, Any]:
        return {
            "version": self.version,
            "progress": [self.progress.numerator, self.progress.denominator],
            "counts": dict(self.counts),
            "decisions": [d.to_dict() for d in self.decisions],
            "parts": [list(part) for part in self.parts],
        }

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> Ledger:
        ledger = cls(
            int(record["version"]),
            Fraction(*_pair(record["progress"])),
            Counter({str(k): int(n) for k, n in record["counts"].items()}),
        )
        ledger.decisions.extend(Decision.from_dict(d) for d in record["decisions"])
        ledger._kept = sum(len(d.contributions) for d in ledger.decisions)
        ledger.parts.extend(
            (int(step), int(part), float(weight), float(loss))
            for step, part, weight, loss in record["parts"]
        )
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


def _pair(value: Any) -> tuple[int, int]:
    first, second = value
    return int(first), int(second)
