"""A worker's side of the parameter servers in one view: pushes gradients, waits for new parameters.

Inside a host a push is one message to the lead: the gradients are in memory that all servers can read.
Between hosts they are sent in runs, over several connections, as soon as the backward pass has finished them,
and new parameters are received straight into the model's memory, in the order in which the next forward pass
needs them.

A connection that breaks while both sides live is made again, and what was not confirmed is sent again:
servers count each push once. If the other side is dead, the coordinator knows, and a new view comes.

Concurrency: the worker's main thread calls the public methods and waits on one condition. Messages are
handled in the threads of event loops (transport/event_loop.py); connecting has a short-lived thread.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from manyhands.embeddings.row_placement import RowPlacement
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
from manyhands.ps.block_store import FlatTensors, Span, bytes_of
from manyhands.ps.blocks import BlockLayout
from manyhands.ps.placement import Placement
from manyhands.ps.policies import Contribution, StartPermit
from manyhands.ps.protocol import (
    FROM_LANE,
    FROM_WORKER,
    OPENINGS,
    TO_WORKER,
    AskMissing,
    EnterView,
    GradientSpan,
    MissingWorkers,
    NewVersion,
    OpenLane,
    ParameterSpan,
    PermitMessage,
    PullRequest,
    PushDropped,
    PushesEnd,
    PushMessage,
    Refused,
    Rest,
    RowGradients,
    ViewBegun,
    Wake,
)
from manyhands.ps.requests import ServerRequests
from manyhands.ps.server_connection import Push, PushOutcome, ServerConnection
from manyhands.ps.server_state import travelling
from manyhands.threads import start_thread
from manyhands.transport import Link, Message
from manyhands.transport.event_loop import LANES, LinkReader, PriorityChannel

logger = logging.getLogger("manyhands.ps")

ASK_AFTER_S = 2.0
"""After waiting this long, ask the lead which workers it waits for."""

Dial = Callable[[str], Link]
"""Connects to a server; retries until it answers or a new view comes."""


class Client(ServerRequests):
    def __init__(
        self,
        worker: str,
        *,
        view: int,
        servers: Sequence[str],
        dial: Dial,
        params: FlatTensors,
        slots: Sequence[FlatTensors],
        check: Callable[[], None],
        resolved: Callable[[int, PushOutcome], None],
        refused: Callable[[str, str], None] = lambda who, why: None,
        timeout_s: float,
        seen: int = 0,
        baskets: Sequence[str] = (),
        replica: Callable[[str], int] | None = None,
        activity: Activity | None = None,
    ) -> None:
        """`check` is called while waiting, and raises when waiting has become pointless.
        `resolved(seq, fate)` is called from another thread, once for each push; `refused(server, why)` when a
        server talks nonsense.
        `baskets`: where gradients of table rows are put. `replica`: the version of a server's blocks
        that this very process keeps, if it keeps any."""
        super().__init__(servers[0])
        self.placement: Placement | None = None
        self.last_parts: set[tuple[int, int]] = set()
        """(step, part) of the last update before this view."""
        self.ticks = 0
        self.homes: RowPlacement | None = None
        """Which servers hold which table rows, if rows are served."""
        self.bytes_of_servers = 0
        """Bytes sent by servers, as far as they have reported it to this worker."""
        self._worker = worker
        self._seen = seen
        self._view = view
        self._dial = dial
        self._params = params
        self._slots = slots
        self._check = check
        self._resolved, self._tell_refused = resolved, refused
        self._baskets = list(baskets)
        self._replica = replica
        self._activity = activity or Activity()
        self._timeout_s = timeout_s
        self._closed = False
        self._refused: ManyhandsError | None = None
        self._error: BaseException | None = None
        """An unexpected error while handling a message."""
        self._all_shared = False
        self._seq = 0
        self._last_push = 0
        self._pushes = 0
        self._at = 1
        self._until: int | None = 0
        self._woken = False
        self._late: set[int] = set()
        self._released: set[int] = set()
        """Pushes too late for their round, which count for the next: the worker need not wait for them."""
        self._fates: dict[int, PushOutcome] = {}
        """Of pushes that some server has reported: all servers report the same."""
        self._under_way: dict[int, Push] = {}
        self._resting = False
        self._pulled: set[str] = set()
        self._missing: Sequence[str] = ()
        try:
            for name in servers:
                self._hosts[name] = ServerConnection(name, self._enter(name))
                self._read(self._hosts[name], self._hosts[name].link)
            with self._waiting("the view to begin") as wait:
                wait(lambda: [h.name for h in self._hosts.values() if not h.began])
        except BaseException:
            self.close()  # else it would keep reconnecting, to servers of later views
            raise

    # Steps --------------------------------------------------------------------------------------

    @property
    def version(self) -> int:
        """The version of the parameters that are here."""
        if self._all_shared:
            return self._params.mark
        return min(host.here for host in self._hosts.values())

    @property
    def layout(self) -> BlockLayout:
        return self._params.layout

    @property
    def bytes_sent(self) -> int:
        with self._news:  # a link may be replaced right now
            return sum(host.bytes_sent for host in self._hosts.values())

    def begin(self, *, rounds: bool) -> tuple[int, int]:
        """Wait until the next step may begin and a slot is free. Returns its (seq, slot)."""
        if self._resting:
            self._resting = False
            with self._news:
                self._woken = False
                self._hosts[self._lead].requests.pop(Rest, None)
            self._ask(self._lead, Wake())
            with self._waiting("being woken") as wait:
                wait(lambda: [] if self._woken else [self._lead])
            self._seq = self._at - 1
            self.pull()
        seq = self._at if rounds else self._seq + 1
        slot = self._pushes % len(self._slots)
        with self._waiting(f"leave to begin step {seq}", asks=seq) as wait:
            wait(lambda: [self._lead] if self._until is not None and seq > self._until else [])
            wait(lambda: self._holds(slot))
        return seq, slot

    def push_run(self, server: str, i: int, *, seq: int, slot: int, priority: int) -> None:
        """Send a complete piece of a gradient, ahead of the push that it belongs to."""
        host = self._hosts[server]
        with self._news:
            host.ahead.append((i, seq, slot))  # sent again if connections break before the push
            channel = host.channel
        if channel is not None:
            self._send_run(host, channel, i, seq, slot, priority)

    def _send_run(
        self,
        host: ServerConnection,
        channel: PriorityChannel,
        i: int,
        seq: int,
        slot: int,
        rank: int,
    ) -> None:
        head = FROM_LANE.write(GradientSpan(seq, slot, i))
        channel.put(rank, head, bytes_of(host.runs[i].of(self._slots[slot])))

    def push(
        self,
        push: Contribution,
        *,
        began: int,
        baskets: Mapping[str, memoryview] | None = None,
    ) -> None:
        """Push a complete gradient, whose runs were sent before if they travel. `baskets`, by server: its
        gradients of table rows, which are sent along."""
        seq = push.seq
        message = PushMessage(push, began, after=self._last_push)
        self._last_push = seq
        self._seq, self._pushes = seq, self._pushes + 1
        with self._news:
            pushed = self._under_way[seq] = Push(seq, push.slot, message, baskets or {})
            for host in self._hosts.values():
                host.ahead.clear()
        for name in self._hosts:
            # In shared memory it is enough that the lead knows.
            if name == self._lead or not self._all_shared:
                self._send_push(name, pushed)

    def _send_push(self, name: str, push: Push) -> None:
        if (basket := push.baskets.get(name)) is not None:
            self._send(name, RowGradients(push.seq, push.slot, basket.nbytes), basket)
        self._send(name, push.message)

    def finish(self, seq: int) -> None:
        """Wait until the push is in the weights everywhere, was dropped, or need not be waited for."""
        with self._waiting(f"step {seq}", asks=seq) as wait:
            wait(lambda: [] if seq in self._released else self._holders(seq))

    def drain(self) -> None:
        """Wait until the outcome of every push is known."""
        if self._under_way:
            self._ask(self._lead, PushesEnd())
        with self._waiting("its last pushes", asks=self._seq) as wait:
            wait(lambda: [name for seq in self._under_way for name in self._holders(seq)])
            self._hosts[self._lead].requests.pop(PushesEnd, None)

    def pull(self) -> None:
        """Wait for the newest parameters, which other workers may have changed meanwhile."""
        if not self._all_shared:
            with self._news:
                self._pulled = set()
            for name in self._hosts:
                self._ask(name, PullRequest())
            with self._waiting("the newest parameters") as wait:
                wait(lambda: [name for name in self._hosts if name not in self._pulled])
            self.wait_for_runs()

    def wait_for_runs(self, needed: Mapping[str, Sequence[int]] | None = None) -> None:
        """Wait until these runs (indices by server; None: all) have arrived in the announced version."""

        def behind() -> list[str]:
            return [
                name
                for name, host in self._hosts.items()
                if host.travels
                and any(
                    host.version_of(i) < host.version
                    for i in (range(len(host.runs)) if needed is None else needed.get(name, ()))
                )
            ]

        if any(host.travels for host in self._hosts.values()):
            with self._waiting("parameters") as wait:
                wait(behind)

    def rest(self) -> None:
        """Tell the lead not to wait for this worker until its next step."""
        if not self._resting:
            self._resting = True
            self._ask(self._lead, Rest())

    def travelling(self) -> dict[str, list[Span]]:
        """The runs that are sent over the network, by server."""
        return {name: host.runs for name, host in self._hosts.items() if host.travels}

    def wake_up(self) -> None:
        """Have waiting threads check again."""
        with self._news:
            self._news.notify_all()

    def close(self) -> None:
        with self._news:
            self._closed = True
            self._news.notify_all()
        for host in self._hosts.values():
            host.link.close()
            for link in host.lane_links:
                link.close()
            if host.channel is not None:
                host.channel.close()

    # Waiting ------------------------------------------------------------------------------------

    @contextmanager
    def _waiting(
        self, what: str, *, asks: int | None = None
    ) -> Iterator[Callable[[Callable[[], Sequence[str]]], None]]:
        """Yields a function that waits until no server is missing; each wait has a deadline and a name."""

        def wait(missing: Callable[[], Sequence[str]]) -> None:
            began = time.monotonic()
            asked = began
            while names := missing():
                self._check()
                self._raise_error()
                now = time.monotonic()
                for name in names:
                    if now - began > self._timeout_s or self._hosts[name].lost:
                        raise self._too_long(what, names, now - began)
                if asks is not None and now - asked > ASK_AFTER_S:
                    asked = now
                    self._send(self._lead, AskMissing(asks))
                self._news.wait(0.5)

        with self._news, self._activity.during(WAITING):
            self._raise_error()
            yield wait

    def _raise_error(self) -> None:
        if self._refused is not None:
            raise self._refused
        if self._error is not None:
            raise self._error

    def _fail(self, error: BaseException) -> None:
        """A message could not be handled: raise its error in the thread that waits."""
        with self._news:
            self._error = self._error or error
            self._news.notify_all()

    def _too_long(self, what: str, names: Sequence[str], waited_s: float) -> LinkError:
        lost = [f"{name} ({self._hosts[name].lost})" for name in names if self._hosts[name].lost]
        if lost:
            return LinkError(f"{self._worker} lost {', '.join(lost)} while waiting for {what}")
        behind = f", which waits for {', '.join(self._missing)}" if self._missing else ""
        told = ", ".join(sorted(set(names)))
        return LinkTimeout(f"{self._worker} waited {waited_s:.0f} s for {what} of {told}{behind}")

    def _holders(self, seq: int) -> list[str]:
        """The servers that have not resolved a push."""
        if seq in self._late or seq not in self._under_way:
            return []
        return [name for name, host in self._hosts.items() if host.done < seq]

    def _holds(self, slot: int) -> list[str]:
        """The servers that still need the contents of a slot."""
        return [
            name
            for push in self._under_way.values()
            if push.slot == slot
            for name in self._holders(push.seq)
        ]

    # Connections --------------------------------------------------------------------------------

    def _enter(self, name: str) -> Link:
        link = self._dial(name)
        segments = [slot.segment for slot in self._slots]
        addresses = [segment.address for segment in segments if segment is not None]
        self._all_shared = bool(addresses)
        enter = EnterView(self._worker, self._view, addresses, self._baskets, self._seen)
        link.send(OPENINGS.write(enter))
        return link

    def _read(self, host: ServerConnection, link: Link) -> None:
        """Handle what arrives over a link from now on, in the thread of an event loop."""
        message: Any = None

        def place(head: Mapping[str, Any], nbytes: int) -> memoryview | None:
            nonlocal message
            message = TO_WORKER.read(head)
            if not isinstance(message, ParameterSpan):
                return None
            if message.span >= len(host.runs):
                raise ProtocolError(f"span {message.span} of {len(host.runs)}")
            return bytes_of(host.runs[message.span].of(self._params))

        def on_message(frame: Message) -> None:
            nonlocal message
            if frame.payload is None:
                message = TO_WORKER.read(frame.head)
                if isinstance(message, ParameterSpan):
                    raise ProtocolError("a run without its payload")
            if isinstance(message, ViewBegun):
                # It dials, which takes time; what follows on this link must wait for it.
                reader.pause()
                self._start(self._begin, host, link, message, reader.resume)
            else:
                self._hear(host, message, frame.payload)

        reader = LinkReader(
            link,
            on_message=on_message,
            on_end=lambda error: self._on_end(host, link, error),
            place=place,
        )
        reader.start()

    def _begin(
        self, host: ServerConnection, link: Link, begun: ViewBegun, resume: Callable[[], None]
    ) -> None:
        try:
            self._on_begin(host, begun)
        except (ProtocolError, LinkError, ViewChanging) as error:
            self._on_end(host, link, error)
        finally:
            resume()

    def _on_end(self, host: ServerConnection, link: Link, error: Exception) -> None:
        """A link can't be read any more: reconnect, unless the server or the view is to blame."""
        if isinstance(error, BadFrame | ProtocolError):
            self._refuse(host, link, error)
        elif isinstance(error, LinkError):
            self._come_back(host, link, str(error))
        elif not isinstance(error, ViewChanging):  # whoever waits looks for the next view too
            self._fail(error)

    def _start(self, target: Callable[..., object], host: ServerConnection, *args: Any) -> None:
        """Run something that takes time in a thread of its own: event loops must not wait."""
        name = f"connects-{host.name}"
        start_thread(target, host, *args, name=name, on_error=self._fail)

    def _refuse(self, host: ServerConnection, link: Link, error: Exception) -> None:
        """The server has broken the protocol: don't talk to it again, and have it ended."""
        link.close()
        with self._news:
            if self._closed or host.lost:
                return
            host.lost = f"it broke the protocol: {error}"
            self._news.notify_all()
        logger.warning("%s refused %s: %s", self._worker, host.name, host.lost)
        self._start(lambda host: self._tell_refused(host.name, str(error)), host)

    def _come_back(self, host: ServerConnection, link: Link, why: str) -> None:
        """Connect again, and send again what was not confirmed. If nobody answers, a view will come."""
        with self._news:
            current = link is host.link or link in host.lane_links
            if self._closed or self._refused or not current or host.returning:
                return
            host.sent_before = host.bytes_sent
            host.returning = True
            host.began = False
            links, channel = [host.link, *host.lane_links], host.channel
            host.lane_links, host.channel = [], None
        for each in links:
            each.close()
        if channel is not None:
            channel.close()
        self._start(self._reconnect, host, why)

    def _reconnect(self, host: ServerConnection, why: str) -> None:
        try:
            new = self._enter(host.name)
        except ManyhandsError as error:  # nobody answers, or a view comes
            with self._news:
                host.lost = f"{why}; then {error}"
                self._news.notify_all()
            return
        with self._news:
            host.link, host.returning = new, False
            if self._closed:
                new.close()
                return
        self._read(host, new)

    def _on_begin(self, host: ServerConnection, begun: ViewBegun) -> None:
        """The server has admitted this worker, for the first time or again."""
        record, layout = begun.placement, self._params.layout
        placement = Placement.from_record(record, layout=layout)
        channel: list[Link] = []
        runs, keepers = travelling(placement, host.name)
        with self._news:
            self.placement = placement
            self.homes = begun.homes
            if not host.runs:  # else it was connected before, and what arrived is still here
                host.runs, host.arrived = runs, [-1] * len(runs)
                if self._replica is not None:
                    host.replica = partial(self._replica, host.name)
                    mine = (i for i, keeper in enumerate(keepers) if keeper == self._worker)
                    host.kept = frozenset(mine)
            host.travels = begun.travels
        if host.travels:
            for _ in range(LANES):
                link = self._dial(host.name)
                link.send(OPENINGS.write(OpenLane(self._worker, self._view)))
                channel.append(link)
        with self._news:
            host.lane_links = channel
            host.channel = PriorityChannel(channel) if channel else None
            host.version = max(host.version, begun.version)
            host.done = max(host.done, begun.done)
            self._late |= set(begun.late) & self._under_way.keys()
            self.ticks = max(self.ticks, begun.ticks)
            self._note_permit(begun.permit)
            host.began = True
            self.last_parts = set(begun.last)
            known = self._take_resolved()
            again = [push for push in self._under_way.values() if push.seq > host.done]
            ahead = list(host.ahead)
            unanswered = list(host.requests.values())
            self._news.notify_all()
        for seq, fate in known:
            self._resolved(seq, fate)
        for link in channel:
            self._read(host, link)
        for push in again:
            ahead += [(i, push.seq, push.slot) for i in range(len(runs))]
        if host.channel is not None:
            for i, seq, slot in ahead:
                self._send_run(host, host.channel, i, seq, slot, i)
        for push in again:
            self._send_push(host.name, push)
        for message, payload in unanswered:
            self._send(host.name, message, payload)

    def _hear(self, host: ServerConnection, message: Any, payload: memoryview | None) -> None:
        with self._news:
            match message:
                case ParameterSpan(version, run):
                    host.arrived[run] = max(host.arrived[run], version)
                case NewVersion():
                    host.version = max(host.version, message.version)
                    for each in message.own:
                        host.done = max(host.done, each.seq)
                        outcome = PushOutcome(staleness=each.staleness, lr=each.lr)
                        self._fates.setdefault(each.seq, outcome)
                    self.ticks = max(self.ticks, message.ticks)
                    self.bytes_of_servers += message.sent
                    if message.pulled:
                        self._pulled.add(host.name)
                        host.requests.pop(PullRequest, None)
                    self._note_permit(message.permit)
                case Refused(why, lost):
                    kind = WeightsLost if lost else PeerLost
                    self._refused = kind(f"{host.name} refused {self._worker}: {why}")
                case PushDropped(seq, permit):
                    if seq in self._under_way:
                        self._late.add(seq)
                    self._note_permit(permit)
                case PermitMessage(permit):
                    self._woken = True
                    host.requests.pop(Wake, None)
                    self._note_permit(permit)
                    self._released |= {
                        seq
                        for seq in self._under_way
                        if self._until is not None and seq < self._until
                    }
                case MissingWorkers(names):
                    self._missing = names
                    return
                case _:
                    self._hear_answer(host, message, payload)
            known = self._take_resolved()
            self._news.notify_all()
        for seq, fate in known:
            self._resolved(seq, fate)

    def _take_resolved(self) -> list[tuple[int, PushOutcome]]:
        """Remove and return the pushes whose outcome has just become known."""
        known = []
        for seq in [seq for seq in self._under_way if not self._holders(seq)]:
            del self._under_way[seq]
            self._released.discard(seq)
            fate = self._fates.pop(seq, PushOutcome())
            known.append((seq, PushOutcome(left_out=True) if seq in self._late else fate))
            self._late.discard(seq)
        return known

    def _note_permit(self, permit: StartPermit | None) -> None:
        if permit is not None:
            self._at, self._until = permit.at, permit.until

    def _send(self, name: str, message: Any, payload: memoryview | None = None) -> None:
        try:
            self._hosts[name].link.send(FROM_WORKER.write(message), payload)
        except LinkError:
            pass  # its reader notices too, and reconnects or gives up
