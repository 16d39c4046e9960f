"""Assigns rows to servers, for servers that share no memory. Pure.

Ids are hashed to a fixed number of shards. Each shard has a primary server and, with replicas, a second one.
Workers push to both, and both apply the same updates in the same order, so no server copies anything to
another. Rows are pulled from the primary.

When servers come or go, a shard stays where it can: a surviving holder keeps it, and the server with the
fewest shards gets those without a holder.
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
    """A shard to be copied from one server to another."""

    shard: int
    source: str
    target: str


@dataclass(frozen=True)
class RowPlacement:
    servers: tuple[str, ...]
    holders: tuple[tuple[str, ...], ...]
    """By shard: its servers, the primary first."""

    def __post_init__(self) -> None:
        known = all(held and set(held) <= set(self.servers) for held in self.holders)
        if len(self.holders) != SHARDS or not known:
            raise ValueError(f"it does not place {SHARDS} shards on its servers")

    @classmethod
    def fresh(cls, servers: Sequence[str], *, replicas: int) -> RowPlacement:
        count = len(servers)
        copies = min(1 + replicas, count)
        holders = (
            # The second server changes with each round, so that the shards of a dead server go to many.
            tuple(
                servers[(n + (1 + n // count % max(1, count - 1)) * c) % count]
                for c in range(copies)
            )
            for n in range(SHARDS)
        )
        return cls(tuple(servers), tuple(holders))

    def after(self, servers: Sequence[str], good: Sequence[str], *, replicas: int) -> RowPlacement:
        """Return the placement on other servers. `good`: the servers that still have their rows."""
        copies = min(1 + replicas, len(servers))
        kept = [
            [name for name in held if name in good and name in servers] for held in self.holders
        ]
        for shard, held in enumerate(kept):
            if not held:
                lost = " and ".join(self.holders[shard])
                raise WeightsLost(f"A part of the tables' rows was on {lost}, and is lost with it.")
        primaries, seconds = dict.fromkeys(servers, 0), dict.fromkeys(servers, 0)
        fair_share = -(-SHARDS // len(servers))
        for held in kept:
            # A primary with more than its share gives way to the second server, or to a new one.
            held.sort(key=lambda name: primaries[name] >= fair_share)
            primaries[held[0]] += 1
        holders = []
        for held in kept:
            least = min(servers, key=lambda name: primaries[name])
            if (
                primaries[least] + 1 < primaries[held[0]]
                and primaries[held[0]] > fair_share
                and least not in held
            ):
                primaries[held[0]] -= 1
                primaries[least] += 1
                held.insert(0, least)
            chosen = held[:copies]
            while len(chosen) < copies:
                others = [name for name in servers if name not in chosen]
                chosen.append(min(others, key=lambda name: seconds[name]))
            for name in chosen[1:]:
                seconds[name] += 1
            holders.append(tuple(chosen))
        return RowPlacement(tuple(servers), tuple(holders))

    def moves_from(self, before: RowPlacement, good: Sequence[str]) -> Iterator[RowMove]:
        """Yield the copies that are needed: from the first surviving holder to each new one."""
        for shard, (old, new) in enumerate(zip(before.holders, self.holders, strict=True)):
            sources = [name for name in old if name in good]
            for target in new:
                if target not in sources:
                    yield RowMove(shard, sources[0], target)

    def shards_of(self, server: str) -> list[int]:
        """Return all shards that a server holds, as primary or second."""
        return [shard for shard, held in enumerate(self.holders) if server in held]

    def server_of(self, ids: NDArray[np.int64], local: str | None = None) -> NDArray[np.int64]:
        """Return the server to pull each id from, as an index into `servers`: the local one, if it has it."""
        index = {name: i for i, name in enumerate(self.servers)}
        chosen = np.array([index[local if local in held else held[0]] for held in self.holders])
        return chosen[shard_of(ids, SHARDS)]

    def held_by(self, server: str, ids: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return a mask of the ids that a server holds."""
        holds = np.array([server in held for held in self.holders])
        return holds[shard_of(ids, SHARDS)]
