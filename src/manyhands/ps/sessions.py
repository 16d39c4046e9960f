"""A server's links to the members of its view: the messages that it receives and sends.

    Peer                        another server
    PeerReader, WorkerReader    put the messages of one link into the server's inbox
    WorkerSession               one worker: its links, its gradients, and which of its pushes have arrived
    WorkerSessions              the workers that have entered the view, and what they are told of updates

Readers run in the threads of event loops; everything else is used by the server's thread alone. A reader
begins when the first message of its link has been accepted (acceptor.py). A member that breaks the protocol
gets the reason, and its link is closed.
"""

from __future__ import annotations

import queue
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from manyhands.errors import LinkError, ManyhandsError, ProtocolError
from manyhands.ps.block_store import FlatTensors, bytes_of
from manyhands.ps.blocks import order_needed
from manyhands.ps.compensation import Compensation
from manyhands.ps.mode import PsMode
from manyhands.ps.policies import Contribution, Decision, StartPermit
from manyhands.ps.protocol import (
    BETWEEN_SERVERS,
    FROM_DATA_LINK,
    FROM_WORKER,
    AppliedPush,
    EnterView,
    GradientSpan,
    NewVersion,
    ParameterSpan,
    PushMessage,
    Refused,
    ReplicaSum,
    RowGradients,
    RowsRequest,
    StateEnd,
    Statistics,
    TensorMessage,
    ViewBegun,
    WeightsUnknown,
)
from manyhands.ps.recovery_plan import RecoveryPlan
from manyhands.ps.server_state import ServerState
from manyhands.ps.spans import Span, travelling
from manyhands.ps.tensor_messages import pack
from manyhands.transport import Link, Received
from manyhands.transport.event_loop import DATA_LINKS, LinkReader, PriorityChannel
from manyhands.transport.fields import kind_of

MAX_UNHANDLED = 64
"""Messages of one worker's link in the inbox; a worker has a handful in flight. No more are read until some
were handled."""
MAX_ARRIVING = 8
"""Limit for partly received pushes of one worker; it has at most two in flight."""

Place = Callable[[str, Any], memoryview | None]
"""(sender, message) to the memory for its payload; None: new memory."""


@dataclass
class Peer:
    """Another server of this view."""

    name: str
    link: Link
    sums: Sequence[str] | None = None
    """The addresses of its sums in shared memory; None: not known yet."""
    undo: Sequence[str] = ()
    """The address of its undo log of table rows; empty if it changes none."""


@dataclass(frozen=True)
class InboxItem:
    """Item for the server's thread: a message and its sender."""

    sender: str
    message: Any
    """One of protocol.py, or one that this process puts in itself."""
    payload: memoryview | None = None
    link: Link | None = None
    """The link that it came from, of a first message and of all messages of workers."""
    by_worker: bool = False
    """If true, it came over a worker's link; a member of that name may be a server too."""
    handled: Callable[[], None] = lambda: None
    """Called when the server's thread has handled it."""


Inbox = queue.SimpleQueue[InboxItem | None]


# Reading ------------------------------------------------------------------------------------------


class PeerReader:
    """Reads the messages of another server."""

    messages = BETWEEN_SERVERS

    def __init__(
        self, sender: str, link: Link, reader: LinkReader, *, inbox: Inbox, place: Place
    ) -> None:
        self._sender, self._link = sender, link
        self._reader = reader
        self._inbox = inbox
        self._place_of = place
        reader.handle_with(self.messages, self._on_message, self._place)

    def _place(self, message: Any, nbytes: int) -> memoryview | None:
        self._check(message, payload=True)
        memory = self._place_of(self._sender, message)
        if memory is not None and memory.nbytes != nbytes:
            raise ProtocolError(f"{kind_of(message)!r} with a payload of {nbytes} bytes")
        return memory

    def _on_message(self, received: Received) -> None:
        self._inbox.put(InboxItem(self._sender, received.message, received.payload))

    def _check(self, message: Any, *, payload: bool) -> None:
        if payload and not isinstance(message, ReplicaSum | TensorMessage):
            raise ProtocolError(f"{kind_of(message)!r} with a payload")


class WorkerReader(PeerReader):
    """Reads a worker's messages, no faster than the server's thread handles them."""

    messages = FROM_WORKER

    def __init__(
        self, sender: str, link: Link, reader: LinkReader, *, inbox: Inbox, place: Place
    ) -> None:
        super().__init__(sender, link, reader, inbox=inbox, place=place)
        self._num_unhandled = 0
        self._lock = threading.Lock()

    def _on_message(self, received: Received) -> None:
        message, payload = received
        if payload is None:
            self._check(message, payload=False)
        with self._lock:
            self._num_unhandled += 1
            full = self._num_unhandled >= MAX_UNHANDLED
        item = InboxItem(self._sender, message, payload, self._link, True, self._handled)
        self._inbox.put(item)
        if full:
            self._reader.pause()

    def _handled(self) -> None:
        """Resume reading if the inbox has space again. In the server's thread."""
        with self._lock:
            self._num_unhandled -= 1
            was_full = self._num_unhandled == MAX_UNHANDLED - 1
        if was_full:
            self._reader.resume()

    def _check(self, message: Any, *, payload: bool) -> None:
        if payload != isinstance(message, GradientSpan | Statistics | RowGradients | RowsRequest):
            raise ProtocolError(f"{kind_of(message)!r} with{'' if payload else 'out'} a payload")
        if isinstance(message, PushMessage):
            check_push(message, self._sender)


class DataLinkReader(WorkerReader):
    """Reads a worker's bulk data."""

    messages = FROM_DATA_LINK


def check_push(message: PushMessage, worker: str) -> None:
    """Check that a worker may have made this push."""
    push = message.push
    if push.worker != worker:
        raise ProtocolError(f"a push of {push.worker[:80]!r}, sent by {worker}")
    if push.staleness or push.scale > 1:
        raise ProtocolError(f"a push with staleness {push.staleness} and scale {push.scale}")
    if message.after >= push.seq:
        raise ProtocolError(f"push {push.seq} after push {message.after}")


def refusal(why: ManyhandsError) -> Refused:
    """Return the last message to a member that broke the protocol."""
    return Refused(str(why), isinstance(why, WeightsUnknown))


# One worker ---------------------------------------------------------------------------------------


class WorkerSession:
    """A worker whose gradients are in memory that this server can read."""

    travels = False
    """If true, gradients and parameters are sent over data links."""

    def __init__(self, name: str, link: Link, slots: Sequence[FlatTensors]) -> None:
        """`slots`: its gradients."""
        self.name = name
        self.slots = slots
        self.done = 0
        """Its last push that is in the weights of this server."""
        self.late: list[int] = []
        """Its last pushes that were dropped."""
        self.link = link
        self._sent_before = 0

    @property
    def bytes_sent(self) -> int:
        return self._sent_before + self.link.bytes_sent

    def enter_again(self, link: Link) -> None:
        """Replace the links of a worker that reconnects."""
        self.close()
        self._sent_before = self.bytes_sent
        self.link = link

    def add_data_link(self, link: Link) -> bool:
        """Add a link for bulk data. Returns whether all are here."""
        raise ProtocolError(f"{self.name} needs no more data links")

    def send(self, message: Any, payload: memoryview | None = None) -> None:
        """Send a message."""
        try:
            self.link.send(message, payload)
        except LinkError:
            pass  # it is gone, or reconnects and asks again

    def send_all(self, messages: Iterable[tuple[Any, memoryview | None]]) -> None:
        for message, payload in messages:
            self.send(message, payload)

    def send_params(self, version: int, params: FlatTensors) -> None:
        """Send the parameters, unless the worker reads them in place."""
        return

    def buffer_for(self, slot: int, i: int) -> memoryview:
        """Return the memory for a span of a gradient."""
        raise ProtocolError(f"span {i} of a gradient that is in shared memory")

    def push_arrived(self, message: PushMessage) -> PushMessage | None:
        """Note the message of a push. Returns it once all of the push is here."""
        self._check_slot(message.push.slot)
        return message if message.push.seq > self.done else None

    def span_arrived(self, message: GradientSpan) -> PushMessage | None:
        """Note a span of a push. Returns the message of the push once all of it is here."""
        raise ProtocolError(f"span {message.span} of a gradient that is in shared memory")

    def close(self) -> None:
        self.link.close()

    def _check_slot(self, slot: int) -> None:
        if not 0 <= slot < len(self.slots):
            raise ProtocolError(f"slot {slot} of a worker with {len(self.slots)}")


@dataclass
class IncomingPush:
    """A push that is partly received."""

    slot: int
    message: PushMessage | None = None
    spans: set[int] = field(default_factory=set)


class RemoteSession(WorkerSession):
    """A worker that sends its gradients in spans, and is sent the parameters likewise."""

    travels = True

    def __init__(
        self,
        name: str,
        link: Link,
        slots: Sequence[FlatTensors],
        *,
        spans: Sequence[Span],
        wants: Sequence[int],
    ) -> None:
        """`wants`: the spans of parameters to send, in the order in which the worker needs them."""
        super().__init__(name, link, slots)
        self._spans, self._wants = spans, wants
        self._data_links: list[Link] = []
        self._channel: PriorityChannel | None = None
        self._arriving: dict[int, IncomingPush] = {}

    @property
    def bytes_sent(self) -> int:
        return super().bytes_sent + sum(link.bytes_sent for link in self._data_links)

    def enter_again(self, link: Link) -> None:
        super().enter_again(link)
        self._channel, self._data_links = None, []

    def add_data_link(self, link: Link) -> bool:
        if len(self._data_links) == DATA_LINKS:
            return super().add_data_link(link)
        self._data_links.append(link)
        if len(self._data_links) < DATA_LINKS:
            return False
        self._channel = PriorityChannel(self._data_links)
        return True

    def send_params(self, version: int, params: FlatTensors) -> None:
        if self._channel is None:
            return
        for priority, i in enumerate(self._wants):
            span = bytes_of(self._spans[i].of(params))
            self._channel.put(priority, ParameterSpan(version, i), span)

    def buffer_for(self, slot: int, i: int) -> memoryview:
        self._check_slot(slot)
        if not 0 <= i < len(self._spans):
            raise ProtocolError(f"span {i} of {len(self._spans)}")
        return bytes_of(self._spans[i].of(self.slots[slot]))

    def push_arrived(self, message: PushMessage) -> PushMessage | None:
        if super().push_arrived(message) is None:
            return None
        arriving = self._arriving_push(message.push.seq, message.push.slot)
        arriving.message = message
        return self._if_complete(message.push.seq, arriving)

    def span_arrived(self, message: GradientSpan) -> PushMessage | None:
        if message.seq <= self.done:
            return None
        arriving = self._arriving_push(message.seq, message.slot)
        arriving.spans.add(message.span)
        return self._if_complete(message.seq, arriving)

    def close(self) -> None:
        super().close()
        if self._channel is not None:
            self._channel.close()
        for link in self._data_links:
            link.close()

    def _arriving_push(self, seq: int, slot: int) -> IncomingPush:
        if (arriving := self._arriving.get(seq)) is not None:
            if arriving.slot != slot:
                raise ProtocolError(f"push {seq} is in slot {arriving.slot}, and in {slot}")
            return arriving
        if len(self._arriving) >= MAX_ARRIVING:
            # Some may have been resolved by what came over an earlier connection.
            resolved = [s for s in self._arriving if s <= self.done or s in self.late]
            for number in resolved:
                del self._arriving[number]
            if not resolved:
                raise ProtocolError(f"push {seq} begins, and {MAX_ARRIVING} others have not ended")
        arriving = self._arriving[seq] = IncomingPush(slot)
        return arriving

    def _if_complete(self, seq: int, arriving: IncomingPush) -> PushMessage | None:
        if arriving.message is None or len(arriving.spans) < len(self._spans):
            return None
        del self._arriving[seq]
        return arriving.message


# All workers --------------------------------------------------------------------------------------


class WorkerSessions:
    """The workers that have entered: begins the view for them, and tells them of updates."""

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
        self.permit: Callable[[str], StartPermit | None] = lambda worker: None
        """Returns which step a worker may begin; None if another server tells it."""
        self.compensation = Compensation(mode.compensate) if mode.compensate else None
        self._server_state = server_state
        self._mode, self._plan, self._peers = mode, plan, peers
        self._first_worker, self._local = first_worker, local
        self._statistics: tuple[Statistics, memoryview | None] | None = None
        """The last statistics of the first worker, for the others."""
        self._reported_bytes = 0

    def enter(self, worker: str, link: Link, message: EnterView) -> None:
        """Admit a worker, which enters or reconnects."""
        ledger = self._server_state.ledger
        if message.seen > ledger.version:
            raise WeightsUnknown(
                f"{worker} has seen version {message.seen}, and this server has {ledger.version}: "
                "all servers with newer parameters are gone, so the weights are lost"
            )
        if (session := self.by_name.get(worker)) is not None:
            session.enter_again(link)
        else:
            session = self._new_session(worker, link, message)
        last = ledger.decisions[-1:]
        session.send(
            ViewBegun(
                ledger.version,
                ledger.ticks,
                done=session.done,
                late=session.late,
                last=[(each.step, each.part) for d in last for each in d.contributions],
                travels=session.travels,
                placement=self._plan.placement,
                row_placement=self._plan.row_placement,
                permit=self.permit(worker),
            )
        )
        if self._statistics is not None:
            session.send(*self._statistics)  # sent while it had no connection

    def _new_session(self, worker: str, link: Link, message: EnterView) -> WorkerSession:
        state, num_slots = self._server_state, self._mode.slots
        if worker in self._local:
            session = WorkerSession(worker, link, self._local[worker])
        elif state.shared:
            session = WorkerSession(
                worker, link, attach_slots(state.params, message.slots, num_slots)
            )
        elif message.slots:
            raise ProtocolError(f"{len(message.slots)} slots in shared memory")
        else:
            slots = [FlatTensors.private(state.layout) for _ in range(num_slots)]
            spans, wants = self._spans_for(worker)
            session = RemoteSession(worker, link, slots, spans=spans, wants=wants)
        if state.rows is not None:
            state.rows.enter(worker, message.row_grads, num_slots)
        elif message.row_grads:
            raise ProtocolError("gradients of rows without tables")
        self.by_name[worker] = session
        state.gradients[worker] = session.slots
        if self.compensation is not None:
            self.compensation.remember(worker, state.own)
        return session

    def _spans_for(self, worker: str) -> tuple[Sequence[Span], Sequence[int]]:
        """Return the spans in which this server's blocks are sent, and the indices of those that the worker
        needs, in the order of its forward. It does not need spans of which it holds replicas."""
        state = self._server_state
        spans, holders = travelling(state.placement, state.name)
        needed = {block.number: i for i, block in enumerate(order_needed(state.layout))}
        order = sorted(range(len(spans)), key=lambda i: needed[spans[i].blocks[0].number])
        return spans, [i for i in order if holders[i] != worker]

    def notify_workers(self, decision: Decision, lr: float) -> None:
        """Tell workers of an applied update: in rounds all, otherwise those whose pushes it has."""
        own: dict[str, list[AppliedPush]] = defaultdict(list)
        for each in decision.contributions:
            applied = AppliedPush(each.seq, each.staleness, self._rate(decision, each, lr))
            own[each.worker].append(applied)
            if (session := self.by_name.get(each.worker)) is not None:
                session.done = max(session.done, each.seq)
        state = self._server_state
        for name in self.by_name if self._mode.rounds else [n for n in own if n in self.by_name]:
            session = self.by_name[name]
            if self.compensation is not None:
                self.compensation.remember(name, state.own)
            sent = 0
            if name == self._first_worker:
                total = self.bytes_sent
                sent, self._reported_bytes = total - self._reported_bytes, total
            permit = self.permit(name)
            session.send(
                NewVersion(decision.version, decision.ticks, own.get(name, ()), sent, permit=permit)
            )
            session.send_params(state.ledger.version, state.params)

    def answer_pull(self, session: WorkerSession) -> None:
        state = self._server_state
        session.send(NewVersion(state.ledger.version, state.ledger.ticks, pulled=True))
        session.send_params(state.ledger.version, state.params)

    def send_state(self, session: WorkerSession) -> None:
        """Send the optimizer's state, for a checkpoint."""
        own = self._server_state.own
        for number in own.numbers:
            session.send_all(pack(number, own.take(number), params=False))
        session.send(StateEnd("state"))

    def pass_statistics(self, sender: str, message: Statistics, payload: memoryview | None) -> None:
        self._statistics = (message, payload)
        for name, other in self.by_name.items():
            if name != sender:
                other.send(message, payload)

    def buffer_for(self, worker: str, message: object) -> memoryview | None:
        """Return the memory for the payload of a worker's message. Gradients are received where they are
        added from."""
        match message:
            case GradientSpan(slot=slot, span=span):
                if (session := self.by_name.get(worker)) is None:
                    raise ProtocolError(f"a span of {worker}, which has not entered")
                return session.buffer_for(slot, span)
            case RowGradients(bytes=count) | RowsRequest(bytes=count):
                return memoryview(bytearray(count))
            case Statistics():
                if worker != self._first_worker:
                    raise ProtocolError("statistics, which only the first worker sends")
                buffers = self._server_state.train_state.model.buffers()
                return memoryview(bytearray(8 * sum(buffer.numel() for buffer in buffers)))
        return None

    @property
    def bytes_sent(self) -> int:
        """Bytes sent to workers and servers."""
        sessions = sum(session.bytes_sent for session in list(self.by_name.values()))
        return sessions + sum(peer.link.bytes_sent for peer in list(self._peers.values()))

    def close(self) -> None:
        for session in list(self.by_name.values()):
            session.close()

    def _rate(self, decision: Decision, push: Contribution, lr: float) -> float:
        """Return the learning rate that a push was applied with, as that of a whole step."""
        rate, (part, whole) = lr * decision.lr_scale, push.share
        return rate if self._mode.rounds or not part else rate * whole / part


def attach_slots(
    params: FlatTensors, addresses: Sequence[str], count: int
) -> Sequence[FlatTensors]:
    """Attach the gradients of a worker in shared memory."""
    if len(addresses) != count:
        raise ProtocolError(f"{len(addresses)} slots in shared memory")
    try:
        slots = [FlatTensors.attached(params.layout, address) for address in addresses]
    except (LinkError, OSError, ValueError, RuntimeError) as error:
        raise ProtocolError(f"slots that do not exist: {error}") from error
    if any(_nbytes(flat) != _nbytes(params) for flat in slots):
        raise ProtocolError(f"slots of {[_nbytes(flat) for flat in slots]} bytes")
    return slots


def _nbytes(flat: FlatTensors) -> int:
    return 0 if flat.segment is None else flat.segment.nbytes
