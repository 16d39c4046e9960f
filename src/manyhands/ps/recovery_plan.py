"""Plan a change of membership for the servers: the place of each block, and which blocks move. Pure.

When a view begins, every server reports what it holds (a ServerStatus) to the leader, which is the first
server of the view. The leader makes a RecoveryPlan: the version up to which all servers complete updates, the
new placement of the blocks, and the blocks to move. A block comes from its server or, if that is gone, from
its replica. If both are gone the block is lost, and the run must restart from a checkpoint.

A plan takes effect when the leader sends `Go`, which it does once every server has all blocks that it should
hold. If the leader dies before all servers have received `Go`, the view is valid if any surviving server has
received it: the latest such view is the plan's `standing`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from manyhands.embeddings.row_placement import RowMove, RowPlacement
from manyhands.errors import WeightsLost
from manyhands.ps.blocks import BlockLayout
from manyhands.ps.placement import Placement, PlacementRecord, place
from manyhands.ps.policies import Ledger
from manyhands.transport.fields import Count


@dataclass(frozen=True)
class ServerStatus:
    """Report of one server to the leader of a new view."""

    server: str
    host: str
    view: Count
    """Last view for which it received `Go`; 0 if it has just joined, and holds nothing."""
    prepared: Count
    """Later view for which it has prepared all its blocks, but has not received `Go`; 0 if there is none."""
    placement: PlacementRecord | None
    """Placement of `view`."""
    ledger: Ledger
    """Contains all decisions that are applied to any block on this server, own or replica."""
    replicas: Mapping[str, int]
    """For each server whose replicas it keeps in `view`, the version that it can bring them to."""
    seen: Count = 0
    """Newest version of the parameters in this server's memory."""
    row_placement: RowPlacement | None = None
    """Placement of table rows in `view`; None if there are no tables, or memory is shared."""


@dataclass(frozen=True)
class BlockMove:
    """Transfer of a shard from one server to another."""

    shard: Count
    source: str
    target: str
    role: Literal["own", "replica"]


@dataclass(frozen=True)
class RecoveryPlan:
    standing: Count
    """View whose placement describes what the servers hold; 0 for a fresh start."""
    ledger: Ledger
    placement: PlacementRecord
    moves: tuple[BlockMove, ...] = ()
    stale: tuple[tuple[str, str], ...] = ()
    """(holder, owner) of replicas to discard: they are behind their living owner and can't catch up by
    themselves, or were discarded for a view that never began."""
    row_placement: RowPlacement | None = None
    """New placement of table rows, if memory is not shared."""
    row_moves: tuple[RowMove, ...] = ()


def make_plan(
    statuses: Sequence[ServerStatus], layout: BlockLayout, *, replicas: int, rows: bool = False
) -> RecoveryPlan:
    """Make the plan of a view. `statuses` are in the order of the view's servers, the leader's first. `rows`:
    if true, table rows are placed too."""
    servers = [status.server for status in statuses]
    hosts = {status.server: status.host for status in statuses}
    standing = max(status.view for status in statuses)
    if not standing:
        if any(status.seen for status in statuses):
            raise WeightsLost("All servers with the parameters are gone: the weights are lost.")
        placement = place(layout, servers, replicas=replicas, hosts=hosts)
        row_placement = RowPlacement.fresh(servers, replicas=replicas) if rows else None
        return RecoveryPlan(
            0, statuses[0].ledger, placement.to_record(), row_placement=row_placement
        )
    # A server that was prepared for the standing view holds its blocks, although it has not received Go.
    having = [s for s in statuses if standing in (s.view, s.prepared)]
    newest = max(having, key=lambda status: status.ledger.version)
    first = next(s for s in having if s.view == standing)
    assert first.placement is not None
    previous = Placement.from_record(first.placement, layout=layout)
    placement = place(layout, servers, previous=previous, replicas=replicas, hosts=hosts)
    moves: list[BlockMove] = []
    by_name = {status.server: status for status in having}
    stale = tuple(sorted(_stale(previous, standing, by_name)))
    for shard in range(len(layout.shards)):
        good = _good_holders(previous, shard, by_name, stale)
        roles: tuple[Literal["own", "replica"], ...] = ("own", "replica")
        for target, role in zip(placement.holders(shard), roles, strict=False):
            if target not in good:
                moves.append(BlockMove(shard, good[0], target, role))
    plan = RecoveryPlan(standing, newest.ledger, placement.to_record(), tuple(moves), stale)
    if first.row_placement is None:
        return plan
    before, having_rows = first.row_placement, list(by_name)
    after = before.after(servers, having_rows, replicas=replicas)
    row_moves = tuple(after.moves_from(before, having_rows))
    return replace(plan, row_placement=after, row_moves=row_moves)


def _stale(
    previous: Placement, standing: int, having: Mapping[str, ServerStatus]
) -> Iterator[tuple[str, str]]:
    """Yield (holder, owner) of the replicas that can't be used as they are."""
    pairs = {previous.holders(shard) for shard in range(len(previous.layout.shards))}
    for owner, *second in pairs:
        for holder in (having[name] for name in second if name in having):
            # A holder that was only prepared for the standing view has received its replicas for it, and
            # has applied nothing since.
            if holder.view == standing:
                reach = holder.replicas.get(owner, -1)
                wanted = having[owner].ledger.version if owner in having else 0
                if reach < wanted:
                    yield holder.server, owner


def _good_holders(
    previous: Placement,
    shard: int,
    having: Mapping[str, ServerStatus],
    stale: Sequence[tuple[str, str]],
) -> tuple[str, ...]:
    """Return the servers with an up-to-date copy of a shard, the owner first."""
    owner, *second = previous.holders(shard)
    holders = [name for name in second if name in having and (name, owner) not in stale]
    if owner not in having:
        if not holders:
            both = " and its replica on ".join(previous.holders(shard))
            alone = "" if second else " (it had no replica)"
            raise WeightsLost(f"Part of the parameters is lost: it was on {both}{alone}.")
        return tuple(holders)
    return (owner, *holders)
