"""A parameter server in one view: adds up what workers push, runs the optimizer, tells the news.

One thread owns everything; readers, one a connection, only put what arrived into its inbox. So no block
has two writers, and no lock is held while numbers are added. A server lives as long as its view; what
outlives it is in its ServerState. Its messages are in protocol.py; how a view begins is in view_change.py.

Where an update is everybody's gradients, each server knows by itself what is next, and nobody says had or
decide. Cost a step and worker inside a host: one message to the lead and one from each server. Between
hosts gradients out and parameters back once each; to a worker that keeps replicas their sums go instead.
"""

from __future__ import annotations

import logging
import threading
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

from manyhands.errors import LinkError, ManyhandsError, ProtocolError
from manyhands.hosts.view import TORN_S
from manyhands.ps.acceptor import Acceptor, Admission, InboxItem, PeerDisconnected
from manyhands.ps.block_store import FlatTensors, Span
from manyhands.ps.blocks import order_needed
from manyhands.ps.channels import SendGate
from manyhands.ps.decider import MAX_UNDER_WAY, Decider, StartPermit
from manyhands.ps.ledger import Contribution, Decision
from manyhands.ps.mode import PsMode
from manyhands.ps.placement import Placement
from manyhands.ps.protocol import (
    BETWEEN_SERVERS,
    AppliedPush,
    AskMissing,
    Decide,
    EnterView,
    GradientRun,
    MissingWorkers,
    NewVersion,
    OpenLane,
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
    TableStateRequest,
    ViewBegun,
    Wake,
    WeightsUnknown,
    kind_of,
)
from manyhands.ps.rounds import Doorbell, RoundServer, RoundTable
from manyhands.ps.rows import ColocatedRows
from manyhands.ps.server_state import ServerState, travelling
from manyhands.ps.tensor_messages import pack
from manyhands.ps.updates import Message as UpdateMessage
from manyhands.ps.updates import (
    MessageExchange,
    NetworkExchange,
    UpdatePipeline,
    check_decision,
)
from manyhands.ps.view_change import Message as ViewChangeMessage
from manyhands.ps.view_change import PeerDialed, ViewChange
from manyhands.ps.worker_session import WorkerSession, find_slots
from manyhands.threads import OnError, start_thread, start_timer
from manyhands.transport import Link, Listener

logger = logging.getLogger("manyhands.ps")

MAX_AHEAD = 2 * MAX_UNDER_WAY
"""Steps that a push may be ahead of the one that is due."""
MAX_EARLY = 4096
"""Messages that are kept until the view has begun."""


class Server:
    def __init__(
        self,
        server_state: ServerState,
        mode: PsMode,
        listener: Listener,
        *,
        view: int,
        servers: Sequence[str],
        workers: Sequence[str],
        local: Mapping[str, Sequence[FlatTensors]],
        identified: bool,
        rounds: tuple[RoundTable, Doorbell] | None = None,
        torn: Callable[[str], None] = lambda peer: None,
        refused: Callable[[str, str], None] = lambda who, why: None,
        send_gate: SendGate | None = None,
        on_error: OnError = lambda error: None,
    ) -> None:
        """`local`: gradients of a worker in this very process. `identified`: see Door. `rounds`: where
        rounds are agreed on, if not by messages. `torn`: told of a server whose link is lost though
        no view comes without it. `refused`: told of a member that talks nonsense, and what it was.
        `on_error`: called when the server fails, in whichever of its threads it does; the error is in
        `error` by then."""
        self.name = server_state.name
        self.address = listener.address
        self.server_state = server_state
        self.error: BaseException | None = None
        self.begun = threading.Event()
        self._mode = mode
        self._servers, self._workers = list(servers), list(workers)
        self._num_statistics = sum(b.numel() for b in server_state.train_state.model.buffers())
        self._frozen, self._local = False, local
        self._torn, self._send_gate, self._on_error = torn, send_gate, on_error
        self._statistics: tuple[Statistics, memoryview | None] | None = None
        """What the first worker told the others last."""
        self._sessions: dict[str, WorkerSession] = {}
        self._partial_sums: list[InboxItem] = []
        self.followed: Callable[[], None] = lambda: None
        """Called when replicas that are kept here are newer."""
        self._decider: Decider | None = None
        """Says what is applied next: at the lead, or at every server, where all come to the same."""
        self._lead: Decider | None = None
        self._order: list[int] = []
        self._runs: list[Span] = []
        """This server's blocks as they travel."""
        self._keepers: list[str | None] = []
        """For each of them, the server that has its replica."""
        self._exchange: MessageExchange | None = None
        self._updates: UpdatePipeline | None = None
        self._meeting = rounds
        self.rounds: RoundServer | None = None
        """Rounds in shared memory, where the view has them; begun with the view."""
        self._turn = threading.RLock()
        """Held by whoever works on the blocks: this server's thread, or a worker who serves."""
        self._told_sent = 0
        self._told: dict[str, int | None] = {}
        self._acceptor = Acceptor(
            self.name,
            listener,
            Admission(
                self.name, view=view, servers=servers, workers=workers, identified=identified
            ),
            place=self._place,
            on_error=self._fail,
            refused=refused,
        )
        self._view_change = ViewChange(server_state, self._acceptor, view=view, servers=servers)
        self._thread = start_thread(self._serve, name=f"{self.name}-serve", on_error=self._fail)

    def meet(self, dial: Callable[[str], Link]) -> None:
        """Find the other servers."""
        self._view_change.meet(dial)

    @property
    def bytes_sent(self) -> int:
        """Over the network, to workers and servers."""
        if self.server_state.shared:
            return 0
        sessions = sum(session.bytes_sent for session in list(self._sessions.values()))
        return sessions + sum(
            peer.link.bytes_sent for peer in list(self._view_change.peers.values())
        )

    def freeze(self, alive: Sequence[str] = ()) -> None:
        """The view is over. What the dead have sent is heard to its end; then all links close."""
        self._frozen = True
        if self._exchange is not None:
            self._exchange.close()
        if self.rounds is not None:
            self.rounds.freeze()
        self._acceptor.close()
        for name, peer in list(self._view_change.peers.items()):
            if name not in alive:
                self._acceptor.drain(peer.link, timeout_s=2.0)
            peer.link.close()
        self._acceptor.inbox.put(None)
        for session in list(self._sessions.values()):
            session.close()  # else the thread might wait for one that does not read
        self._thread.join(timeout=30.0)
        if self._thread.is_alive():
            raise ManyhandsError(f"{self.name} did not come to rest within 30 s.")
        with self._turn:
            if self.rounds is not None:
                self.rounds.stop()
            self.rounds = self._updates = self._exchange = self._meeting = None
            self._sessions.clear()  # with these, memory of others is let go

    @property
    def near(self) -> ColocatedRows | None:
        """Rows of tables, for the worker of this very process."""
        rows = self.server_state.rows
        return ColocatedRows(self.name, rows, self._turn) if rows is not None else None

    # In the server's thread ---------------------------------------------------------------------

    def _serve(self) -> None:
        while (happened := self._acceptor.inbox.get()) is not None:
            self._hear(happened)
            happened.heard()

    def _fail(self, error: BaseException) -> None:
        """One of its threads has: whoever depends on this server must not wait for it."""
        if self.error is None:
            self.error = error
        logger.error("%s failed", self.name, exc_info=error)
        self.begun.set()
        for session in list(self._sessions.values()):
            session.close()
        self._on_error(error)

    def _hear(self, happened: InboxItem) -> None:
        try:
            with self._turn:
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
            self._on_torn(who)
        elif isinstance(message, Refused):
            logger.warning("%s was refused by %s: %s", self.name, who, message.why)
        elif isinstance(message, ViewChangeMessage | PeerDialed):
            if not self._frozen and self._view_change.handle(happened):
                self._begin()
        elif not self.begun.is_set() and not self._frozen:
            if len(self._partial_sums) >= MAX_EARLY:
                raise ProtocolError(f"{MAX_EARLY} messages before the view has begun")
            self._partial_sums.append(happened)
        elif isinstance(message, UpdateMessage):
            if self._exchange is not None and self._updates is not None:
                self._exchange.handle(who, message)
                self._updates.advance()
        elif isinstance(message, Decide):
            if who != self._servers[0] or self._mode.for_all:
                raise ProtocolError("a decision from a server that does not decide")
            if self._updates is not None:
                next_is = self._updates.decided + 1
                check_decision(self.server_state, message.decision, next_is=next_is)
                self._updates.enqueue(message.decision)
        elif isinstance(message, PushReceived):
            if self._lead is None or self._mode.for_all:
                raise ProtocolError("'had', which is for a lead that decides")
            worker = message.push.push.worker
            if worker not in self._workers:
                raise ProtocolError(f"a push of {worker[:80]!r}, who is no worker here")
            self._on_had(who, message.push)

    def _on_torn(self, who: str) -> None:
        """Mostly its process is dead, and the next view is on its way. If not, somebody must ask for it."""

        def ask() -> None:
            if not self._frozen:
                self._torn(who)

        start_timer(TORN_S, ask, name=f"{self.name}-torn", on_error=self._fail)

    def _hear_worker(self, happened: InboxItem) -> None:
        who, message, link = happened.who, happened.message, happened.link
        assert link is not None
        if self._frozen:
            return
        if not self.begun.is_set():
            if not isinstance(message, EnterView):
                raise ProtocolError(f"{kind_of(message)!r} before the view has begun")
            for before in [h for h in self._partial_sums if h.by_worker and h.who == who]:
                self._partial_sums.remove(before)
                if before.link is not None:
                    before.link.close()
            self._partial_sums.append(happened)
            return
        if isinstance(message, EnterView):
            version = self.server_state.ledger.version
            if message.seen > version:
                raise WeightsUnknown(
                    f"{who} has seen version {message.seen}, and here is {version}: "
                    "all who held the parameters are gone, and what was learnt is lost"
                )
            self._on_enter(who, link, message)
            return
        session = self._sessions.get(who)
        if session is None:
            raise ProtocolError(f"{kind_of(message)!r} of {who}, who has not entered")
        match message:
            case PushMessage() | GradientRun() if self.rounds is not None:
                raise ProtocolError("a push as a message, where rounds use shared memory")
            case PushMessage():
                self._on_push(session, message)
            case GradientRun():
                self._on_run(session, message)
            case OpenLane():
                if session.add_lane(link):
                    self._send_runs(session)
            case StateRequest():
                self._tell_state(session)
            case PullRequest():
                self._tell_now(session)
            case RowGradients() | RowsRequest() | TableStateRequest():
                rows = self.server_state.rows
                if rows is None:
                    raise ProtocolError(f"{kind_of(message)!r} without tables")
                session.tell_all(rows.hear(who, message, happened.payload, done=session.done))
            case _:
                self._on_message_to_lead(session, message, happened.payload)

    # A view begins -----------------------------------------------------------------------------

    def _begin(self) -> None:
        server_state, plan = self.server_state, self._view_change.plan
        assert plan is not None
        placement, layout = plan.placement, server_state.layout
        server_state.attach_sums({n: p.sums or () for n, p in self._view_change.peers.items()})
        self._exchange = self._make_exchange(placement)
        self._updates = UpdatePipeline(
            server_state, self._mode, self._exchange, applied=self._tell_news
        )
        self._runs, self._keepers = travelling(placement, self.name)
        runs = self._runs
        first_need = {block.number: i for i, block in enumerate(order_needed(layout))}
        self._order = sorted(range(len(runs)), key=lambda i: first_need[runs[i].blocks[0].number])
        if self._meeting is not None:
            self.rounds = RoundServer(
                *self._meeting, server_state, self._mode, placement, lock=self._turn
            )
            self.rounds.start(colocated=self.name in self._workers, on_error=self._fail)
        if server_state.rows is not None:
            server_state.rows.meet(
                {n: p.undo[0] for n, p in self._view_change.peers.items() if p.undo}
            )
        if self._view_change.leads or self._mode.for_all:
            alone = server_state.shared or self._mode.for_all
            self._decider = Decider(
                self._mode.make_policy(self._workers),
                server_state.ledger,
                servers=[self.name] if alone else self._servers,
                lr_rule=self._mode.lr_rule,
                by_part=not self._mode.rounds,
            )
        if self._view_change.leads:
            self._lead = self._decider
        self.begun.set()
        partial_sums, self._partial_sums = self._partial_sums, []
        for happened in partial_sums:
            self._hear(happened)

    def _make_exchange(self, placement: Placement) -> MessageExchange:
        state, mode, peers = self.server_state, self._mode, self._view_change.peers
        if state.shared or not state.replicas or not peers:
            return MessageExchange(state, mode, placement, peers)
        return NetworkExchange(
            *(state, mode, placement, peers),
            workers=self._workers,
            followed=lambda: self.followed(),
            send_gate=self._send_gate,
        )

    def _on_enter(self, who: str, link: Link, message: EnterView) -> None:
        addresses = message.slots
        updates, plan, ledger = self._updates, self._view_change.plan, self.server_state.ledger
        assert updates is not None
        assert plan is not None
        if (session := self._sessions.get(who)) is not None:
            session.enter_again(link)
        else:
            slots = self._local.get(who) or find_slots(
                self.server_state.params,
                addresses,
                self._mode.slots,
                shared=self.server_state.shared,
            )
            travels = who not in self._local and not addresses
            session = WorkerSession(who, link, slots, travels=travels, runs=self._runs)
            session.wants = [i for i in self._order if self._keepers[i] != who]
            self._sessions[who] = session
            self.server_state.gradients[who] = slots
            if (rows := self.server_state.rows) is not None:
                rows.enter(who, message.baskets, self._mode.slots)
            elif message.baskets:
                raise ProtocolError("baskets without tables")
            if updates.compensation is not None:
                updates.compensation.remember(who, self.server_state.own)
        last = list(ledger.decisions)[-1:]
        session.tell(
            ViewBegun(
                ledger.version,
                ledger.ticks,
                done=session.done,
                late=session.late,
                last=[(each.step, each.part) for d in last for each in d.contributions],
                travels=session.travels,
                placement=plan.placement.to_record(),
                homes=plan.homes,
                permit=self._permit(who),
            )
        )
        if self._statistics is not None:
            session.tell(*self._statistics)  # what was told while it had no connection

    # From a push to a decision -----------------------------------------------------------------

    def _on_push(self, session: WorkerSession, message: PushMessage) -> None:
        if message.began > self.server_state.ledger.version:
            raise ProtocolError(f"a push on version {message.began}, which does not exist yet")
        push = message.push
        self._check_due(session, push.seq)
        whole = session.arrived(push.seq, push.slot, message=message)
        if not session.travels:
            assert self._exchange is not None
            self._exchange.arrived(session.name, push.seq, push.slot, None)
        self._push_complete(whole)

    def _on_run(self, session: WorkerSession, message: GradientRun) -> None:
        self._check_due(session, message.seq)
        whole = session.arrived(message.seq, message.slot, run=message.run)
        assert self._exchange is not None
        self._exchange.arrived(session.name, message.seq, message.slot, message.run)
        self._push_complete(whole)

    def _check_due(self, session: WorkerSession, seq: int) -> None:
        if self._decider is not None:
            due = self._decider.word(session.name).at
            if seq > due + MAX_AHEAD:
                raise ProtocolError(f"a push of step {seq}, where step {due} is due")

    def _push_complete(self, message: PushMessage | None) -> None:
        if message is None:
            return
        if self._decider is not None:
            self._on_had(self.name, message)
        else:
            lead = self._view_change.peers[self._servers[0]]
            lead.link.send(BETWEEN_SERVERS.write(PushReceived(message)))

    def _on_had(self, server: str, message: PushMessage) -> None:
        if self._frozen:
            return
        assert self._decider is not None
        push = message.push
        try:
            self._decider.had(server, push, began=message.began, after=message.after)
        except ValueError as error:
            if (session := self._sessions.get(push.worker)) is not None:
                self._acceptor.turn_away(session.link, push.worker, ProtocolError(str(error)))
        self._decide()

    def _on_message_to_lead(
        self, session: WorkerSession, message: object, payload: memoryview | None
    ) -> None:
        lead, who = self._lead, session.name
        if lead is None:
            raise ProtocolError(f"{kind_of(message)!r}, which is for the leader")
        match message:
            case PushesEnd():
                lead.ends(who)
                self._decide()
            case Rest():
                lead.rest(who)
                self._decide()
            case Wake():
                lead.wake(who)
                session.tell(PermitMessage(self._permit(who)))
            case AskMissing(seq):
                session.tell(MissingWorkers(lead.waiting_for(who, seq + 1)))
            case Statistics():
                self._statistics = (message, payload)
                for name, other in self._sessions.items():
                    if name != who:
                        other.tell(message, payload)

    def _decide(self) -> None:
        decider = self._decider
        assert decider is not None
        assert self._updates is not None
        for decision in decider.decisions():
            if not self._mode.for_all:
                head = BETWEEN_SERVERS.write(Decide(decision))
                for peer in self._view_change.peers.values():
                    with suppress(LinkError):  # it is gone, and the others must know all the same
                        peer.link.send(head)
            self._updates.enqueue(decision)
        if (lead := self._lead) is None:
            return
        for push in lead.late():
            if (session := self._sessions.get(push.worker)) is not None:
                session.late = [*session.late[-7:], push.seq]
                session.tell(PushDropped(push.seq, self._permit(push.worker)))
        stragglers = set(lead.stragglers())
        for name, session in self._sessions.items():
            news = not self._mode.rounds and name not in lead.resting
            if name in stragglers or (news and lead.word(name).until != self._told.get(name)):
                session.tell(PermitMessage(self._permit(name)))

    def _permit(self, who: str) -> StartPermit | None:
        if self._lead is None or who in self._lead.resting:
            return None
        permit = self._lead.word(who)
        self._told[who] = permit.until
        return permit

    # News --------------------------------------------------------------------------------------

    def _tell_news(self, decision: Decision, lr: float) -> None:
        own: dict[str, list[AppliedPush]] = defaultdict(list)
        for each in decision.contributions:
            applied = AppliedPush(each.seq, each.staleness, self._rate(decision, each, lr))
            own[each.worker].append(applied)
            if (session := self._sessions.get(each.worker)) is not None:
                session.done = max(session.done, each.seq)
        told = (
            list(self._sessions) if self._mode.rounds else [n for n in own if n in self._sessions]
        )
        for name in told:
            session = self._sessions[name]
            if self._updates is not None and self._updates.compensation is not None:
                self._updates.compensation.remember(name, self.server_state.own)
            sent = 0
            if name == self._workers[0]:
                sent, self._told_sent = self.bytes_sent - self._told_sent, self.bytes_sent
            permit = self._permit(name)
            session.tell(
                NewVersion(decision.version, decision.ticks, own.get(name, ()), sent, permit=permit)
            )
            self._send_runs(session)

    def _rate(self, decision: Decision, given: Contribution, lr: float) -> float:
        """The learning rate that a push was applied with, as that of a whole step."""
        rate, (part, whole) = lr * decision.lr_scale, given.share
        return rate if self._mode.rounds or not part else rate * whole / part

    def _tell_now(self, session: WorkerSession) -> None:
        ledger = self.server_state.ledger
        session.tell(NewVersion(ledger.version, ledger.ticks, pulled=True))
        self._send_runs(session)

    def _send_runs(self, session: WorkerSession) -> None:
        if session.travels:
            session.send_runs(self.server_state.ledger.version, self.server_state.params)

    def _place(self, who: str, message: object) -> memoryview | None:
        """Gradients and sums are received straight into the memory that they are added from."""
        match message:
            case GradientRun(slot=slot, run=run):
                if (session := self._sessions.get(who)) is None:
                    raise ProtocolError(f"a run of {who}, who has not entered")
                return session.room(slot, run)
            case RowGradients(bytes=count) | RowsRequest(bytes=count):
                return memoryview(bytearray(count))
            case Statistics():
                if who != self._workers[0]:
                    raise ProtocolError("statistics, which only the first worker sends")
                return memoryview(bytearray(8 * self._num_statistics))
            case ReplicaSum(version, int(run)):
                if self._exchange is None:
                    raise ProtocolError("a sum before the view has begun")
                return self._exchange.buffer_for(who, version, run)
        return None

    # What is asked -----------------------------------------------------------------------------

    def _tell_state(self, session: WorkerSession) -> None:
        own = self.server_state.held.own
        assert own is not None
        for number in own.numbers:
            session.tell_all(pack(number, own.take(number), params=False))
        session.tell(StateEnd("state"))
