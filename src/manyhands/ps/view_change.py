"""Begin a view: its servers report what they hold, move blocks, and start together.

    step                                        message
    all servers connect to each other           PeerHello
    each reports what it holds to the leader    ServerStatus
    the leader sends the plan                   RecoveryPlan    (see recovery_plan.py)
    blocks are copied                           TensorMessage
    each reports that it has all its blocks     Moved
    the view begins                             Go

A message out of order, or from the wrong server, is a ProtocolError (see protocol.py).

Used only by the server's thread. Meanwhile only updates that another server has completed are applied. So if
this view fails too, nothing is lost, and the next view starts from there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from manyhands.embeddings.row_placement import RowMove
from manyhands.errors import ProtocolError
from manyhands.ps.acceptor import Acceptor
from manyhands.ps.placement import Placement
from manyhands.ps.protocol import (
    Go,
    Moved,
    PeerHello,
    TensorMessage,
)
from manyhands.ps.recovery_plan import BlockMove, RecoveryPlan, ServerStatus, make_plan
from manyhands.ps.rows import ROLE, RowServerState
from manyhands.ps.server_state import ServerState
from manyhands.ps.sessions import InboxItem, Peer
from manyhands.ps.tensor_messages import MALFORMED, TensorMessages, max_state_bytes, pack
from manyhands.ps.updates import catch_up, check_ticks
from manyhands.transport import Link
from manyhands.transport.fields import kind_of

Message = PeerHello | ServerStatus | RecoveryPlan | TensorMessage | Moved | Go
"""Messages that begin a view."""


@dataclass(frozen=True)
class PeerDialed:
    """Inbox item that this server adds itself: it has a link to a peer, which has not answered yet."""


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
        # The number of table rows is unbounded.
        most = None if server_state.rows else max_state_bytes(server_state.layout)
        self._tensor_messages = TensorMessages(max_bytes=most)
        self._expected: set[tuple[str, int]] = set()
        self._moved: set[str] = set()
        self._placement: Placement | None = None
        self._proceeding = self._prepared = self._begun = False

    @property
    def is_leader(self) -> bool:
        return self._server_state.name == self._servers[0]

    def hello(self) -> PeerHello:
        flats = self._server_state.sums.flats
        addresses = [flat.segment.address for flat in flats if flat.segment is not None]
        name, rows = self._server_state.name, self._server_state.rows
        undo = rows.undo if rows is not None else None
        undo_addresses = [undo.address] if undo is not None else []
        return PeerHello(name, self._view, addresses, undo_addresses)

    def meet(self, dial: Callable[[str], Link]) -> None:
        """Connect to the servers before this one in the view; the servers after it connect to this one."""
        for name in self._servers[: self._servers.index(self._server_state.name)]:
            link = dial(name)
            link.send(self.hello())
            self._acceptor.inbox.put(InboxItem(name, PeerDialed(), link=link))
            self._acceptor.read(link, name)
        if self.is_leader:
            status = self._server_state.status()
            self._acceptor.inbox.put(InboxItem(self._server_state.name, status))

    def handle(self, item: InboxItem) -> bool:
        """Handle a message. Returns whether the view has begun."""
        sender, message = item.sender, item.message
        if isinstance(message, PeerDialed):
            assert item.link is not None
            self.peers[sender] = Peer(sender, item.link)
            return False
        self._check_order(message, sender, item.link)
        match message:
            case PeerHello():
                self._on_peer(sender, message, item.link)
            case ServerStatus():
                self._check_status(sender, message)
                self._statuses[sender] = message
                if len(self._statuses) == len(self._servers):
                    self._make_plan()
            case RecoveryPlan():
                self._check_plan(message)
                self._take_plan(message)
            case TensorMessage():
                key = self._tensor_messages.add(message, item.payload)
                if key is not None:
                    self._expected.discard(key)
                    self._when_complete()
            case Moved():
                self._moved.add(sender)
            case Go():
                self._begun = True
                self._server_state.begin()
                return True
        if self.is_leader and len(self._moved) == len(self._servers):
            self._moved.clear()
            self._begun = True
            self._send_all(Go())
            self._server_state.begin()
            return True
        return False

    def _check_order(self, message: Message, sender: str, link: Link | None) -> None:
        """Check that this sender may send this message, once, and at this stage."""
        planned = self.plan is not None
        from_leader = sender == self._servers[0]
        peer = self.peers.get(sender)
        fits = {
            PeerHello: peer is None if link is not None else peer is not None and peer.sums is None,
            ServerStatus: self.is_leader and sender not in self._statuses,
            RecoveryPlan: from_leader and not self.is_leader and not planned,
            TensorMessage: not self._prepared,
            Moved: self.is_leader and planned and sender not in self._moved and not self._begun,
            Go: from_leader and not self.is_leader and self._prepared and not self._begun,
        }
        if not fits[type(message)]:
            kind = kind_of(message)
            raise ProtocolError(f"{kind!r} at the wrong time, or from the wrong server")

    def _check_status(self, sender: str, status: ServerStatus) -> None:
        if status.server != sender:
            raise ProtocolError(f"a status of {status.server[:80]!r}, sent by {sender}")
        if max(status.view, status.prepared) >= self._view:
            raise ProtocolError("a status of this or a later view")
        if status.view and status.placement is None:
            raise ProtocolError("a status without the placement of its view")
        check_ticks(self._server_state, status.ledger.ticks)
        if (record := status.placement) is not None:
            Placement.from_record(record, layout=self._server_state.layout)

    def _check_plan(self, plan: RecoveryPlan) -> None:
        if list(plan.placement.servers) != self._servers:
            raise ProtocolError(
                f"a plan for other servers: {', '.join(plan.placement.servers)[:200]}"
            )
        moves: list[BlockMove | RowMove] = [*plan.moves, *plan.row_moves]
        for move in moves:
            if not {move.source, move.target} <= set(self._servers):
                raise ProtocolError(
                    f"a plan that moves shard {move.shard} to or from an unknown server"
                )
        check_ticks(self._server_state, plan.ledger.ticks)

    def _on_peer(self, sender: str, hello: PeerHello, link: Link | None) -> None:
        if link is not None:  # the peer has dialed, and needs this server's hello
            self.peers[sender] = Peer(sender, link, hello.sums, hello.undo)
            self._send(sender, self.hello())
        else:
            self.peers[sender].sums, self.peers[sender].undo = hello.sums, hello.undo
        if sender == self._servers[0] and link is None:
            self._send(sender, self._server_state.status())
        self._proceed()

    def _make_plan(self) -> None:
        statuses = [self._statuses[name] for name in self._servers]
        rows, replicas = self._server_state.rows, self._server_state.replicas
        placed = rows is not None and rows.undo is None
        plan = make_plan(statuses, self._server_state.layout, replicas=replicas, rows=placed)
        self._send_all(plan)
        self._take_plan(plan)

    def _take_plan(self, plan: RecoveryPlan) -> None:
        layout = self._server_state.layout
        self.plan, self._placement = plan, Placement.from_record(plan.placement, layout=layout)
        self._proceed()

    def _proceed(self) -> None:
        """Carry out the plan, once it has arrived and all servers are connected."""
        plan = self.plan
        met = [peer for peer in self.peers.values() if peer.sums is not None]
        if plan is None or self._proceeding or len(met) < len(self._servers) - 1:
            return
        self._proceeding = True
        with self._blame_leader():
            self._carry_out(plan)
        self._when_complete()

    @contextmanager
    def _blame_leader(self) -> Iterator[None]:
        """Refuse the leader, not the sender of the current message, if the plan can't be carried out."""
        try:
            yield
        except MALFORMED as error:
            if self.is_leader:
                raise
            leader = self.peers[self._servers[0]]
            why = ProtocolError(f"a plan that can't be carried out: {error!r}")
            self._acceptor.turn_away(leader.link, leader.name, why)

    def _carry_out(self, plan: RecoveryPlan) -> None:
        server_state, layout = self._server_state, self._server_state.layout
        catch_up(server_state, plan)
        if (
            self.is_leader
            and server_state.rows is not None
            and server_state.held.placement is not None
        ):
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
                for block in layout.blocks_in(move.shard):
                    block_state = server_state.block_state(block.number)
                    for message, payload in pack(block.number, block_state, role=move.role):
                        self._send(move.target, message, payload)

    def _move_rows(self, plan: RecoveryPlan, rows: RowServerState) -> None:
        for move in plan.row_moves:
            if move.target == self._server_state.name:
                expected = {(ROLE + name, move.shard) for name in rows.tables.specs}
                self._expected |= expected - self._tensor_messages.complete.keys()
            if move.source == self._server_state.name:
                for role, block_state in rows.pack(move.shard):
                    for message, payload in pack(move.shard, block_state, role=role):
                        self._send(move.target, message, payload)

    def _when_complete(self) -> None:
        plan, placement = self.plan, self._placement
        if (
            plan is None
            or placement is None
            or not self._proceeding
            or self._expected
            or self._prepared
        ):
            return
        complete = self._tensor_messages.complete
        with self._blame_leader():
            self._server_state.prepare(
                self._view,
                placement,
                complete,
                fresh=not plan.standing,
                row_placement=plan.row_placement,
            )
            self._prepared = True
        if not self._prepared:
            return
        if self.is_leader:
            self._moved.add(self._server_state.name)
        else:
            self._send(self._servers[0], Moved())

    def _send_all(self, message: Message) -> None:
        for name in self.peers:
            self._send(name, message)

    def _send(self, server: str, message: Message, payload: memoryview | None = None) -> None:
        self.peers[server].link.send(message, payload)
