"""A worker's side of the parameter servers in one view: pushes gradients, waits for new parameters.

    Client              called by the worker's main thread: begin a step, push, wait for its update
    ServerConnection    the connection to one server: its links, and which parameters have arrived
    PendingPushes       the pushes whose outcome is unknown, and which step may begin; pure
    ServerWaiter        waits for servers, with a deadline

Inside a host a push is one message to the leader: the gradients are in memory that all servers can read.
Between hosts they are sent in spans, over several connections, as soon as backward has finished them,
and new parameters are received straight into the model's memory, in the order in which the next forward
needs them.

If a connection breaks while both sides live, it is made again, and everything that was not confirmed is sent
again: servers count each push once. If the other side is dead, the coordinator notices, and a new view comes.

Concurrency: the worker's main thread calls the client and waits on one condition, `ServerWaiter.changed`,
whose lock protects all state here. Messages are handled in the threads of event loops
(transport/event_loop.py); connecting has a short-lived thread.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from manyhands.errors import (
    BadFrame,
    LinkError,
    LinkTimeout,
    ManyhandsError,
    PeerLost,
    ProtocolError,
    ViewChanging,
    WeightsLost,
)
from manyhands.hosts.activity import WAITING, Activity
from manyhands.ps.block_store import FlatTensors, bytes_of
from manyhands.ps.placement import Placement
from manyhands.ps.policies import Contribution, StartPermit
from manyhands.ps.protocol import (
    TO_WORKER,
    AppliedPush,
    AskMissing,
    EnterView,
    GradientSpan,
    MissingWorkers,
    NewVersion,
    OpenDataLink,
    ParameterSpan,
    PermitMessage,
    PullRequest,
    PushDropped,
    PushesEnd,
    PushMessage,
    Refused,
    Rest,
    RowGradients,
    RowsAnswer,
    StateEnd,
    StateRequest,
    Statistics,
    TableStateRequest,
    ViewBegun,
    Wake,
)
from manyhands.ps.requests import ServerRequests
from manyhands.ps.spans import Span, travelling
from manyhands.threads import start_thread
from manyhands.transport import Link, Received
from manyhands.transport.event_loop import DATA_LINKS, LinkReader, PriorityChannel

if TYPE_CHECKING:
    from manyhands.ps.node import PsNode

logger = logging.getLogger("manyhands.ps")

ASK_AFTER_S = 2.0
"""Interval at which a waiting worker asks the leader which workers it waits for."""


@dataclass(frozen=True)
class PushOutcome:
    left_out: bool = False
    staleness: int = 0
    lr: float | None = None
    """The learning rate that it was applied with, scaled to a whole step; None: not reported."""


@dataclass
class Push:
    """A push whose outcome is unknown."""

    seq: int
    slot: int
    message: PushMessage
    row_grads: Mapping[str, memoryview]
    """By server: gradients of table rows."""
    outcome: PushOutcome = field(default_factory=PushOutcome)
    released: bool = False
    """If true, it was too late for its round and counts for the next: the worker need not wait for it."""


class PendingPushes:
    def __init__(self, servers: Iterable[str]) -> None:
        self.resolved: Callable[[int, PushOutcome], None] = lambda seq, outcome: None
        """Called once for each push, in the thread that handles messages."""
        self.permit = StartPermit(at=1, until=0)
        self.seq = 0
        """The last step."""
        self.count = 0
        self._last = 0
        self._pushes: dict[int, Push] = {}
        self._applied = dict.fromkeys(servers, 0)
        """By server: the last push of this worker that is in the weights there."""

    def add(self, push: Contribution, *, began: int, row_grads: Mapping[str, memoryview]) -> Push:
        message = PushMessage(push, began, after=self._last)
        self.seq = self._last = push.seq
        self.count += 1
        added = self._pushes[push.seq] = Push(push.seq, push.slot, message, row_grads)
        return added

    def holders(self, selects: Callable[[Push], bool] = lambda push: True) -> list[str]:
        """Return the servers at which one of the selected pushes is not resolved."""
        return [
            server
            for push in self._pushes.values()
            if selects(push)
            for server, applied in self._applied.items()
            if applied < push.seq
        ]

    def enter(self, server: str, begun: ViewBegun) -> list[Push]:
        """Update the pushes from a server's ViewBegun. Returns the pushes that the server lacks."""
        self._applied[server] = max(self._applied[server], begun.done)
        self.drop(begun.late)
        self.allow(begun.permit)
        return [push for seq, push in self._pushes.items() if seq > self._applied[server]]

    def apply(self, server: str, own: Sequence[AppliedPush]) -> None:
        """Note that these pushes are in the weights of a server. All servers report the same outcome."""
        for each in own:
            self._applied[server] = max(self._applied[server], each.seq)
            if (push := self._pushes.get(each.seq)) is not None:
                push.outcome = PushOutcome(staleness=each.staleness, lr=each.lr)
        self._resolve()

    def drop(self, seqs: Iterable[int]) -> None:
        """Note that these pushes, if they are pending, were left out."""
        for push in [self._pushes[seq] for seq in seqs if seq in self._pushes]:
            push.outcome = PushOutcome(left_out=True)
        self._resolve()

    def allow(self, permit: StartPermit | None) -> None:
        self.permit = permit or self.permit

    def release(self) -> None:
        """Release the pushes without which the leader has started another round."""
        for push in self._pushes.values():
            push.released |= self.permit.until is not None and push.seq < self.permit.until

    def _resolve(self) -> None:
        applied = min(self._applied.values())
        for seq, push in list(self._pushes.items()):
            if push.outcome.left_out or seq <= applied:
                del self._pushes[seq]
                self.resolved(seq, push.outcome)


class ServerWaiter:
    def __init__(
        self,
        worker: str,
        *,
        check: Callable[[], None],
        timeout_s: float,
        activity: Activity | None = None,
    ) -> None:
        """`check` is called while waiting, and raises if waiting has become pointless."""
        self.changed = threading.Condition()
        """Protects the state of a client and its connections; notified when it changes."""
        self.lost: dict[str, str] = {}
        """Servers that were given up, and why."""
        self.missing: Sequence[str] = ()
        """The workers that the leader waits for, as it reported last."""
        self._worker = worker
        self._check = check
        self._timeout_s = timeout_s
        self._activity = activity or Activity()
        self._error: BaseException | None = None
        self._waits: dict[str, float] = {}
        """Seconds waited for each server since `take_longest`."""

    def take_longest(self) -> str:
        """Return the server that was waited for longest since the last call; empty if there was no wait."""
        with self.changed:
            waits, self._waits = self._waits, {}
        return max(waits, key=lambda name: waits[name], default="")

    def wait(
        self,
        what: str,
        behind: Callable[[], Sequence[str]],
        *,
        ask: Callable[[], None] = lambda: None,
    ) -> None:
        """Wait until no server is behind. `ask` is called every ASK_AFTER_S."""
        with self.changed, self._activity.during(WAITING):
            began = asked = time.monotonic()
            while True:
                if self._error is not None:
                    raise self._error
                if not (names := behind()):
                    return
                self._check()
                now = time.monotonic()
                if now - began > self._timeout_s or not self.lost.keys().isdisjoint(names):
                    raise self._too_long(what, names, now - began)
                if now - asked > ASK_AFTER_S:
                    asked = now
                    ask()
                self.changed.wait(0.5)
                waited_s = time.monotonic() - now
                for name in {*names}:
                    self._waits[name] = self._waits.get(name, 0.0) + waited_s

    def fail(self, error: BaseException) -> None:
        """Raise an error of another thread in the thread that waits, now or next."""
        with self.changed:
            self._error = self._error or error
            self.changed.notify_all()

    def _too_long(self, what: str, names: Sequence[str], waited_s: float) -> LinkError:
        lost = [f"{name} ({self.lost[name]})" for name in names if name in self.lost]
        if lost:
            return LinkError(f"{self._worker} lost {', '.join(lost)} while waiting for {what}")
        waits = f", which waits for {', '.join(self.missing)}" if self.missing else ""
        servers = ", ".join(sorted(set(names)))
        return LinkTimeout(f"{self._worker} waited {waited_s:.0f} s for {what} of {servers}{waits}")


class ServerConnection:
    """One link for messages and, where gradients are sent, several data links for them and for parameters."""

    def __init__(self, name: str, client: Client) -> None:
        self.name = name
        self.spans: Sequence[Span] = ()
        """The spans in which gradients are sent and parameters received; none in shared memory."""
        self.version = -1
        """The version that the server has announced; -1: it has not admitted this worker yet."""
        self._client = client
        self._changed = client.waiter.changed
        self._arrived: list[int] = []
        """The version in which each span has arrived."""
        self._kept: frozenset[int] = frozenset()
        """The spans whose replica is in this process: the model computes with the replica itself."""
        self._link: Link | None = None
        """For messages. None while there is no connection."""
        self._channel: PriorityChannel | None = None
        self._closed = False
        """If true, don't reconnect."""
        self._ahead: list[tuple[int, int, int]] = []
        """(span, seq, slot) of the spans sent of an incomplete push."""
        self._requests: dict[object, tuple[Any, memoryview | None]] = {}
        """Messages without an answer yet, by their class or tag."""
        self._sent_before = 0
        """Bytes sent over links that were lost."""

    @property
    def complete_version(self) -> int:
        """The version in which all parameters of the server have arrived."""
        return min([self.version, *map(self._version_of, range(len(self.spans)))])

    def is_behind(self, needed: Iterable[int] | None) -> bool:
        """Return whether some of these spans (None: all) have not arrived in the announced version."""
        spans = range(len(self.spans)) if needed is None else needed
        return any(self._version_of(i) < self.version for i in spans)

    def _version_of(self, i: int) -> int:
        if i not in self._kept:
            return self._arrived[i]
        server_state = self._client.node.server_state
        assert server_state is not None, "this process has a replica"
        return server_state.held.versions.get(self.name, -1)

    @property
    def bytes_sent(self) -> int:
        """Bytes sent over all links so far. It never falls, also while a lost link is replaced."""
        link = self._link.bytes_sent if self._link else 0
        channel = self._channel.bytes_sent if self._channel else 0
        return self._sent_before + link + channel

    # Sending ------------------------------------------------------------------------------------

    def send(self, message: Any, payload: memoryview | None = None) -> None:
        """Send a message, unless there is no connection."""
        if (link := self._link) is not None:
            with suppress(LinkError):  # its reader notices too, and reconnects or gives up
                link.send(message, payload)

    def request(
        self, message: Any, payload: memoryview | None = None, *, key: object = None
    ) -> None:
        """Send a message, and again if the connection breaks before it is answered or forgotten."""
        with self._changed:
            self._requests[key or type(message)] = (message, payload)
        self.send(message, payload)

    def awaits(self, key: object) -> bool:
        """Return whether a request, given by its class or tag, is unanswered."""
        return key in self._requests

    def forget(self, key: object) -> None:
        with self._changed:
            self._requests.pop(key, None)

    def send_span(self, i: int, *, seq: int, slot: int, priority: int) -> None:
        """Send a complete piece of a gradient, ahead of the push that it belongs to."""
        with self._changed:
            self._ahead.append((i, seq, slot))
            channel = self._channel
        if channel is not None:
            self._put(channel, i, seq, slot, priority)

    def _put(self, channel: PriorityChannel, i: int, seq: int, slot: int, priority: int) -> None:
        gradient = self.spans[i].of(self._client.slots[slot])
        channel.put(priority, GradientSpan(seq, slot, i), bytes_of(gradient))

    def end_spans(self) -> None:
        """Note that the push of the spans sent so far is pending now. With the lock held."""
        self._ahead.clear()

    def send_push(self, push: Push) -> None:
        if (row_grads := push.row_grads.get(self.name)) is not None:
            self.send(RowGradients(push.seq, push.slot, row_grads.nbytes), row_grads)
        self.send(push.message)

    # Connecting ---------------------------------------------------------------------------------

    def connect(self) -> None:
        with ExitStack() as opened:  # closed again if this fails
            link = opened.enter_context(self._client.node.dial(self.name))
            link.send(self._client.enter)
            with self._changed:
                if self._closed:
                    return
                self._link = link
            opened.pop_all()
        self._read(link, link)

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._disconnect()

    def _disconnect(self) -> None:
        """Close the links. With the lock held."""
        self._sent_before = self.bytes_sent
        for each in (self._link, self._channel):
            if each is not None:
                each.close()
        self._link = self._channel = None

    def _on_end(self, control: Link, error: Exception) -> None:
        """Reconnect after a link of the connection made with `control` has ended, unless the server broke the
        protocol or the view changes."""
        if isinstance(error, BadFrame | ProtocolError):
            self._refuse(error)
        elif isinstance(error, LinkError):
            with self._changed:
                if self._closed or control is not self._link:
                    return
                self._disconnect()
            self._start(self._reconnect, str(error))
        elif not isinstance(error, ViewChanging):  # the main thread notices that by itself
            self._client.waiter.fail(error)

    def _refuse(self, error: Exception) -> None:
        """Close the connection for good, and have the server ended: it broke the protocol."""
        with self._changed:
            if self._closed:
                return
            self.close()
            self._lose(f"it broke the protocol: {error}")
        logger.warning("%s refused %s: %s", self._client.enter.sender, self.name, error)
        self._start(self._client.node.refused, self.name, str(error))

    def _reconnect(self, why: str) -> None:
        try:
            self.connect()
        except ManyhandsError as error:  # the server does not answer, or a view comes
            self._lose(f"{why}; then {error}")

    def _lose(self, why: str) -> None:
        with self._changed:
            self._client.waiter.lost[self.name] = why
            self._changed.notify_all()

    def _start(self, target: Callable[..., object], *args: Any) -> None:
        """Run something that takes time in a thread of its own: event loops must not wait."""
        name, on_error = f"connects-{self.name}", self._client.waiter.fail
        start_thread(target, *args, name=name, on_error=on_error)

    def _begin(self, control: Link, begun: ViewBegun, resume: Callable[[], None]) -> None:
        try:
            self._enter(control, begun)
        except (ProtocolError, LinkError, ViewChanging) as error:
            self._on_end(control, error)
        finally:
            resume()

    def _open_data_links(self, num_links: int) -> list[Link]:
        enter, data_links = self._client.enter, []
        with ExitStack() as opened:  # closed again if one fails
            for _ in range(num_links):
                data_link = opened.enter_context(self._client.node.dial(self.name))
                data_link.send(OpenDataLink(enter.sender, enter.view))
                data_links.append(data_link)
            opened.pop_all()
        return data_links

    def _enter(self, control: Link, begun: ViewBegun) -> None:
        """Open the data links, and send what the server lacks: it has admitted this worker, perhaps again."""
        client = self._client
        placement = Placement.from_record(begun.placement, layout=client.params.layout)
        spans, holders = travelling(placement, self.name) if begun.travels else ([], [])
        data_links = self._open_data_links(DATA_LINKS if spans else 0)
        with self._changed:
            if control is not self._link:  # closed meanwhile
                for data_link in data_links:
                    data_link.close()
                return
            if data_links:
                self._channel = PriorityChannel(data_links)
            if self.version < 0:  # otherwise what arrived over an earlier connection is still here
                own = (i for i, holder in enumerate(holders) if holder == client.enter.sender)
                self.spans, self._arrived, self._kept = spans, [-1] * len(spans), frozenset(own)
            self.version = max(self.version, begun.version)
            again = client.on_begun(self.name, begun, placement)
            ahead = [*self._ahead]
            ahead += [(i, push.seq, push.slot) for push in again for i in range(len(self.spans))]
            channel, unanswered = self._channel, list(self._requests.values())
            self._changed.notify_all()
        for data_link in data_links:
            self._read(data_link, control)
        if channel is not None:
            for i, seq, slot in ahead:
                self._put(channel, i, seq, slot, priority=i)
        for push in again:
            self.send_push(push)
        for message, payload in unanswered:
            self.send(message, payload)

    # Receiving ----------------------------------------------------------------------------------

    def _read(self, link: Link, control: Link) -> None:
        """Handle what arrives over a link from now on, in the thread of an event loop."""

        def place(message: Any, nbytes: int) -> memoryview | None:
            if not isinstance(message, ParameterSpan):
                return None
            if message.span >= len(self.spans):
                raise ProtocolError(f"span {message.span} of {len(self.spans)}")
            return bytes_of(self.spans[message.span].of(self._client.params))

        def on_message(received: Received) -> None:
            message, payload = received
            if payload is None and isinstance(message, ParameterSpan | RowsAnswer | Statistics):
                raise ProtocolError(f"a {type(message).__name__} without its payload")
            if isinstance(message, ViewBegun):
                # It dials, which takes time; later messages on this link must wait for it.
                reader.pause()
                self._start(self._begin, control, message, reader.resume)
            else:
                self._handle(message, payload)

        reader = LinkReader(
            link,
            TO_WORKER,
            on_message=on_message,
            on_end=lambda error: self._on_end(control, error),
            place=place,
        )
        reader.start()

    def _handle(self, message: Any, payload: memoryview | None) -> None:
        with self._changed:
            request = self._requests.pop(_request_of(message), None)
            if isinstance(message, RowsAnswer) and request is None:
                return  # not asked for, or answered over an earlier connection
            match message:
                case ParameterSpan(version, i):
                    self._arrived[i] = max(self._arrived[i], version)
                case NewVersion(version):
                    self.version = max(self.version, version)
                case Refused():
                    self._closed = True  # it would refuse this worker again
            self._client.handle(self.name, message, payload)
            self._changed.notify_all()


def _request_of(message: object) -> object:
    """Return the class or tag of the request that a message answers."""
    match message:
        case NewVersion(pulled=True):
            return PullRequest
        case PermitMessage():
            return Wake
        case StateEnd(of):
            return StateRequest if of == "state" else TableStateRequest
        case RowsAnswer(tag):
            return tag
    return None


class Client:
    def __init__(
        self,
        enter: EnterView,
        servers: Sequence[str],
        *,
        node: PsNode,
        params: FlatTensors,
        slots: Sequence[FlatTensors],
        waiter: ServerWaiter,
    ) -> None:
        """Enter the view at all servers, the leader first. `slots` are the gradient buffers."""
        self.enter = enter
        self.node = node
        self.params, self.slots = params, slots
        self.waiter = waiter
        self.placement: Placement
        """Placement of the blocks, as the servers have reported it."""
        self.last_parts: set[tuple[int, int]] = set()
        """(step, part) of the last update before this view."""
        self.ticks = 0
        self.bytes_of_servers = 0
        """Bytes sent by servers, as far as they have reported it to this worker."""
        self.pushes = PendingPushes(servers)
        self._connections = {name: ServerConnection(name, self) for name in servers}
        self._leader = self._connections[servers[0]]
        self.requests = ServerRequests(
            self._connections, self._leader, waiter, layout=params.layout
        )
        self._remote = list(self._connections.values()) if params.segment is None else []
        """Servers that gradients are sent to and parameters pulled from; none in shared memory."""
        try:
            for connection in self._connections.values():
                connection.connect()
            waiter.wait(
                "the view to begin",
                lambda: [name for name, each in self._connections.items() if each.version < 0],
            )
        except BaseException:
            self.close()  # otherwise it would keep reconnecting, to servers of later views
            raise

    @property
    def version(self) -> int:
        """The version of the parameters that are here."""
        return min((each.complete_version for each in self._remote), default=self.params.mark)

    @property
    def bytes_sent(self) -> int:
        """Bytes sent over the network."""
        with self.waiter.changed:  # a link may be replaced right now
            return sum(each.bytes_sent for each in self._remote)

    @property
    def spans(self) -> dict[str, Sequence[Span]]:
        """By server: the spans in which gradients are sent and parameters received."""
        return {name: each.spans for name, each in self._connections.items() if each.spans}

    def begin(self, *, rounds: bool) -> tuple[int, int]:
        """Wait until the next step may begin and a slot is free. Returns its (seq, slot)."""
        leader, pushes = self._leader, self.pushes
        if leader.awaits(Rest):
            leader.forget(Rest)
            leader.request(Wake())
            self.waiter.wait("being woken", lambda: [leader.name] if leader.awaits(Wake) else [])
            pushes.seq = pushes.permit.at - 1
            self.pull()
        seq = pushes.permit.at if rounds else pushes.seq + 1
        slot = pushes.count % len(self.slots)

        def behind() -> list[str]:
            if pushes.permit.until is not None and seq > pushes.permit.until:
                return [leader.name]
            return pushes.holders(lambda push: push.slot == slot)

        self._wait_for_step(f"the permit to begin step {seq}", seq, behind)
        return seq, slot

    def push_span(self, server: str, i: int, *, seq: int, slot: int, priority: int) -> None:
        """Send a complete piece of a gradient, ahead of the push that it belongs to."""
        self._connections[server].send_span(i, seq=seq, slot=slot, priority=priority)

    def push(
        self,
        push: Contribution,
        *,
        began: int,
        row_grads: Mapping[str, memoryview] | None = None,
    ) -> None:
        """Push a complete gradient, whose spans were sent before. `row_grads`, by server: gradients of table
        rows, which are sent along."""
        with self.waiter.changed:
            pushed = self.pushes.add(push, began=began, row_grads=row_grads or {})
            for connection in self._remote:
                connection.end_spans()
        # In shared memory, the leader notifies the others.
        for connection in self._remote or [self._leader]:
            connection.send_push(pushed)

    def finish(self, seq: int) -> None:
        """Wait until the push is in the weights everywhere, was dropped, or need not be waited for."""
        self._wait_for_step(
            f"step {seq}",
            seq,
            lambda: self.pushes.holders(lambda push: push.seq == seq and not push.released),
        )

    def drain(self) -> None:
        """Wait until the outcome of every push is known."""
        if self.pushes.holders():
            self._leader.request(PushesEnd())
        self._wait_for_step("its last pushes", self.pushes.seq, self.pushes.holders)
        self._leader.forget(PushesEnd)

    def pull(self) -> None:
        """Wait for the newest parameters, which other workers may have changed meanwhile."""
        for connection in self._remote:
            connection.request(PullRequest())
        self.waiter.wait(
            "the newest parameters",
            lambda: [each.name for each in self._remote if each.awaits(PullRequest)],
        )
        self.wait_for_params()

    def wait_for_params(self, needed: Mapping[str, Iterable[int]] | None = None) -> None:
        """Wait until these spans (indices by server; None: all) have arrived in the announced version."""
        self.waiter.wait(
            "parameters",
            lambda: [
                name
                for name, each in self._connections.items()
                if each.is_behind(None if needed is None else needed.get(name, ()))
            ],
        )

    def rest(self) -> None:
        """Tell the leader not to wait for this worker until its next step."""
        if not self._leader.awaits(Rest):
            self._leader.request(Rest())

    def wake_up(self) -> None:
        """Have waiting threads check again."""
        with self.waiter.changed:
            self.waiter.changed.notify_all()

    def close(self) -> None:
        for connection in self._connections.values():
            connection.close()
        self.wake_up()

    def _wait_for_step(self, what: str, seq: int, behind: Callable[[], Sequence[str]]) -> None:
        self.waiter.wait(what, behind, ask=lambda: self._leader.send(AskMissing(seq)))

    # Called by connections, with the lock held -----------------------------------------------------

    def on_begun(self, server: str, begun: ViewBegun, placement: Placement) -> list[Push]:
        """Returns the pushes that the server lacks."""
        self.placement = placement
        self.requests.row_placement = begun.row_placement
        self.last_parts = set(begun.last)
        self.ticks = max(self.ticks, begun.ticks)
        return self.pushes.enter(server, begun)

    def handle(self, server: str, message: Any, payload: memoryview | None) -> None:
        match message:
            case NewVersion():
                self.ticks = max(self.ticks, message.ticks)
                self.bytes_of_servers += message.sent
                self.pushes.apply(server, message.own)
                self.pushes.allow(message.permit)
            case PushDropped(seq, permit):
                self.pushes.drop([seq])
                self.pushes.allow(permit)
            case PermitMessage(permit):
                self.pushes.allow(permit)
                self.pushes.release()
            case Refused(why, lost):
                kind = WeightsLost if lost else PeerLost
                self.waiter.fail(kind(f"{server} refused {self.enter.sender}: {why}"))
            case MissingWorkers(names):
                self.waiter.missing = names
            case _:
                self.requests.handle(server, message, payload)
