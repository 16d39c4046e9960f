"""A change of membership, as far as the servers are concerned: who has what, and who gets what. Pure.

When a view begins, every server says what it holds (a Status) to the lead, the first of them, who makes
a Plan: up to which version all finish what was begun, where the blocks lie from now on, and which of
them travel. A block comes from its server or, if that is gone, from its replica; if both are gone it is
lost, and only a checkpoint helps.

A plan takes hold when the lead says go, which it does when every server has all that it should hold.
If the lead dies before everybody has heard it, whoever has heard it is right: `standing` finds out.
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
    """What one server brings into a view."""

    server: str
    host: str
    view: Count
    """The last view that it heard go of; 0: it has just come, and holds nothing."""
    prepared: Count
    """A later view for which it had all that it should hold, and has not heard go; else 0."""
    placement: PlacementRecord | None
    """Of `view`."""
    ledger: Ledger
    """With all decisions that anything here has applied."""
    replicas: Mapping[str, int]
    """How far it can bring the replicas that it keeps for each server, by the word of `view`."""
    seen: Count = 0
    """The newest version of the parameters that it has had before its eyes."""
    row_placement: RowPlacement | None = None
    """Where rows of tables are, by the word of `view`; None where there are none, or memory is shared."""


@dataclass(frozen=True)
class BlockMove:
    """A shard that one server gives to another."""

    shard: Count
    source: str
    target: str
    role: Literal["own", "replica"]


@dataclass(frozen=True)
class RecoveryPlan:
    standing: Count
    """The view whose holdings count; 0: a fresh start."""
    ledger: Ledger
    placement: PlacementRecord
    moves: tuple[BlockMove, ...] = ()
    stale: tuple[tuple[str, str], ...] = ()
    """(keeper, owner): replicas that are behind their living owner and can't catch up by themselves,
    or were given up in a view that never began."""
    row_placement: RowPlacement | None = None
    """Where rows of tables are from now on, where memory is not shared."""
    row_moves: tuple[RowMove, ...] = ()


def make_plan(
    statuses: Sequence[ServerStatus], layout: BlockLayout, *, replicas: int, rows: bool = False
) -> RecoveryPlan:
    """`statuses` in the order of the view; the first is the lead's. `rows`: tables have row_placement."""
    servers = [status.server for status in statuses]
    hosts = {status.server: status.host for status in statuses}
    standing = max(status.view for status in statuses)
    if not standing:
        if any(status.seen for status in statuses):
            raise WeightsLost("All who held the parameters are gone: what was learnt is lost.")
        placement = place(layout, servers, replicas=replicas, hosts=hosts)
        row_placement = RowPlacement.fresh(servers, replicas=replicas) if rows else None
        return RecoveryPlan(
            0, statuses[0].ledger, placement.to_record(), row_placement=row_placement
        )
    # Who was prepared for the standing view holds what it should there, though it did not hear go.
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
    """(keeper, owner) of the replicas that are of no use as they are."""
    holders = {previous.holders(shard) for shard in range(len(previous.layout.shards))}
    for owner, *second in holders:
        for keeper in (having[name] for name in second if name in having):
            # Who was prepared for the standing view has got everything anew, and nothing happened since.
            if keeper.view == standing:
                reach = keeper.replicas.get(owner, -1)
                wanted = having[owner].ledger.version if owner in having else 0
                if reach < wanted:
                    yield keeper.server, owner


def _good_holders(
    previous: Placement,
    shard: int,
    having: Mapping[str, ServerStatus],
    stale: Sequence[tuple[str, str]],
) -> tuple[str, ...]:
    """Who holds a shard as it should be, best first."""
    owner, *second = previous.holders(shard)
    keepers = [name for name in second if name in having and (name, owner) not in stale]
    if owner not in having:
        if not keepers:
            both = " and its replica on ".join(previous.holders(shard))
            alone = "" if second else " (it had no replica)"
            raise WeightsLost(
                f"A part of the parameters was on {both}{alone}, and is lost with it."
            )
        return tuple(keepers)
    return (owner, *keepers)
