"""Assign each shard, and its replica, to a server. Pure and deterministic.

A first placement cuts the sequence of shards by the servers' shares of the bytes, so that each server gets
one run of neighbouring shards. With several hosts, each server gets one run per quarter of the sequence, so
that a backward has something to send to every server early on. If coarse shards make this uneven, shards move
from overloaded servers to underloaded ones. If it is still uneven, shards are assigned largest first, each to
the least loaded server (Graham 1969: with equal servers the maximum load is at most 4/3 of the optimum). The
most even result wins.

When servers join or leave, every shard stays where it is. A shard whose server has left goes to its replica
(no bytes move) or to the least loaded server. Then shards move from overloaded to underloaded servers, only
until every load is within SLACK of its share. If the result is still more than TOLERANCE off and a placement
from scratch would not be, the new one is used. A server that rejoins without its blocks must use a new name.

Guarantee: each server is within SLACK of its share of the bytes, or else within one shard plus GAIN of it. So
if the largest shard is under 9 % of every share, all servers are within TOLERANCE. Only bytes that have to
move do, plus about one shard per server.

All replicas of one server are on one other server, its replica holder: a holder gets a message for every
update, and has spans of its own to apply. (With replicas spread over all servers, `ps:async` with eight
workers on a small model was 2.2 times slower.) If any other host has a server, replicas are on another host
than their originals, even at the cost of balance. After a death the replica holder owns all blocks of the
dead server, and moves away what exceeds its share.

Cost: about one pass over the shards per shard that moves. This is usually milliseconds, and a second or two
for a thousand whole tensors with one that is far larger than the rest.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from manyhands.errors import ManyhandsError, ProtocolError, UsageError
from manyhands.events.units import plural, size
from manyhands.ps.blocks import Block, BlockLayout
from manyhands.transport.fields import Count, Finite

SLACK = 0.05
"""Deviation from its share, as a fraction of it, above which a server's shards move."""
TOLERANCE = 0.1
"""Deviation from its share, as a fraction of it, above which a placement is called uneven."""
STRIPES = 4
"""Runs of neighbouring shards per server, spread over the model, if there are several hosts."""
GAIN = 0.01
"""Minimum gain, as a fraction of a share, of a move past a target or of a placement with more runs."""


@dataclass(frozen=True)
class PlacementRecord:
    """A Placement as it is sent in messages."""

    layout: str
    """Digest of the layout."""
    servers: tuple[str, ...]
    shares: tuple[Finite, ...]
    firsts: tuple[Count, ...]
    seconds: tuple[Count, ...] | None


@dataclass(frozen=True)
class Placement:
    """The server of every shard of a layout, and of its replica. Created by `place`."""

    layout: BlockLayout
    servers: tuple[str, ...]
    shares: tuple[float, ...]
    """Each server's share of the bytes; they add up to 1."""
    firsts: tuple[int, ...]
    """For each shard, the index of its server in `servers`."""
    seconds: tuple[int, ...] | None
    """For each shard, the index of its replica's server in `servers`; None without replicas."""

    def server_of(self, block: Block) -> str:
        return self.servers[self.firsts[self.layout.shard_of(block)]]

    def replica_of(self, block: Block) -> str | None:
        if self.seconds is None:
            return None
        return self.servers[self.seconds[self.layout.shard_of(block)]]

    def blocks_of(self, server: str) -> tuple[Block, ...]:
        """Return the blocks that `server` owns, by number."""
        return self._blocks(self.firsts, server)

    def replicas_of(self, server: str) -> tuple[Block, ...]:
        """Return the blocks whose replica is on `server`, by number."""
        return () if self.seconds is None else self._blocks(self.seconds, server)

    def bytes_of(self, server: str) -> int:
        """Return the bytes of the blocks that `server` owns, without replicas."""
        return sum(block.num_bytes for block in self.blocks_of(server))

    def holders(self, shard: int) -> tuple[str, ...]:
        """Return the shard's server and, if there is a replica, the replica's server."""
        both = [self.firsts[shard]] + ([] if self.seconds is None else [self.seconds[shard]])
        return tuple(self.servers[number] for number in both)

    @cached_property
    def imbalance(self) -> float:
        """Largest deviation of a server from its share, as a fraction of that share."""
        return self._spread.worst()

    def to_record(self) -> PlacementRecord:
        return PlacementRecord(
            self.layout.digest, self.servers, self.shares, self.firsts, self.seconds
        )

    @classmethod
    def from_record(cls, record: PlacementRecord, *, layout: BlockLayout) -> Placement:
        """Rebuild a placement from `to_record`; ProtocolError if it does not match `layout`."""
        if record.layout != layout.digest:
            raise ProtocolError(
                f"This placement is for layout {record.layout!r}, but the model here has layout "
                f"{layout.digest!r}: all members must build the same model from the same job file."
            )
        columns = [each for each in (record.firsts, record.seconds) if each is not None]
        whole = all(len(numbers) == len(layout.shards) for numbers in columns)
        known = all(number < len(record.servers) for numbers in columns for number in numbers)
        if not (whole and known and len(record.shares) == len(record.servers)):
            raise ProtocolError("Invalid placement: shards or servers do not match the layout.")
        return cls(layout, record.servers, record.shares, record.firsts, record.seconds)

    def describe(self) -> str:
        """Summary for the banner: "2 servers, 3.7 MB each (4 blocks and 4), replicas on the other"."""
        loads = [self.bytes_of(server) for server in self.servers]
        counts = [len(self.blocks_of(server)) for server in self.servers]
        if len(loads) == 1:
            return f"1 server, {size(loads[0])} ({plural(counts[0], 'block')}), no replicas"
        other = "other" if len(loads) == 2 else "others"
        replicas = "no replicas" if self.seconds is None else f"replicas on the {other}"
        if sum(counts) < len(counts) and not self.layout.whole_tensors:
            held = f"{size(sum(loads))} in {plural(sum(counts), 'block')}"
            return f"{plural(len(loads), 'server')}, {held}, too little to spread, {replicas}"
        uneven = self.imbalance > TOLERANCE
        if uneven or max(self.shares) > min(self.shares) * (1 + SLACK):
            each = f"{size(min(loads))} to {size(max(loads))}"
        else:
            each = f"{size(sum(loads) / len(loads))} each"
        if len(counts) <= 4:
            *first, last = [plural(counts[0], "block"), *map(str, counts[1:])]
            blocks = f"{', '.join(first)} and {last}"
        else:
            blocks = f"{min(counts)} to {plural(max(counts), 'block')}"
        text = f"{plural(len(loads), 'server')}, {each} ({blocks}), {replicas}"
        return text + (f"; uneven: {self._why_uneven()}" if uneven else "")

    def _why_uneven(self) -> str:
        layout = self.layout
        largest = max(layout.blocks, key=lambda block: block.num_bytes)
        if layout.whole_tensors:
            name = layout.pieces_in(largest)[0].name
            return (
                f"the optimizer needs whole tensors, and {name} alone is {size(largest.num_bytes)}"
            )
        return (
            f"{plural(len(layout.blocks), 'block')} of up to {size(largest.num_bytes)} can't be spread "
            f"better over {plural(len(self.servers), 'server')}; fewer servers would do"
        )

    def _blocks(self, numbers: Sequence[int], server: str) -> tuple[Block, ...]:
        wanted = self.servers.index(server)
        return tuple(
            block
            for shard, number in enumerate(numbers)
            if number == wanted
            for block in self.layout.blocks_in(shard)
        )

    @cached_property
    def _spread(self) -> _Spread:
        targets = [share * self.layout.num_bytes for share in self.shares]
        return _Spread(self.layout.shard_bytes, targets, self.firsts)


def place(
    layout: BlockLayout,
    servers: Sequence[str],
    *,
    previous: Placement | None = None,
    weights: Mapping[str, float] | None = None,
    replicas: int = 1,
    hosts: Mapping[str, str] | None = None,
) -> Placement:
    """Spread a layout's shards over `servers`.

    `previous` is the current placement; as few bytes as possible move away from it. `weights` (default: all
    equal) are proportional to the servers' shares of the bytes. `hosts` maps servers to hosts, to keep a
    replica off its original's host. A single server has no replicas, whatever `replicas` is.
    """
    shares = _shares(servers, weights)
    if replicas not in (0, 1):
        raise UsageError(f"replicas={replicas} is not supported: a block has 0 or 1 replicas.")
    sizes = layout.shard_bytes
    targets = [share * layout.num_bytes for share in shares]
    held: list[list[int]] = [[] for _ in sizes]
    if previous is not None:
        _check_same(layout, previous)
        number = {name: i for i, name in enumerate(servers)}
        held = [[number[s] for s in previous.holders(x) if s in number] for x in range(len(sizes))]
    places = [(hosts or {}).get(server, server) for server in servers]
    stripes = STRIPES if len(set(places)) > 1 else 1
    spread = (
        _kept(sizes, targets, held) if previous is not None else _fresh(sizes, targets, stripes)
    )
    if previous is not None and spread.worst() > TOLERANCE:
        anew = _fresh(sizes, targets, stripes)
        spread = anew if anew.worst() <= TOLERANCE else spread
    firsts = tuple(spread.owner)
    seconds = None
    if replicas and len(servers) > 1:
        seconds = _seconds(sizes, firsts, places, held)
    return Placement(layout, tuple(servers), shares, firsts, seconds)


class _Spread:
    """Shards (each with a size) assigned to servers (each with a target load), and moves to balance them."""

    def __init__(
        self,
        sizes: Sequence[int],
        targets: Sequence[float],
        owner: Iterable[int],
        *,
        held: Sequence[Sequence[int]] = (),
        allowed: Callable[[int, int], bool] = lambda shard, server: True,
    ) -> None:
        self.sizes, self.targets, self.owner = sizes, targets, list(owner)
        self.held, self.allowed = held, allowed
        self.excess = [-target for target in targets]
        for shard, server in enumerate(self.owner):
            if server >= 0:
                self.excess[server] += sizes[shard]

    def worst(self) -> float:
        if not any(self.targets):
            return 0.0
        return max(abs(e) / t for e, t in zip(self.excess, self.targets, strict=True))

    def put(self, shard: int, server: int) -> None:
        if self.owner[shard] >= 0:
            self.excess[self.owner[shard]] -= self.sizes[shard]
        self.owner[shard] = server
        self.excess[server] += self.sizes[shard]

    def fill(self, shards: Iterable[int]) -> None:
        """Place the largest shards first, each on the server with the lowest relative load afterwards."""
        for shard in sorted(shards, key=lambda x: (-self.sizes[x], x)):
            after = [
                ((excess + self.sizes[shard]) / target, server)
                for server, (excess, target) in enumerate(
                    zip(self.excess, self.targets, strict=True)
                )
            ]
            self.put(shard, min(after)[1])

    def even_out(self) -> _Spread:
        while move := self._next_move():
            self.put(*move)
        return self

    def _next_move(self) -> tuple[int, int] | None:
        """Return a shard and the server to move it to; None if all loads are even or no move helps.

        Prefer moves that bring both servers nearer to their targets without overshooting: these bytes have
        to move anyway. After those, moves that make the two servers more alike (the shard is smaller than the
        difference of their excesses): each such move lowers the sum of squared excesses, so this terminates.
        """
        excess = self.excess
        off = [abs(e) > SLACK * t for e, t in zip(excess, self.targets, strict=True)]
        if not any(off):
            return None
        order = sorted(range(len(excess)), key=lambda server: (excess[server], server))
        on: list[list[int]] = [[] for _ in excess]
        for shard, server in enumerate(self.owner):
            on[server].append(shard)
        for overshoot in (False, True):
            for a in reversed(order):
                for b in order:
                    gap = excess[a] - excess[b]
                    gain = max(GAIN * min(self.targets[a], self.targets[b]), 1)
                    room = gap - gain if overshoot else min(excess[a], -excess[b])
                    if room <= 0 or not (off[a] or off[b]):
                        continue
                    fits = [x for x in on[a] if self.sizes[x] <= room and self.allowed(x, b)]
                    if fits:
                        return max(fits, key=lambda x: self._rank(x, a, b, gap)), b
        return None

    def _rank(self, shard: int, a: int, b: int, gap: float) -> tuple[int, int, int, int]:
        """Rank moves: first those without a transfer, then the (roughly) largest gain, then longer runs."""
        held = self.held[shard] if self.held else ()
        helps = int(min(self.sizes[shard], gap - self.sizes[shard])).bit_length()
        beside = [self.owner[x] for x in (shard - 1, shard + 1) if 0 <= x < len(self.owner)]
        joins = 2 if b in beside else int(beside != [a, a])
        return (b in held) - (a in held), helps, joins, shard


def _fresh(sizes: Sequence[int], targets: Sequence[float], stripes: int) -> _Spread:
    if len(sizes) < len(targets):
        # Too little to spread: the first servers get one shard each.
        return _Spread(sizes, targets, range(len(sizes)))
    bands = _cut(sizes, [1.0] * stripes)
    line = [
        server
        for band in range(stripes)
        for server in _cut(
            [size for size, b in zip(sizes, bands, strict=True) if b == band], targets
        )
    ]
    tries = [_Spread(sizes, targets, line), _Spread(sizes, targets, line).even_out()]
    if tries[1].worst() > SLACK:
        filled = _Spread(sizes, targets, [-1] * len(sizes))
        filled.fill(range(len(sizes)))
        tries.append(filled.even_out())
    # Prefer long runs to a slightly more even placement.
    fine = max(SLACK, min(spread.worst() for spread in tries) + GAIN)
    return next(spread for spread in tries if spread.worst() <= fine)


def _kept(sizes: Sequence[int], targets: Sequence[float], held: Sequence[Sequence[int]]) -> _Spread:
    spread = _Spread(sizes, targets, [servers[0] if servers else -1 for servers in held], held=held)
    spread.fill([shard for shard, servers in enumerate(held) if not servers])
    return spread.even_out()


def _seconds(
    sizes: Sequence[int],
    firsts: Sequence[int],
    hosts: Sequence[str],
    held: Sequence[Sequence[int]],
) -> tuple[int, ...]:
    """Return the server of each shard's replica."""
    others: list[list[int]] = []
    for a, host in enumerate(hosts):
        # Rotated, so that ties do not favour the same servers each time.
        turn = [*range(a + 1, len(hosts)), *range(a)]
        others.append([b for b in turn if hosts[b] != host] or turn)
    owner = [
        next((b for b in reversed(held[shard]) if b in others[first]), -1)
        for shard, first in enumerate(firsts)
    ]
    targets = [0.0] * len(hosts)
    num_owners = Counter[int]()
    """By server: how many servers it holds the replicas of."""
    for a, choices in enumerate(others):
        mine = [shard for shard, first in enumerate(firsts) if first == a]
        num_shards = Counter(owner[shard] for shard in mine)
        # One holder for all shards of a server: the one that already holds most of them, then the one that
        # holds the replicas of the fewest servers.
        holder = max(choices, key=lambda b: (num_shards[b], -num_owners[b]))
        num_owners[holder] += 1
        for shard in mine:
            targets[holder] += sizes[shard]
            if owner[shard] < 0:
                owner[shard] = holder
    allowed = [set(choices) for choices in others]
    spread = _Spread(sizes, targets, owner, held=held, allowed=lambda x, b: b in allowed[firsts[x]])
    return tuple(spread.even_out().owner)


def _cut(sizes: Sequence[int], targets: Sequence[float]) -> list[int]:
    """Cut a sequence in proportion to the targets; items on a cut go to the side of their middle."""
    total, scale = sum(sizes), sum(targets)
    owner, before, server = [], 0, 0
    end = targets[0] * total
    for length in sizes:
        while (before + length / 2) * scale >= end and server < len(targets) - 1:
            server += 1
            end += targets[server] * total
        owner.append(server)
        before += length
    return owner


def _shares(servers: Sequence[str], weights: Mapping[str, float] | None) -> tuple[float, ...]:
    if not servers or len(set(servers)) < len(servers):
        raise UsageError(
            f"servers={list(servers)} is invalid: pass at least one server, and each name once."
        )
    given = [1.0 if weights is None else float(weights.get(name, 0)) for name in servers]
    if not all(0 < weight < float("inf") for weight in given):
        raise UsageError(
            f"weights={dict(weights or {})} is invalid: each of {', '.join(servers)} needs a number above 0."
        )
    return tuple(weight / sum(given) for weight in given)


def _check_same(layout: BlockLayout, previous: Placement) -> None:
    if previous.layout.digest != layout.digest:
        raise ManyhandsError(
            f"The previous placement is for layout {previous.layout.digest!r}, not "
            f"{layout.digest!r}: shards move only within one model."
        )
