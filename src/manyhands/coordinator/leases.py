"""Leases: which samples of an epoch are free, leased, or used. Pure.

An epoch is a permutation of its samples; positions in it are handed out as ranges [start, stop). A range that
was leased is either committed (its samples are in the weights) or given back (its holder died, or a step was
undone), so every sample of an epoch is used exactly once, even if members die.
"""

from __future__ import annotations

from collections.abc import Iterable

from manyhands.ranges import Range, Ranges


class Leases:
    """One epoch's samples: free, leased, committed."""

    def __init__(self, num_samples: int, committed: Iterable[Range] = ()) -> None:
        self.num_samples = num_samples
        self.committed = Ranges(committed)
        self.leased = Ranges()
        self.free = Ranges([(0, num_samples)])
        for piece in self.committed.to_list():
            self.free.remove(piece)

    def take(self, count: int) -> list[Range]:
        taken = self.free.take(count)
        for piece in taken:
            self.leased.add(piece)
        return taken

    def commit(self, ranges: Iterable[Range]) -> None:
        for piece in ranges:
            self.leased.remove(piece)
            self.committed.add(piece)

    def give_back(self, ranges: Iterable[Range]) -> None:
        for piece in ranges:
            self.leased.remove(piece)
            self.free.add(piece)

    @property
    def exhausted(self) -> bool:
        """If true, nothing is left to hand out; leases may still be open."""
        return not len(self.free)
