"""A parameter server in one view: adds up what workers push, runs the optimizer, tells workers of updates.

    Server        the thread that owns everything, and how a view begins and ends
    ViewService   a view that has begun: handles the messages of workers and other servers
    Decisions     from a push to a decision: OwnDecisions if every server decides by itself,
                  LeaderDecisions and FollowerDecisions if one decides for all

Readers (sessions.py) only put what arrives into the inbox of the server's thread, so no block has two
writers, and no lock is held while numbers are added; in rounds, a worker of the same process takes the
thread's place (rounds.py). A server lives as long as its view; its ServerState outlives it. Its messages are
in protocol.py; how a view begins is in view_change.py.

If an update is everybody's gradients, each server knows by itself what comes next, and sends neither
`received` nor `decide`. Cost per step and worker inside a host: one message to the leader and one from each
server. Between hosts, gradients and parameters are sent once each; a worker that holds replicas gets sums
instead.
"""

from __future__ import annotations

import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from manyhands.errors import LinkError, ManyhandsError, ProtocolError
from manyhands.hosts.me import LINK_GRACE_S
from manyhands.ps.acceptor import Acceptor, Admission, PeerDisconnected
from manyhands.ps.block_store import FlatTensors
from manyhands.ps.mode import PsMode
from manyhands.ps.policies import MAX_UNDER_WAY, Decider, Decision, StartPermit
from manyhands.ps.protocol import (
    AskMissing,
    Commit,
    Decide,
    EnterView,
    GradientSpan,
    MissingWorkers,
    OpenDataLink,
    PartialNorm,
    PermitMessage,
    PullRequest,
    PushDropped,
    PushesEnd,
    PushMessage,
    PushReceived,
    Refused,
    ReplicaSum,
    Rest,
    RowGradients,
    RowsRequest,
    StateRequest,
    Statistics,
    SumHeld,
    SumTaken,
    TableStateRequest,
    TensorMessage,
    Wake,
)
from manyhands.ps.recovery_plan import RecoveryPlan
from manyhands.ps.rounds import RoundServer, RoundTable
from manyhands.ps.rows import ColocatedRows
from manyhands.ps.server_state import ServerState
from manyhands.ps.sessions import InboxItem, Peer, WorkerSession, WorkerSessions, check_push
from manyhands.ps.updates import (
    MessageExchange,
    NetworkExchange,
    UpdatePipeline,
    check_decision,
)
from manyhands.ps.view_change import Message as ViewChangeMessage
from manyhands.ps.view_change import PeerDialed, ViewChange
from manyhands.threads import OnError, start_thread, start_timer
from manyhands.transport import Link, Listener
from manyhands.transport.counters import Doorbell
from manyhands.transport.fields import kind_of
from manyhands.transport.link import pack as pack_frame

logger = logging.getLogger("manyhands.ps")

MAX_AHEAD = 2 * MAX_UNDER_WAY
"""Steps that a push may be ahead of the one that is due."""
MAX_EARLY = 4096
"""Messages that are kept until the view has begun."""

Refuse = Callable[[Link, str, ProtocolError], None]
"""Closes the link of a member that has broken the protocol."""


class Decisions(ABC):
    """Turns pushes into decisions."""

    @abstractmethod
    def push_complete(self, message: PushMessage) -> None:
        """Handle a push that is here completely."""

    def check_due(self, worker: str, seq: int) -> None:
        """Raise ProtocolError if a push is too far ahead."""
        return

    def push_received(self, server: str, message: PushMessage) -> None:
        """Handle a push that another server has completely."""
        raise ProtocolError("'PushReceived' for a server that does not decide")

    def decided(self, server: str, decision: Decision) -> None:
        """Carry out the decision of another server."""
        raise ProtocolError("a decision from a server that does not decide")

    def handle(self, session: WorkerSession, message: object) -> None:
        """Handle a worker's message to the leader."""
        raise ProtocolError(f"{kind_of(message)!r} for a server that is not the leader")

    def permit(self, worker: str) -> StartPermit | None:
        """Return which step a worker may begin; None if another server tells it."""
        return None


@dataclass(eq=False)
class FollowerDecisions(Decisions):
    """The leader decides; this server tells it of each push that it has."""

    server_state: ServerState
    updates: UpdatePipeline
    leader: Peer

    def push_complete(self, message: PushMessage) -> None:
        self.leader.link.send(PushReceived(message))

    def decided(self, server: str, decision: Decision) -> None:
        if server != self.leader.name:
            super().decided(server, decision)
        check_decision(self.server_state, decision, next_is=self.updates.decided + 1)
        self.updates.enqueue(decision)


@dataclass(eq=False)
class OwnDecisions(Decisions):
    """Decisions by every server itself: an update has the gradients of all workers, so all decide the
    same."""

    decider: Decider
    updates: UpdatePipeline
    sessions: Mapping[str, WorkerSession]
    name: str
    """Of this server."""
    refuse: Refuse
    is_leader: bool = True
    """If true, this server tells workers which step they may begin."""
    _permitted: dict[str, int | None] = field(default_factory=dict)
    """The last step that each worker was permitted to begin."""

    def push_complete(self, message: PushMessage) -> None:
        self._count(self.name, message)

    def check_due(self, worker: str, seq: int) -> None:
        due = self.decider.permit(worker).at
        if seq > due + MAX_AHEAD:
            raise ProtocolError(f"a push of step {seq}, where step {due} is due")

    def handle(self, session: WorkerSession, message: object) -> None:
        if not self.is_leader:
            super().handle(session, message)
        decider, worker = self.decider, session.name
        match message:
            case PushesEnd():
                decider.end_pushes(worker)
                self._decide()
            case Rest():
                decider.rest(worker)
                self._decide()
            case Wake():
                decider.wake(worker)
                session.send(PermitMessage(self.permit(worker)))
            case AskMissing(seq):
                session.send(MissingWorkers(decider.policy.waiting_for(worker, seq + 1)))

    def permit(self, worker: str) -> StartPermit | None:
        if not self.is_leader or worker in self.decider.resting:
            return None
        permit = self.decider.permit(worker)
        self._permitted[worker] = permit.until
        return permit

    def _count(self, server: str, message: PushMessage) -> None:
        push = message.push
        try:
            self.decider.received(server, push, began=message.began, after=message.after)
        except ValueError as error:
            if (session := self.sessions.get(push.worker)) is not None:
                self.refuse(session.link, push.worker, ProtocolError(str(error)))
        self._decide()

    def _decide(self) -> None:
        for decision in self.decider.decisions():
            self._announce(decision)
            self.updates.enqueue(decision)
        if self.is_leader:
            self._notify_workers()

    def _announce(self, decision: Decision) -> None:
        """Tell the other servers."""
        return

    def _notify_workers(self) -> None:
        for push in self.decider.late():
            if (session := self.sessions.get(push.worker)) is not None:
                session.late = [*session.late[-7:], push.seq]
                session.send(PushDropped(push.seq, self.permit(push.worker)))
        for name in self.decider.stragglers():
            if (session := self.sessions.get(name)) is not None:
                session.send(PermitMessage(self.permit(name)))


@dataclass(eq=False)
class LeaderDecisions(OwnDecisions):
    """Decisions of the leader, for all servers. Between hosts, a push counts once every server has it."""

    peers: Mapping[str, Peer] = field(kw_only=True)
    workers: Sequence[str] = field(kw_only=True)
    rounds: bool = field(kw_only=True)
    """If false, a worker is told whenever the step that it may begin changes; in rounds it is told with each
    update."""

    def push_received(self, server: str, message: PushMessage) -> None:
        if (worker := message.push.worker) not in self.workers:
            raise ProtocolError(f"a push of {worker[:80]!r}, which is no worker of this view")
        check_push(message, worker)
        self._count(server, message)

    def _announce(self, decision: Decision) -> None:
        frame = pack_frame(Decide(decision))
        for peer in self.peers.values():
            with suppress(LinkError):  # it is gone, and the others must be told all the same
                peer.link.send_packed(frame)

    def _notify_workers(self) -> None:
        super()._notify_workers()
        if self.rounds:
            return
        for name, session in self.sessions.items():
            until = self.decider.permit(name).until
            if name not in self.decider.resting and until != self._permitted.get(name):
                session.send(PermitMessage(self.permit(name)))


@dataclass(eq=False)
class ViewService:
    """A view that has begun: handles the messages of workers and other servers."""

    server_state: ServerState
    sessions: WorkerSessions
    exchange: MessageExchange
    updates: UpdatePipeline
    decisions: Decisions
    rounds: RoundServer | None
    is_leader: bool

    def end(self) -> None:
        """End with the view. Break reference cycles, so that memory of other members is freed at once: the
        next view maps its own, and the cyclic collector may not run for minutes."""
        if self.rounds is not None:
            self.rounds.stop()
        self.sessions.permit = lambda worker: None

    def handle_server(self, sender: str, message: object) -> None:
        match message:
            case Decide(decision):
                self.decisions.decided(sender, decision)
            case PushReceived(push):
                self.decisions.push_received(sender, push)
            case PartialNorm() | ReplicaSum() | SumTaken() | SumHeld() | Commit():
                self.exchange.handle(sender, message)
                self.updates.advance()

    def handle_worker(self, item: InboxItem) -> None:
        sender, message, link = item.sender, item.message, item.link
        assert link is not None
        if isinstance(message, EnterView):
            self.sessions.enter(sender, link, message)
            return
        session, state = self.sessions.by_name.get(sender), self.server_state
        if session is None:
            raise ProtocolError(f"{kind_of(message)!r} of {sender}, which has not entered")
        match message:
            case PushMessage() | GradientSpan() if self.rounds is not None:
                raise ProtocolError("a push as a message, where rounds use shared memory")
            case PushMessage(push, began):
                if began > state.ledger.version:
                    raise ProtocolError(f"a push on version {began}, which does not exist yet")
                self.decisions.check_due(sender, push.seq)
                complete = session.push_arrived(message)
                if not session.travels:
                    self.exchange.gradient_arrived(sender, push.seq, push.slot)
                self._complete(complete)
            case GradientSpan(seq, slot, span):
                self.decisions.check_due(sender, seq)
                complete = session.span_arrived(message)
                self.exchange.gradient_arrived(sender, seq, slot, span)
                self._complete(complete)
            case OpenDataLink():
                if session.add_data_link(link):
                    session.send_params(state.ledger.version, state.params)
            case StateRequest():
                self.sessions.send_state(session)
            case PullRequest():
                self.sessions.answer_pull(session)
            case RowGradients() | RowsRequest() | TableStateRequest():
                if state.rows is None:
                    raise ProtocolError(f"{kind_of(message)!r} without tables")
                answers = state.rows.handle(sender, message, item.payload, done=session.done)
                session.send_all(answers)
            case Statistics() if self.is_leader:
                self.sessions.pass_statistics(sender, message, item.payload)
            case _:
                self.decisions.handle(session, message)

    def _complete(self, push: PushMessage | None) -> None:
        if push is not None:
            self.decisions.push_complete(push)


@dataclass(frozen=True)
class ServerEvents:
    """Callbacks of a server to its owner."""

    unreachable: Callable[[str], None] = lambda peer: None
    """The link to a server is lost, and no view comes without it."""
    refused: Callable[[str, str], None] = lambda member, why: None
    """A member has broken the protocol, and how."""
    failed: OnError = lambda error: None
    """The server has failed, in one of its threads; the error is in `error` by then."""


@dataclass(frozen=True)
class ServerView:
    """The view that a server is in."""

    number: int
    servers: Sequence[str]
    workers: Sequence[str]
    local: Mapping[str, Sequence[FlatTensors]] = field(default_factory=dict)
    """Gradients of a worker in this process."""
    rounds: tuple[RoundTable, Doorbell] | None = None
    """The table in which rounds are agreed on; None: by messages."""


class Server:
    def __init__(
        self,
        server_state: ServerState,
        mode: PsMode,
        listener: Listener,
        view: ServerView,
        *,
        events: ServerEvents | None = None,
    ) -> None:
        self.address = listener.address
        self.server_state = server_state
        self.error: BaseException | None = None
        self.begun = threading.Event()
        self.followed: Callable[[], None] = lambda: None
        """Called when replicas here are newer."""
        self._events = events or ServerEvents()
        self._frozen = False
        self._early: list[InboxItem] = []
        """Messages that came before the view has begun."""
        self._service: ViewService | None = None
        self._lock = threading.RLock()
        """Held by the thread that works on the blocks: this server's, or a worker's in rounds."""
        self._make_service: Callable[..., ViewService] | None = partial(
            make_service, server_state, mode, view
        )
        admission = Admission(
            self.name,
            view=view.number,
            servers=view.servers,
            workers=view.workers,
            identified=not server_state.shared,
        )
        self._acceptor = Acceptor(
            self.name,
            listener,
            admission,
            place=self._place,
            on_error=self._fail,
            refused=self._events.refused,
        )
        self._view_change = ViewChange(
            server_state, self._acceptor, view=view.number, servers=view.servers
        )
        self._thread = start_thread(self._serve, name=f"{self.name}-serve", on_error=self._fail)

    @property
    def name(self) -> str:
        return self.server_state.name

    @property
    def rounds(self) -> RoundServer | None:
        """Rounds in shared memory, if the view has them; begun with the view."""
        return self._service.rounds if self._service is not None else None

    def meet(self, dial: Callable[[str], Link]) -> None:
        """Find the other servers."""
        self._view_change.meet(dial)

    def freeze(self, alive: Sequence[str] = ()) -> None:
        """End the view. All messages of dead members are handled; then all links close."""
        self._frozen = True
        if (service := self._service) is not None:
            service.exchange.close()
            if service.rounds is not None:
                service.rounds.freeze()
        self._acceptor.close()
        for name, peer in list(self._view_change.peers.items()):
            if name not in alive:
                self._acceptor.drain(peer.link, timeout_s=2.0)
            peer.link.close()
        self._acceptor.inbox.put(None)
        if service is not None:
            service.sessions.close()  # else the thread might wait for a worker that does not read
        self._thread.join(timeout=30.0)
        if self._thread.is_alive():
            raise ManyhandsError(f"{self.name} did not stop within 30 s.")
        with self._lock:
            if self._service is not None:
                self._service.end()
            # They hold memory of other members.
            self._service = self._make_service = None

    @property
    def near(self) -> ColocatedRows | None:
        """Rows of tables, for the worker of this process."""
        rows = self.server_state.rows
        return ColocatedRows(self.name, rows, self._lock) if rows is not None else None

    # In the server's thread ---------------------------------------------------------------------

    def _serve(self) -> None:
        while (item := self._acceptor.inbox.get()) is not None:
            self._handle(item)
            item.handled()

    def _fail(self, error: BaseException) -> None:
        """Close all sessions after a failure of a thread: members must not wait for this server."""
        if self.error is None:
            self.error = error
        logger.error("%s failed", self.name, exc_info=error)
        self.begun.set()
        if self._service is not None:
            self._service.sessions.close()
        self._events.failed(error)

    def _handle(self, item: InboxItem) -> None:
        try:
            with self._lock:
                if item.by_worker:
                    self._handle_worker(item)
                else:
                    self._handle_server(item)
        except ProtocolError as why:
            # A member that breaks the protocol is not a reason to lose everybody's parameters.
            peer = self._view_change.peers.get(item.sender)
            link = item.link or (peer.link if peer is not None else None)
            assert link is not None
            self._acceptor.turn_away(link, item.sender, why)
        except LinkError as error:
            logger.info("%s: %s", self.name, error)  # a server is gone: a view without it comes

    def _handle_server(self, item: InboxItem) -> None:
        sender, message = item.sender, item.message
        if isinstance(message, PeerDisconnected):
            self._on_disconnected(sender)
        elif isinstance(message, Refused):
            logger.warning("%s was refused by %s: %s", self.name, sender, message.why)
        elif isinstance(message, ViewChangeMessage | PeerDialed):
            if not self._frozen and self._view_change.handle(item):
                self._begin()
        elif not self.begun.is_set() and not self._frozen:
            if len(self._early) >= MAX_EARLY:
                raise ProtocolError(f"{MAX_EARLY} messages before the view has begun")
            self._early.append(item)
        elif self._service is not None and not (self._frozen and isinstance(message, PushReceived)):
            self._service.handle_server(sender, message)

    def _handle_worker(self, item: InboxItem) -> None:
        if self._frozen:
            return
        if self._service is not None:
            self._service.handle_worker(item)
            return
        if not isinstance(item.message, EnterView):
            raise ProtocolError(f"{kind_of(item.message)!r} before the view has begun")
        for before in [e for e in self._early if e.by_worker and e.sender == item.sender]:
            self._early.remove(before)
            if before.link is not None:
                before.link.close()
        self._early.append(item)

    def _on_disconnected(self, peer: str) -> None:
        """Ask for a new view, unless one comes by itself because the peer's process is dead."""

        def ask() -> None:
            if not self._frozen:
                self._events.unreachable(peer)

        start_timer(LINK_GRACE_S, ask, name=f"{self.name}-link-grace", on_error=self._fail)

    def _begin(self) -> None:
        """Begin the view: build its service, and handle the messages that came early."""
        assert self._view_change.plan is not None
        assert self._make_service is not None
        self._service = self._make_service(
            self._view_change.plan,
            self._view_change.peers,
            lock=self._lock,
            followed=lambda: self.followed(),
            refuse=self._acceptor.turn_away,
            on_error=self._fail,
        )
        self.begun.set()
        early, self._early = self._early, []
        for item in early:
            self._handle(item)

    def _place(self, sender: str, message: object) -> memoryview | None:
        """Return the memory for the payload of a message: sums and gradients are received in place."""
        service = self._service
        if isinstance(message, TensorMessage):
            return None
        if service is None:
            raise ProtocolError(f"{kind_of(message)!r} before the view has begun")
        if isinstance(message, ReplicaSum):
            return service.exchange.buffer_for(sender, message)
        return service.sessions.buffer_for(sender, message)


def make_service(
    state: ServerState,
    mode: PsMode,
    view: ServerView,
    plan: RecoveryPlan,
    peers: Mapping[str, Peer],
    *,
    lock: AbstractContextManager[Any],
    followed: Callable[[], None],
    refuse: Refuse,
    on_error: OnError,
) -> ViewService:
    """Choose, once per view, how pushes become decisions and how servers exchange updates."""
    placement, is_leader = state.placement, view.servers[0] == state.name
    state.attach_sums({name: peer.sums or () for name, peer in peers.items()})
    if state.rows is not None:
        state.rows.meet({name: peer.undo[0] for name, peer in peers.items() if peer.undo})
    if state.shared or not state.replicas or not peers:
        exchange = MessageExchange(state, mode, placement, peers)
    else:
        exchange = NetworkExchange(
            state, mode, placement, peers, workers=view.workers, followed=followed
        )
    sessions = WorkerSessions(
        state, mode, plan, peers, first_worker=view.workers[0], local=view.local
    )
    updates = UpdatePipeline(
        state,
        mode,
        exchange,
        applied=sessions.notify_workers,
        compensation=sessions.compensation,
    )
    decisions = _make_decisions(state, mode, view, peers, updates, sessions, refuse)
    sessions.permit = decisions.permit
    round_server = None
    if view.rounds is not None:
        round_server = RoundServer(*view.rounds, state, mode, placement, lock=lock)
        round_server.start(colocated=state.name in view.workers, on_error=on_error)
    return ViewService(state, sessions, exchange, updates, decisions, round_server, is_leader)


def _make_decisions(
    state: ServerState,
    mode: PsMode,
    view: ServerView,
    peers: Mapping[str, Peer],
    updates: UpdatePipeline,
    sessions: WorkerSessions,
    refuse: Refuse,
) -> Decisions:
    leader, name = view.servers[0], state.name

    def decider(servers: Sequence[str]) -> Decider:
        policy = mode.make_policy(view.workers)
        return Decider(
            policy, state.ledger, servers=servers, lr_rule=mode.lr_rule, by_part=not mode.rounds
        )

    common = (updates, sessions.by_name, name, refuse)
    if mode.for_all:
        return OwnDecisions(decider([name]), *common, is_leader=name == leader)
    if name != leader:
        return FollowerDecisions(state, updates, peers[leader])
    lead_decider = decider([name] if state.shared else view.servers)
    return LeaderDecisions(
        lead_decider, *common, peers=peers, workers=view.workers, rounds=mode.rounds
    )
