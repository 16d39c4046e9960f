"""Statistics of staleness, without lockstep. Pure.

The staleness of a part is the number of updates applied between the weights that it was computed on
and its own update: 0 where all wait for all, about the number of workers less one where nobody waits.

`StalenessStats` counts in bins 0, 1, 2-3, 4-7, ... so that it stays a few numbers however long the
run. Mean and maximum are exact; p95 is the upper end of a bin, at
most twice the true value.
"""

from __future__ import annotations

from typing import Any


class StalenessStats:
    """Counts of staleness so far."""

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
        index = staleness.bit_length()
        self._bins += [0] * (index + 1 - len(self._bins))
        self._bins[index] += 1

    @property
    def mean(self) -> float:
        return self.total / self.count if self.count else 0.0

    @property
    def p95(self) -> int:
        """The 95th percentile: the upper end of its bin, or the maximum."""
        below = 0
        for i, count in enumerate(self._bins):
            below += count
            if below * 100 >= self.count * 95:
                return min(_ends(i)[1], self.max)
        return 0

    def histogram(self) -> dict[str, int]:
        """Return the counts by bin, "0", "1", "2-3", "4-7", ... up to the one of the maximum."""
        return {_label(i): count for i, count in enumerate(self._bins)}

    def to_dict(self) -> dict[str, Any]:
        """Return the statistics for the summary."""
        return {
            "count": self.count,
            "total": self.total,
            "mean": round(self.mean, 4),
            "max": self.max,
            "p95": self.p95,
            "histogram": self.histogram(),
        }


def _ends(index: int) -> tuple[int, int]:
    return (1 << index) >> 1, (1 << index) - 1


def _label(index: int) -> str:
    low, high = _ends(index)
    return str(low) if low == high else f"{low}-{high}"
