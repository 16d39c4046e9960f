"""A parameter server in one view: adds up what workers push, runs the optimizer, tells workers of updates.

    Server            the thread that owns everything, and how a view begins and ends
    ViewService       a view that has begun: what workers and other servers say in it
    WorkerSessions    the workers: what they need to begin, and what they are told of updates
    Decisions         from a push to a decision: OwnDecisions where every server decides by itself,
                      LeadDecisions and FollowerDecisions where one decides for all

Readers only put what arrives into the inbox of the server's thread, so no block has two writers, and no lock
is held while numbers are added; in rounds, a worker of the same process takes the thread's place (rounds.py).
A server lives as long as its view; what outlives it is in its ServerState. Its messages are in protocol.py;
how a view begins is in view_change.py.

If an update is everybody's gradients, each server knows by itself what comes next, and sends neither `had`
nor `decide`. Cost per step and worker inside a host: one message to the lead and one from each server.
Between hosts gradients out and parameters back once each; a worker that holds replicas gets sums instead.
"""

from __future__ import annotations

import logging
import threading
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from manyhands.errors import LinkError, ManyhandsError, ProtocolError
from manyhands.hosts.me import TORN_S
from manyhands.ps.acceptor import Acceptor, Admission, InboxItem, PeerDisconnected
from manyhands.ps.block_store import FlatTensors
from manyhands.ps.blocks import order_needed
from manyhands.ps.compensation import Compensation
from manyhands.ps.mode import PsMode
from manyhands.ps.policies import MAX_UNDER_WAY, Contribution, Decider, Decision, StartPermit
from manyhands.ps.protocol import (
    AppliedPush,
    AskMissing,
    Commit,
    Decide,
    EnterView,
    GradientSpan,
    MissingWorkers,
    NewVersion,
    OpenLane,
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
    StateEnd,
    StateRequest,
    Statistics,
    SumHeld,
    SumTaken,
    TableStateRequest,
    ViewBegun,
    Wake,
    WeightsUnknown,
)
from manyhands.ps.recovery_plan import RecoveryPlan
from manyhands.ps.rounds import Doorbell, RoundServer, RoundTable
from manyhands.ps.rows import ColocatedRows
from manyhands.ps.server_state import ServerState, travelling
from manyhands.ps.tensor_messages import pack
from manyhands.ps.updates import (
    MessageExchange,
    NetworkExchange,
    UpdatePipeline,
    check_decision,
)
from manyhands.ps.view_change import Message as ViewChangeMessage
from manyhands.ps.view_change import Peer, PeerDialed, ViewChange
from manyhands.ps.worker_session import WorkerSession, find_slots
from manyhands.threads import OnError, start_thread, start_timer
from manyhands.transport import Link, Listener
from manyhands.transport.fields import kind_of
from manyhands.transport.link import pack as pack_frame

logger = logging.getLogger("manyhands.ps")

MAX_AHEAD = 2 * MAX_UNDER_WAY
"""Steps that a push may be ahead of the one that is due."""
MAX_EARLY = 4096
"""Messages that are kept until the view has begun."""

Refuse = Callable[[Link, str, ProtocolError], None]
"""Closes the link of a member that has broken the protocol."""


class WorkerSessions:
    """The workers that have entered: what they need to begin, and what they are told of updates."""

    def __init__(
        self,
        server_state: ServerState,
        mode: PsMode,
        plan: RecoveryPlan,
        peers: Mapping[str, Peer],
        *,
        first_worker: str,
        local: Mapping[str, Sequence[FlatTensors]],
    ) -> None:
        """`local`: gradients of a worker in this process."""
        self.by_name: dict[str, WorkerSession] = {}
        self.permit: Callable[[str], StartPermit | None] = lambda who: None
        """Which step a worker may begin; None where another server tells it."""
        self.compensation = Compensation(mode.compensate) if mode.compensate else None
        self._server_state = server_state
        self._mode, self._plan, self._peers = mode, plan, peers
        self._first_worker, self._local = first_worker, local
        self._spans, self._keepers = travelling(server_state.placement, server_state.name)
        """This server's blocks as they travel, and for each span the server that has its replica."""
        needed = {block.number: i for i, block in enumerate(order_needed(server_state.layout))}
        self._order = sorted(
            range(len(self._spans)), key=lambda i: needed[self._spans[i].blocks[0].number]
        )
        self._statistics: tuple[Statistics, memoryview | None] | None = None
        """What the first worker sent to the others last."""
        self._reported_bytes = 0

    def enter(self, who: str, link: Link, message: EnterView) -> None:
        """A worker enters, or comes back with a new connection."""
        state, ledger = self._server_state, self._server_state.ledger
        if message.seen > ledger.version:
            raise WeightsUnknown(
                f"{who} has seen version {message.seen}, and here is {ledger.version}: "
                "all who held the parameters are gone, and what was learnt is lost"
            )
        if (session := self.by_name.get(who)) is not None:
            session.enter_again(link)
        else:
            slots = self._local.get(who) or find_slots(
                state.params, message.slots, self._mode.slots, shared=state.shared
            )
            travels = who not in self._local and not message.slots
            session = WorkerSession(who, link, slots, travels=travels, spans=self._spans)
            session.wants = [i for i in self._order if self._keepers[i] != who]
            self.by_name[who] = session
            state.gradients[who] = slots
            if state.rows is not None:
                state.rows.enter(who, message.baskets, self._mode.slots)
            elif message.baskets:
                raise ProtocolError("baskets without tables")
            if self.compensation is not None:
                self.compensation.remember(who, state.own)
        last = list(ledger.decisions)[-1:]
        session.tell(
            ViewBegun(
                ledger.version,
                ledger.ticks,
                done=session.done,
                late=session.late,
                last=[(each.step, each.part) for d in last for each in d.contributions],
                travels=session.travels,
                placement=self._plan.placement,
                homes=self._plan.homes,
                permit=self.permit(who),
            )
        )
        if self._statistics is not None:
            session.tell(*self._statistics)  # sent while it had no connection

    def tell_update(self, decision: Decision, lr: float) -> None:
        """An update is applied: in rounds all workers are told, otherwise those whose pushes it has."""
        own: dict[str, list[AppliedPush]] = defaultdict(list)
        for each in decision.contributions:
            applied = AppliedPush(each.seq, each.staleness, self._rate(decision, each, lr))
            own[each.worker].append(applied)
            if (session := self.by_name.get(each.worker)) is not None:
                session.done = max(session.done, each.seq)
        names = list(self.by_name) if self._mode.rounds else [n for n in own if n in self.by_name]
        for name in names:
            session = self.by_name[name]
            if self.compensation is not None:
                self.compensation.remember(name, self._server_state.own)
            sent = 0
            if name == self._first_worker:
                total = self.bytes_sent
                sent, self._reported_bytes = total - self._reported_bytes, total
            permit = self.permit(name)
            session.tell(
                NewVersion(decision.version, decision.ticks, own.get(name, ()), sent, permit=permit)
            )
            self.send_params(session)

    def answer_pull(self, session: WorkerSession) -> None:
        ledger = self._server_state.ledger
        session.tell(NewVersion(ledger.version, ledger.ticks, pulled=True))
        self.send_params(session)

    def send_params(self, session: WorkerSession) -> None:
        if session.travels:
            state = self._server_state
            session.send_spans(state.ledger.version, state.params)

    def send_state(self, session: WorkerSession) -> None:
        """Send the optimizer's state, for a checkpoint."""
        own = self._server_state.own
        for number in own.numbers:
            session.tell_all(pack(number, own.take(number), params=False))
        session.tell(StateEnd("state"))

    def pass_statistics(self, who: str, message: Statistics, payload: memoryview | None) -> None:
        self._statistics = (message, payload)
        for name, other in self.by_name.items():
            if name != who:
                other.tell(message, payload)

    def buffer_for(self, who: str, message: object) -> memoryview | None:
        """Where the payload of a worker's message goes. Gradients go straight into the memory that they
        are added from."""
        match message:
            case GradientSpan(slot=slot, span=span):
                if (session := self.by_name.get(who)) is None:
                    raise ProtocolError(f"a run of {who}, who has not entered")
                return session.room(slot, span)
            case RowGradients(bytes=count) | RowsRequest(bytes=count):
                return memoryview(bytearray(count))
            case Statistics():
                if who != self._first_worker:
                    raise ProtocolError("statistics, which only the first worker sends")
                buffers = self._server_state.train_state.model.buffers()
                return memoryview(bytearray(8 * sum(buffer.numel() for buffer in buffers)))
        return None

    @property
    def bytes_sent(self) -> int:
        """Over the network, to workers and servers."""
        if self._server_state.shared:
            return 0
        sessions = sum(session.bytes_sent for session in list(self.by_name.values()))
        return sessions + sum(peer.link.bytes_sent for peer in list(self._peers.values()))

    def close(self) -> None:
        for session in list(self.by_name.values()):
            session.close()

    def _rate(self, decision: Decision, push: Contribution, lr: float) -> float:
        """The learning rate that a push was applied with, as that of a whole step."""
        rate, (part, whole) = lr * decision.lr_scale, push.share
        return rate if self._mode.rounds or not part else rate * whole / part


class Decisions(ABC):
    """From a push to a decision."""

    @abstractmethod
    def push_complete(self, message: PushMessage) -> None:
        """All of a push is here."""

    def check_due(self, who: str, seq: int) -> None:
        """Raises ProtocolError if a push is too far ahead."""
        return

    def push_received(self, server: str, message: PushMessage) -> None:
        """Another server has all of a push."""
        raise ProtocolError("'had', which is for a lead that decides")

    def decided(self, server: str, decision: Decision) -> None:
        """Another server has decided."""
        raise ProtocolError("a decision from a server that does not decide")

    def handle(self, session: WorkerSession, message: object) -> None:
        """A worker's message to the lead."""
        raise ProtocolError(f"{kind_of(message)!r}, which is for the lead")

    def permit(self, who: str) -> StartPermit | None:
        """Which step a worker may begin; None where another server tells it."""
        return None


class FollowerDecisions(Decisions):
    """The lead decides; it is told of each push that is here."""

    def __init__(self, server_state: ServerState, updates: UpdatePipeline, lead: Peer) -> None:
        self._server_state, self._updates, self._lead = server_state, updates, lead

    def push_complete(self, message: PushMessage) -> None:
        self._lead.link.send(PushReceived(message))

    def decided(self, server: str, decision: Decision) -> None:
        if server != self._lead.name:
            super().decided(server, decision)
        check_decision(self._server_state, decision, next_is=self._updates.decided + 1)
        self._updates.enqueue(decision)


class OwnDecisions(Decisions):
    """Every server decides by itself, as an update is everybody's gradients: all come to the same."""

    def __init__(
        self,
        decider: Decider,
        updates: UpdatePipeline,
        sessions: Mapping[str, WorkerSession],
        *,
        name: str,
        leads: bool,
        refuse: Refuse,
    ) -> None:
        """`leads`: if true, this server tells workers which step they may begin."""
        self._decider, self._updates = decider, updates
        self._sessions, self._name = sessions, name
        self._leads, self._refuse = leads, refuse
        self._told: dict[str, int | None] = {}

    def push_complete(self, message: PushMessage) -> None:
        self._count(self._name, message)

    def check_due(self, who: str, seq: int) -> None:
        due = self._decider.permit(who).at
        if seq > due + MAX_AHEAD:
            raise ProtocolError(f"a push of step {seq}, where step {due} is due")

    def handle(self, session: WorkerSession, message: object) -> None:
        if not self._leads:
            super().handle(session, message)
        decider, who = self._decider, session.name
        match message:
            case PushesEnd():
                decider.end_pushes(who)
                self._decide()
            case Rest():
                decider.rest(who)
                self._decide()
            case Wake():
                decider.wake(who)
                session.tell(PermitMessage(self.permit(who)))
            case AskMissing(seq):
                session.tell(MissingWorkers(decider.policy.waiting_for(who, seq + 1)))

    def permit(self, who: str) -> StartPermit | None:
        if not self._leads or who in self._decider.resting:
            return None
        permit = self._decider.permit(who)
        self._told[who] = permit.until
        return permit

    def _count(self, server: str, message: PushMessage) -> None:
        push = message.push
        try:
            self._decider.received(server, push, began=message.began, after=message.after)
        except ValueError as error:
            if (session := self._sessions.get(push.worker)) is not None:
                self._refuse(session.link, push.worker, ProtocolError(str(error)))
        self._decide()

    def _decide(self) -> None:
        for decision in self._decider.decisions():
            self._announce(decision)
            self._updates.enqueue(decision)
        if self._leads:
            self._tell_workers()

    def _announce(self, decision: Decision) -> None:
        """Tell the other servers."""
        return

    def _tell_workers(self) -> None:
        for push in self._decider.late():
            if (session := self._sessions.get(push.worker)) is not None:
                session.late = [*session.late[-7:], push.seq]
                session.tell(PushDropped(push.seq, self.permit(push.worker)))
        for name in self._decider.stragglers():
            if (session := self._sessions.get(name)) is not None:
                session.tell(PermitMessage(self.permit(name)))


class LeadDecisions(OwnDecisions):
    """This server decides for all. Between hosts, a push counts once every server has it."""

    def __init__(
        self,
        decider: Decider,
        updates: UpdatePipeline,
        sessions: Mapping[str, WorkerSession],
        *,
        name: str,
        peers: Mapping[str, Peer],
        workers: Sequence[str],
        rounds: bool,
        refuse: Refuse,
    ) -> None:
        """`rounds`: if false, a worker is told whenever the step that it may begin changes; in rounds it
        is told with each update."""
        super().__init__(decider, updates, sessions, name=name, leads=True, refuse=refuse)
        self._peers, self._workers, self._rounds = peers, workers, rounds

    def push_received(self, server: str, message: PushMessage) -> None:
        if (worker := message.push.worker) not in self._workers:
            raise ProtocolError(f"a push of {worker[:80]!r}, who is no worker here")
        self._count(server, message)

    def _announce(self, decision: Decision) -> None:
        frame = pack_frame(Decide(decision))
        for peer in self._peers.values():
            with suppress(LinkError):  # it is gone, and the others must know all the same
                peer.link.send_packed(frame)

    def _tell_workers(self) -> None:
        super()._tell_workers()
        if self._rounds:
            return
        for name, session in self._sessions.items():
            until = self._decider.permit(name).until
            if name not in self._decider.resting and until != self._told.get(name):
                session.tell(PermitMessage(self.permit(name)))


class ViewService:
    """A view that has begun: handles what workers and other servers say in it."""

    def __init__(
        self,
        server_state: ServerState,
        sessions: WorkerSessions,
        exchange: MessageExchange,
        updates: UpdatePipeline,
        decisions: Decisions,
        rounds: RoundServer | None,
        *,
        leads: bool,
    ) -> None:
        self.sessions = sessions
        self.exchange = exchange
        self.rounds = rounds
        self._server_state = server_state
        self._updates = updates
        self._decisions = decisions
        self._leads = leads

    def end(self) -> None:
        """The view is over. Break reference cycles, so that memory of other members is freed at once: the
        next view maps its own, and the cyclic collector may not run for minutes."""
        if self.rounds is not None:
            self.rounds.stop()
        self.sessions.permit = lambda who: None

    def handle_server(self, who: str, message: object) -> None:
        match message:
            case Decide(decision):
                self._decisions.decided(who, decision)
            case PushReceived(push):
                self._decisions.push_received(who, push)
            case PartialNorm() | ReplicaSum() | SumTaken() | SumHeld() | Commit():
                self.exchange.handle(who, message)
                self._updates.advance()

    def handle_worker(self, happened: InboxItem) -> None:
        who, message, link = happened.who, happened.message, happened.link
        assert link is not None
        if isinstance(message, EnterView):
            self.sessions.enter(who, link, message)
            return
        session, rows = self.sessions.by_name.get(who), self._server_state.rows
        if session is None:
            raise ProtocolError(f"{kind_of(message)!r} of {who}, who has not entered")
        match message:
            case PushMessage() | GradientSpan() if self.rounds is not None:
                raise ProtocolError("a push as a message, where rounds use shared memory")
            case PushMessage():
                self._on_push(session, message)
            case GradientSpan():
                self._on_span(session, message)
            case OpenLane():
                if session.add_lane(link):
                    self.sessions.send_params(session)
            case StateRequest():
                self.sessions.send_state(session)
            case PullRequest():
                self.sessions.answer_pull(session)
            case RowGradients() | RowsRequest() | TableStateRequest():
                if rows is None:
                    raise ProtocolError(f"{kind_of(message)!r} without tables")
                session.tell_all(rows.hear(who, message, happened.payload, done=session.done))
            case Statistics() if self._leads:
                self.sessions.pass_statistics(who, message, happened.payload)
            case _:
                self._decisions.handle(session, message)

    def _on_push(self, session: WorkerSession, message: PushMessage) -> None:
        if message.began > self._server_state.ledger.version:
            raise ProtocolError(f"a push on version {message.began}, which does not exist yet")
        push = message.push
        self._decisions.check_due(session.name, push.seq)
        whole = session.arrived(push.seq, push.slot, message=message)
        if whole is not None:
            self._decisions.push_complete(whole)

    def _on_span(self, session: WorkerSession, message: GradientSpan) -> None:
        self._decisions.check_due(session.name, message.seq)
        whole = session.arrived(message.seq, message.slot, span=message.span)
        if whole is not None:
            self._decisions.push_complete(whole)


@dataclass(frozen=True)
class ServerEvents:
    """What a server tells its owner."""

    unreachable: Callable[[str], None] = lambda peer: None
    """The link to a server is lost, and no view comes without it."""
    refused: Callable[[str, str], None] = lambda who, why: None
    """A member has broken the protocol, and how."""
    failed: OnError = lambda error: None
    """The server has failed, in one of its threads; the error is in `error` by then."""


@dataclass(frozen=True)
class ServerView:
    """The view that a server is in."""

    number: int
    servers: Sequence[str]
    workers: Sequence[str]


class Server:
    def __init__(
        self,
        server_state: ServerState,
        mode: PsMode,
        listener: Listener,
        view: ServerView,
        *,
        local: Mapping[str, Sequence[FlatTensors]],
        rounds: tuple[RoundTable, Doorbell] | None = None,
        events: ServerEvents | None = None,
    ) -> None:
        """`local`: gradients of a worker in this process. `rounds`: where rounds are agreed on, if not by
        messages."""
        self.address = listener.address
        self.server_state = server_state
        self.error: BaseException | None = None
        self.begun = threading.Event()
        self.followed: Callable[[], None] = lambda: None
        """Called when replicas here are newer."""
        self._events = events or ServerEvents()
        self._frozen = False
        self._early: list[InboxItem] = []
        """What came before the view has begun."""
        self._service: ViewService | None = None
        self._lock = threading.RLock()
        """Held by the thread that works on the blocks: this server's, or a worker's in rounds."""
        self._make_service: Callable[..., ViewService] | None = partial(
            make_service, server_state, mode, view, local=local, rounds=rounds
        )
        admission = Admission(
            self.name,
            view=view.number,
            servers=view.servers,
            workers=view.workers,
            identified=not server_state.shared,
        )
        self._acceptor = Acceptor(
            *(self.name, listener, admission),
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
        """Rounds in shared memory, where the view has them; begun with the view."""
        return self._service.rounds if self._service is not None else None

    def meet(self, dial: Callable[[str], Link]) -> None:
        """Find the other servers."""
        self._view_change.meet(dial)

    def freeze(self, alive: Sequence[str] = ()) -> None:
        """End the view. What the dead have sent is heard to its end; then all links close."""
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
        while (happened := self._acceptor.inbox.get()) is not None:
            self._hear(happened)
            happened.heard()

    def _fail(self, error: BaseException) -> None:
        """One of the server's threads has failed: members that depend on it must not wait for it."""
        if self.error is None:
            self.error = error
        logger.error("%s failed", self.name, exc_info=error)
        self.begun.set()
        if self._service is not None:
            self._service.sessions.close()
        self._events.failed(error)

    def _hear(self, happened: InboxItem) -> None:
        try:
            with self._lock:
                if happened.by_worker:
                    self._hear_worker(happened)
                else:
                    self._hear_server(happened)
        except ProtocolError as why:
            # A member that breaks the protocol is not a reason to lose everybody's parameters.
            peer = self._view_change.peers.get(happened.who)
            link = happened.link or (peer.link if peer is not None else None)
            assert link is not None
            self._acceptor.turn_away(link, happened.who, why)
        except LinkError as error:
            logger.info("%s: %s", self.name, error)  # a server is gone: a view without it comes

    def _hear_server(self, happened: InboxItem) -> None:
        who, message = happened.who, happened.message
        if isinstance(message, PeerDisconnected):
            self._on_disconnected(who)
        elif isinstance(message, Refused):
            logger.warning("%s was refused by %s: %s", self.name, who, message.why)
        elif isinstance(message, ViewChangeMessage | PeerDialed):
            if not self._frozen and self._view_change.handle(happened):
                self._begin()
        elif not self.begun.is_set() and not self._frozen:
            if len(self._early) >= MAX_EARLY:
                raise ProtocolError(f"{MAX_EARLY} messages before the view has begun")
            self._early.append(happened)
        elif self._service is not None and not (self._frozen and isinstance(message, PushReceived)):
            self._service.handle_server(who, message)

    def _hear_worker(self, happened: InboxItem) -> None:
        if self._frozen:
            return
        if self._service is not None:
            self._service.handle_worker(happened)
            return
        if not isinstance(happened.message, EnterView):
            raise ProtocolError(f"{kind_of(happened.message)!r} before the view has begun")
        for before in [h for h in self._early if h.by_worker and h.who == happened.who]:
            self._early.remove(before)
            if before.link is not None:
                before.link.close()
        self._early.append(happened)

    def _on_disconnected(self, who: str) -> None:
        """Mostly its process is dead, and the next view is on its way. If not, ask for one."""

        def ask() -> None:
            if not self._frozen:
                self._events.unreachable(who)

        start_timer(TORN_S, ask, name=f"{self.name}-torn", on_error=self._fail)

    def _begin(self) -> None:
        """The view has begun: build what serves it, and hear what came early."""
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
        for happened in early:
            self._hear(happened)

    def _place(self, who: str, message: object) -> memoryview | None:
        """Where the payload of a message goes: sums and gradients are received in place."""
        service = self._service
        if isinstance(message, ReplicaSum):
            if message.span is None:
                return None
            if service is None:
                raise ProtocolError("a sum before the view has begun")
            return service.exchange.buffer_for(who, message.version, message.span)
        if service is None:
            raise ProtocolError(f"{kind_of(message)!r} of {who}, who has not entered")
        return service.sessions.buffer_for(who, message)


def make_service(
    state: ServerState,
    mode: PsMode,
    view: ServerView,
    plan: RecoveryPlan,
    peers: Mapping[str, Peer],
    *,
    local: Mapping[str, Sequence[FlatTensors]],
    rounds: tuple[RoundTable, Doorbell] | None,
    lock: AbstractContextManager[Any],
    followed: Callable[[], None],
    refuse: Refuse,
    on_error: OnError,
) -> ViewService:
    """Choose, once per view, how pushes become decisions and how servers exchange updates."""
    placement, leads = state.placement, view.servers[0] == state.name
    state.attach_sums({name: peer.sums or () for name, peer in peers.items()})
    if state.rows is not None:
        state.rows.meet({name: peer.undo[0] for name, peer in peers.items() if peer.undo})
    if state.shared or not state.replicas or not peers:
        exchange = MessageExchange(state, mode, placement, peers)
    else:
        exchange = NetworkExchange(
            *(state, mode, placement, peers),
            followed=followed,
        )
    sessions = WorkerSessions(
        *(state, mode, plan, peers), first_worker=view.workers[0], local=local
    )
    updates = UpdatePipeline(
        *(state, mode, exchange), applied=sessions.tell_update, compensation=sessions.compensation
    )
    decisions = _make_decisions(state, mode, view, peers, updates, sessions, refuse)
    sessions.permit = decisions.permit
    round_server = None
    if rounds is not None:
        round_server = RoundServer(*rounds, state, mode, placement, lock=lock)
        round_server.start(colocated=state.name in view.workers, on_error=on_error)
    return ViewService(state, sessions, exchange, updates, decisions, round_server, leads=leads)


def _make_decisions(
    state: ServerState,
    mode: PsMode,
    view: ServerView,
    peers: Mapping[str, Peer],
    updates: UpdatePipeline,
    sessions: WorkerSessions,
    refuse: Refuse,
) -> Decisions:
    lead, name = view.servers[0], state.name
    if name != lead and not mode.for_all:
        return FollowerDecisions(state, updates, peers[lead])
    alone = state.shared or mode.for_all
    decider = Decider(
        mode.make_policy(view.workers),
        state.ledger,
        servers=[name] if alone else view.servers,
        lr_rule=mode.lr_rule,
        by_part=not mode.rounds,
    )
    common = (decider, updates, sessions.by_name)
    if mode.for_all:
        return OwnDecisions(*common, name=name, leads=name == lead, refuse=refuse)
    return LeadDecisions(
        *common,
        name=name,
        peers=peers,
        workers=view.workers,
        rounds=mode.rounds,
        refuse=refuse,
    )
