"""Which spans of which gradients have arrived, so that sums can be made before a decision.

If an update is everybody's gradients, a span of it can be added up, and sent to the server with its replica,
as soon as that span has come from every worker: the network is busy while others still compute. The decision
comes later, and says whether these sums hold (updates.py). Between hosts only; and not where the whole
gradient must be known before a part of it is used: to clip it, or to apply a job's own sample weights.

Used by the server's thread alone.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from manyhands.ps.ledger import Decision


@dataclass
class PartialRound:
    """What has arrived of one round's gradients."""

    slots: dict[str, int] = field(default_factory=dict)
    """The slot of each worker's gradient."""
    here: dict[int, set[str]] = field(default_factory=lambda: defaultdict(set))
    """By span: the workers whose part is here."""


class PartialSums:
    def __init__(self, workers: Sequence[str]) -> None:
        """`workers` in the order in which they are added up."""
        self._workers = list(workers)
        self._rounds: dict[int, PartialRound] = {}
        self._over = 0
        """The last round that there is a decision on."""

    def arrived(self, worker: str, seq: int, slot: int, runs: Iterable[int]) -> list[int]:
        """Note spans of a push; returns those that have now come from every worker."""
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
        """The (worker, slot) of each gradient of a round, in the order in which they are added."""
        slots = self._rounds[seq].slots
        return [(worker, slots[worker]) for worker in self._workers]

    def decided(self, decision: Decision) -> int | None:
        """The round of a decision, if it is the plain sum of the gradients that have arrived. Forgets that
        round and all before it."""
        seqs = {given.seq for given in decision.contributions}
        (seq,) = seqs if len(seqs) == 1 else (None,)
        plain = all(factor == 1.0 for factor in decision.coefficients())
        same = plain and [one.worker for one in decision.contributions] == self._workers
        slots = {one.worker: one.slot for one in decision.contributions}
        same = same and seq in self._rounds and self._rounds[seq].slots == slots
        self._over = max(self._over, *seqs)
        self._rounds = {n: r for n, r in self._rounds.items() if n > self._over}
        return seq if same else None
