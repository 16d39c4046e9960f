"""Sums that are made run by run, while gradients still come.

Where an update is everybody's gradients, a run of it can be added up, and sent to whoever keeps its replica,
as soon as that run has come from every worker: the network has something to do while others still compute.
That the update is decided on comes later, and says so (updates.py). Between hosts only; and not where the
whole gradient must be known before anything is done with a part of it: to clip it, or to weigh samples by a
job's own weights.

Which runs are here, of which push. Used by the server's thread alone.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from manyhands.ps.ledger import Decision


@dataclass
class PartialRound:
    """What has come of one round's gradients."""

    slots: dict[str, int] = field(default_factory=dict)
    """Of each worker, the gradient buffer that it is in."""
    here: dict[int, set[str]] = field(default_factory=lambda: defaultdict(set))
    """By run: whose are here."""


class PartialSums:
    def __init__(self, workers: Sequence[str]) -> None:
        """`workers` in the order in which they are added up."""
        self._workers = list(workers)
        self._rounds: dict[int, PartialRound] = {}
        self._over = 0
        """The last round that was decided on."""

    def arrived(self, worker: str, seq: int, slot: int, runs: Iterable[int]) -> list[int]:
        """Runs of a push are here; those that are complete with them."""
        if seq <= self._over:
            return []  # sent again
        now = self._rounds.setdefault(seq, PartialRound())
        now.slots[worker] = slot
        complete = []
        for run in runs:
            before = len(now.here[run])
            now.here[run].add(worker)
            if before < len(now.here[run]) == len(self._workers):
                complete.append(run)
        return complete

    def sources(self, seq: int) -> list[tuple[str, int]]:
        """The worker and slot of each gradient of a round of which a run is complete, in order."""
        slots = self._rounds[seq].slots
        return [(worker, slots[worker]) for worker in self._workers]

    def decided(self, decision: Decision) -> int | None:
        """The round that it is, if the sum of the gradients as they are is what was decided on. What has
        come of it, or before it, is forgotten."""
        seqs = {given.seq for given in decision.contributions}
        (seq,) = seqs if len(seqs) == 1 else (None,)
        plain = all(factor == 1.0 for factor in decision.coefficients())
        same = plain and [one.worker for one in decision.contributions] == self._workers
        slots = {one.worker: one.slot for one in decision.contributions}
        same = same and seq in self._rounds and self._rounds[seq].slots == slots
        self._over = max(self._over, *seqs)
        self._rounds = {n: r for n, r in self._rounds.items() if n > self._over}
        return seq if same else None
