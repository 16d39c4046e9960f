"""Sets of positions as ranges [start, stop), and how to divide them. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

Range = tuple[int, int]


class Ranges:
    """A set of integers as sorted, disjoint, non-touching ranges."""

    def __init__(self, ranges: Iterable[Range] = ()) -> None:
        self._ranges: list[Range] = []
        for piece in ranges:
            self.add(piece)

    def __len__(self) -> int:
        return sum(stop - start for start, stop in self._ranges)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Ranges) and self._ranges == other._ranges

    def __repr__(self) -> str:
        return f"Ranges({self._ranges})"

    def to_list(self) -> list[Range]:
        return list(self._ranges)

    def add(self, piece: Range) -> None:
        """Add a range that is disjoint from the set."""
        start, stop = piece
        if start >= stop:
            return
        before = [r for r in self._ranges if r[1] < start]
        after = [r for r in self._ranges if r[0] > stop]
        touching = self._ranges[len(before) : len(self._ranges) - len(after)]
        for low, high in touching:
            assert high <= start or low >= stop, f"{piece} overlaps {(low, high)}"
            start, stop = min(start, low), max(stop, high)
        self._ranges = [*before, (start, stop), *after]

    def remove(self, piece: Range) -> None:
        """Remove a range that is completely in the set."""
        start, stop = piece
        if start >= stop:
            return
        for index, (low, high) in enumerate(self._ranges):
            if low <= start and stop <= high:
                left = [(low, start)] if low < start else []
                right = [(stop, high)] if stop < high else []
                self._ranges[index : index + 1] = left + right
                return
        raise AssertionError(f"{piece} is not completely in {self._ranges}")

    def take(self, count: int) -> list[Range]:
        """Remove and return the first `count` integers, or all if there are fewer."""
        taken: list[Range] = []
        while count > 0 and self._ranges:
            start, stop = self._ranges[0]
            stop = min(stop, start + count)
            self.remove((start, stop))
            taken.append((start, stop))
            count -= stop - start
        return taken


def split(ranges: Sequence[Range], counts: Sequence[int]) -> list[list[Range]]:
    """Divide `ranges` into consecutive parts of the given sizes, which must add up to their total length."""
    rest = Ranges(ranges)
    assert sum(counts) == len(rest), f"{sum(counts)} requested of {len(rest)}"
    return [rest.take(count) for count in counts]


def shares(total: int, weights: Sequence[float]) -> list[int]:
    """Divide `total` samples in proportion to `weights`, by largest remainders.

    Ties go to the lower rank: with equal weights, the first shares are larger by one if there is a remainder.
    """
    exact = [total * weight / sum(weights) for weight in weights]
    counts = [int(value) for value in exact]
    by_remainder = sorted(range(len(weights)), key=lambda i: (counts[i] - exact[i], i))
    for i in by_remainder[: total - sum(counts)]:
        counts[i] += 1
    return counts
