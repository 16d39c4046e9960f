"""Staleness of pushes: what it does to the learning rate, and how much of it there was. Pure.

The staleness of a push is the number of updates applied between the weights that it was computed on
and its own update: 0 where all wait for all, about the number of workers less one where nobody waits.

`lr_scale` is what the learning rate of one push is multiplied by (Zhang et al. 2016, "Staleness-aware
Async-SGD": divide by it; the square root is the milder rule for where that makes the steps too small).
`StalenessTally` counts in bins 0, 1, 2-3, 4-7, ... so that it stays a few numbers however long the
run, travels in an event, and merges over servers exactly. Its mean and maximum are exact, its p95 is
the upper end of a bin: at most twice the true one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

from manyhands.errors import SpecError, closest

Rule = Literal["none", "inverse", "sqrt"]
RULES: tuple[Rule, ...] = ("none", "inverse", "sqrt")


def lr_scale(rule: Rule, staleness: int) -> float:
    """1, 1/(1+staleness) or 1/sqrt(1+staleness)."""
    assert staleness >= 0, f"staleness {staleness} is below 0"
    if rule == "none":
        return 1.0
    if rule == "inverse":
        return 1 / (1 + staleness)
    if rule == "sqrt":
        return 1 / math.sqrt(1 + staleness)
    raise SpecError(
        f"{rule!r} is no rule for the learning rate over staleness{closest(str(rule), RULES)} "
        f"There are {', '.join(RULES)}; write one of them."
    )


class StalenessTally:
    """How stale the pushes were, so far."""

    def __init__(self) -> None:
        self.count = 0
        self.total = 0
        self.max = 0
        self._bins: list[int] = []

    def add(self, staleness: int) -> None:
        assert staleness >= 0, f"staleness {staleness} is below 0"
        self.count += 1
        self.total += staleness
        self.max = max(self.max, staleness)
        # Bin b > 0 holds the numbers of b binary digits: 2**(b-1) up to 2**b - 1.
        self._grow(staleness.bit_length() + 1)
        self._bins[staleness.bit_length()] += 1

    def merge(self, other: StalenessTally) -> None:
        """Count all that the other has counted, too."""
        self.count += other.count
        self.total += other.total
        self.max = max(self.max, other.max)
        self._grow(len(other._bins))
        for i, count in enumerate(other._bins):
            self._bins[i] += count

    @property
    def mean(self) -> float:
        return self.total / self.count if self.count else 0.0

    @property
    def p95(self) -> int:
        """95 of 100 pushes were at most so stale: the upper end of the bin, or the maximum."""
        below = 0
        for i, count in enumerate(self._bins):
            below += count
            if below * 100 >= self.count * 95:
                return min(_ends(i)[1], self.max)
        return 0

    def histogram(self) -> dict[str, int]:
        """Counts by bin, "0", "1", "2-3", "4-7", ... up to the one of the maximum."""
        return {_label(i): count for i, count in enumerate(self._bins)}

    def to_dict(self) -> dict[str, Any]:
        """For events and the summary; `from_dict` reads it back."""
        return {
            "count": self.count,
            "total": self.total,
            "mean": round(self.mean, 4),
            "max": self.max,
            "p95": self.p95,
            "histogram": self.histogram(),
        }

    @classmethod
    def from_dict(cls, told: Mapping[str, Any]) -> StalenessTally:
        tally = cls()
        tally.count, tally.total, tally.max = told["count"], told["total"], told["max"]
        tally._bins = [told["histogram"][_label(i)] for i in range(len(told["histogram"]))]
        return tally

    def _grow(self, num_bins: int) -> None:
        self._bins += [0] * (num_bins - len(self._bins))


def _ends(index: int) -> tuple[int, int]:
    return (1 << index) >> 1, (1 << index) - 1


def _label(index: int) -> str:
    low, high = _ends(index)
    return str(low) if low == high else f"{low}-{high}"
