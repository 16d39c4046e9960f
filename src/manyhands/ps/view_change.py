"""How the servers of a view begin it together: say what they hold, give and get blocks, go.

    all servers connect to each other      peer
    each tells the lead what it holds      status
    the lead says who gets what            plan        (see recovery_plan.py)
    blocks change hands                    block
    each has what it should                moved
    the view begins                        go

Whatever comes out of this order, or from somebody whose turn it is not, is Nonsense (see protocol.py).

Used by the server's thread alone. Nothing is applied in the meantime, so everything is as it was when
this view fails too, and the next one begins from there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from manyhands.embeddings.row_placement import RowPlacement
from manyhands.ps.acceptor import Acceptor, InboxItem
from manyhands.ps.ledger import Ledger
from manyhands.ps.placement import Placement
from manyhands.ps.protocol import Nonsense, made_of
from manyhands.ps.recovery_plan import RecoveryPlan, ServerStatus, make_plan
from manyhands.ps.rows import ROLE, RowServerState
from manyhands.ps.server_state import ServerState
from manyhands.ps.tensor_messages import TensorMessages, pack
from manyhands.ps.updates import catch_up
from manyhands.transport import Link

KINDS = ("peer", "status", "plan", "block", "moved", "go")


@dataclass
class Peer:
    """Another server of this view."""

    name: str
    link: Link
    sums: Sequence[str] | None = None
    """Where its sums lie in shared memory; None: it has not said yet."""
    undo: Sequence[str] = ()
    """Where it keeps rows of tables as they were; nothing where it changes none."""


class ViewChange:
    def __init__(
        self, server_state: ServerState, acceptor: Acceptor, *, view: int, servers: Sequence[str]
    ) -> None:
        self.peers: dict[str, Peer] = {}
        self.plan: RecoveryPlan | None = None
        self._server_state = server_state
        self._acceptor = acceptor
        self._view = view
        self._servers = list(servers)
        self._statuses: dict[str, ServerStatus] = {}
        self._tensor_messages = TensorMessages()
        self._expected: set[tuple[str, int]] = set()
        self._moved: set[str] = set()
        self._prepared = self._begun = False
        self._waiting: RecoveryPlan | None = None

    @property
    def leads(self) -> bool:
        return self._server_state.name == self._servers[0]

    def hello(self) -> dict[str, Any]:
        flats = self._server_state.sums.flats
        addresses = [flat.segment.address for flat in flats if flat.segment is not None]
        name, rows = self._server_state.name, self._server_state.rows
        undo = rows.undo if rows is not None else None
        told = {"k": "peer", "server": name, "view": self._view, "sums": addresses}
        return {**told, "undo": [undo.address] if undo is not None else []}

    def meet(self, dial: Callable[[str], Link]) -> None:
        """Connect to the servers before this one in the view; those behind it connect to it."""
        for name in self._servers[: self._servers.index(self._server_state.name)]:
            link = dial(name)
            link.send(self.hello())
            self._acceptor.inbox.put(InboxItem("peer", name, {"sums": None, "undo": []}, link=link))
            self._acceptor.read(link, name)
        if self.leads:
            status = self._server_state.status().to_dict()
            self._acceptor.inbox.put(InboxItem("status", self._server_state.name, status))

    def handle(self, happened: InboxItem) -> bool:
        """One message of the beginning; True when the view has begun."""
        who, head = happened.who, happened.head
        self._check_turn(happened.kind, who, happened.link)
        match happened.kind:
            case "peer":
                self._on_peer(who, head, happened.link)
            case "status":
                self._statuses[who] = self._status_of(who, head)
                if len(self._statuses) == len(self._servers):
                    self._make_plan()
            case "plan":
                layout = self._server_state.layout
                plan = made_of("a plan", lambda: RecoveryPlan.from_dict(head["plan"], layout))
                if list(plan.placement.servers) != self._servers:
                    raise Nonsense(f"a plan for {', '.join(plan.placement.servers)[:200]}")
                self._waiting = plan
                self._proceed()
            case "block":
                add = partial(self._tensor_messages.add, head, happened.payload)
                if (key := made_of("a block", add)) is not None:
                    self._expected.discard(key)
                    self._when_complete()
            case "moved":
                self._moved.add(who)
            case "go":
                self._begun = True
                self._server_state.begin()
                return True
        if self.leads and len(self._moved) == len(self._servers):
            self._moved.clear()
            self._begun = True
            self._tell_all({"k": "go"})
            self._server_state.begin()
            return True
        return False

    def _check_turn(self, kind: str, who: str, link: Link | None) -> None:
        """Whether this is said by somebody who may say it, once, and not too early or too late."""
        planned = self._waiting is not None or self.plan is not None
        by_lead = who == self._servers[0]
        peer = self.peers.get(who)
        fits = {
            "peer": peer is None if link is not None else peer is not None and peer.sums is None,
            "status": self.leads and who not in self._statuses,
            "plan": by_lead and not self.leads and not planned,
            "block": not self._prepared,
            "moved": self.leads and planned and who not in self._moved and not self._begun,
            "go": by_lead and not self.leads and self._prepared and not self._begun,
        }
        if not fits[kind]:
            raise Nonsense(f"{kind!r}, for which it is not the time, or not its to say")

    def _status_of(self, who: str, head: Mapping[str, Any]) -> ServerStatus:
        def parse() -> ServerStatus:
            status, layout = ServerStatus.from_dict(head), self._server_state.layout
            assert status.server == who, f"it speaks for {status.server!r}"
            assert max(status.view, status.prepared) < self._view, "it knows a view to come"
            Ledger.from_dict(status.ledger)
            if status.placement is not None:
                Placement.from_dict(status.placement, layout=layout)
            if status.homes is not None:
                RowPlacement.from_dict(status.homes)
            return status

        return made_of("a status", parse)

    def _on_peer(self, who: str, head: Mapping[str, Any], link: Link | None) -> None:
        if link is not None:
            self.peers[who] = Peer(who, link, head["sums"], head["undo"])
            if head["sums"] is not None:  # it called: it knows nothing of this side yet
                link.send(self.hello())
        else:
            self.peers[who].sums, self.peers[who].undo = head["sums"], head["undo"]
        if who == self._servers[0] and link is None:
            status = self._server_state.status().to_dict()
            self.peers[who].link.send({"k": "status", **status})
        self._proceed()

    def _make_plan(self) -> None:
        statuses = [self._statuses[name] for name in self._servers]
        rows, replicas = self._server_state.rows, self._server_state.replicas
        has_homes = rows is not None and not rows.shared
        plan = make_plan(statuses, self._server_state.layout, replicas=replicas, rows=has_homes)
        self._tell_all({"k": "plan", "plan": plan.to_dict()})
        self._waiting = plan
        self._proceed()

    def _proceed(self) -> None:
        """Carry out the plan, once it is here and all have met."""
        plan = self._waiting
        met = [peer for peer in self.peers.values() if peer.sums is not None]
        if plan is None or len(met) < len(self._servers) - 1:
            return
        self._waiting = None
        server_state, layout = self._server_state, self._server_state.layout
        self.plan = plan
        catch_up(server_state, plan)
        if self.leads and server_state.rows is not None and server_state.held.placement is not None:
            server_state.rows.finish(
                plan.ledger, server_state.held.placement.servers, self._servers
            )
        self._expected |= {
            (move.role, block.number)
            for move in plan.moves
            if move.target == server_state.name
            for block in layout.blocks_in(move.shard)
        } - self._tensor_messages.complete.keys()
        if server_state.rows is not None:
            self._move_rows(plan, server_state.rows)
        for move in plan.moves:
            if move.source == server_state.name:
                link = self.peers[move.target].link
                for block in layout.blocks_in(move.shard):
                    block_state = server_state.block_state(block.number)
                    for head, payload in pack("block", block.number, block_state, role=move.role):
                        link.send(head, payload)
        self._when_complete()

    def _move_rows(self, plan: RecoveryPlan, rows: RowServerState) -> None:
        for move in plan.row_moves:
            if move.target == self._server_state.name:
                expected = {(ROLE + name, move.shard) for name in rows.tables.specs}
                self._expected |= expected - self._tensor_messages.complete.keys()
            if move.source == self._server_state.name:
                for role, block_state in rows.pack(move.shard):
                    for head, payload in pack("block", move.shard, block_state, role=role):
                        self.peers[move.target].link.send(head, payload)

    def _when_complete(self) -> None:
        plan = self.plan
        if plan is None or self._expected or self._prepared:
            return
        self._prepared = True
        complete = self._tensor_messages.complete
        self._server_state.prepare(
            self._view, plan.placement, complete, fresh=not plan.standing, homes=plan.homes
        )
        if self.leads:
            self._moved.add(self._server_state.name)
        else:
            self.peers[self._servers[0]].link.send({"k": "moved"})

    def _tell_all(self, head: Mapping[str, Any]) -> None:
        for peer in self.peers.values():
            peer.link.send(head)
