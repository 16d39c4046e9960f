"""Which servers hold which rows, where memory is not shared. Pure.

Ids fall into a fixed number of shards; each shard has a server and, with replicas, a second one. Workers
send what they push to both, and both make the same updates in the same order, so neither has to copy
anything to the other. Rows are asked of the first.

When servers come or go, a shard stays wherever it can: a living holder keeps it, and whoever has the
fewest gets what is left without one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from manyhands.embeddings.shards import shard_of
from manyhands.errors import WeightsLost

SHARDS = 128


@dataclass(frozen=True)
class RowMove:
    """A shard that one server gives to another."""

    shard: int
    source: str
    target: str


@dataclass(frozen=True)
class RowPlacement:
    servers: tuple[str, ...]
    holders: tuple[tuple[str, ...], ...]
    """Of each shard, the one that is asked first."""

    @classmethod
    def fresh(cls, servers: Sequence[str], *, replicas: int) -> RowPlacement:
        count = len(servers)
        copies = min(1 + replicas, count)
        holders = (
            # The second is another one for each round, so that a dead server's shards go to many.
            tuple(
                servers[(n + (1 + n // count % max(1, count - 1)) * c) % count]
                for c in range(copies)
            )
            for n in range(SHARDS)
        )
        return cls(tuple(servers), tuple(holders))

    def after(self, servers: Sequence[str], good: Sequence[str], *, replicas: int) -> RowPlacement:
        """With other servers. `good`: those that still have what they held."""
        copies = min(1 + replicas, len(servers))
        kept = [
            [name for name in held if name in good and name in servers] for held in self.holders
        ]
        for shard, held in enumerate(kept):
            if not held:
                lost = " and ".join(self.holders[shard])
                raise WeightsLost(f"A part of the tables' rows was on {lost}, and is lost with it.")
        firsts, seconds = dict.fromkeys(servers, 0), dict.fromkeys(servers, 0)
        even = -(-SHARDS // len(servers))
        for held in kept:
            # A first who has more than its share gives way to the second, or to a newcomer.
            held.sort(key=lambda name: firsts[name] >= even)
            firsts[held[0]] += 1
        holders = []
        for held in kept:
            few = min(servers, key=lambda name: firsts[name])
            if firsts[few] + 1 < firsts[held[0]] and firsts[held[0]] > even and few not in held:
                firsts[held[0]] -= 1
                firsts[few] += 1
                held.insert(0, few)
            chosen = held[:copies]
            while len(chosen) < copies:
                others = [name for name in servers if name not in chosen]
                chosen.append(min(others, key=lambda name: seconds[name]))
            for name in chosen[1:]:
                seconds[name] += 1
            holders.append(tuple(chosen))
        return RowPlacement(tuple(servers), tuple(holders))

    def moves_from(self, before: RowPlacement, good: Sequence[str]) -> Iterator[RowMove]:
        """What has to travel: from the first who has it to each who should and has not."""
        for shard, (old, new) in enumerate(zip(before.holders, self.holders, strict=True)):
            having = [name for name in old if name in good]
            for target in new:
                if target not in having:
                    yield RowMove(shard, having[0], target)

    def shards_of(self, server: str) -> list[int]:
        """All that it holds, first or second."""
        return [shard for shard, held in enumerate(self.holders) if server in held]

    def asked(self, ids: NDArray[np.int64], near: str | None = None) -> NDArray[np.int64]:
        """Whom to ask for each id, as an index into `servers`: the one that is `near`, if it has it."""
        index = {name: i for i, name in enumerate(self.servers)}
        whom = np.array([index[near if near in held else held[0]] for held in self.holders])
        return whom[shard_of(ids, SHARDS)]

    def held_by(self, server: str, ids: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Which ids a server holds."""
        mine = np.array([server in held for held in self.holders])
        return mine[shard_of(ids, SHARDS)]
