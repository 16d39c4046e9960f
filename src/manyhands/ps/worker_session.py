"""A worker as a server sees it: its connections, its gradients, and which of its pushes have arrived."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from manyhands.errors import LinkError, ProtocolError
from manyhands.ps.block_store import FlatTensors, Span, bytes_of
from manyhands.ps.protocol import ParameterSpan, PushMessage
from manyhands.transport import Link
from manyhands.transport.event_loop import LANES, PriorityChannel

MAX_ARRIVING = 8
"""Limit for partly received pushes of one worker; it has at most two in flight."""


@dataclass
class IncomingPush:
    """A push that is partly received."""

    slot: int
    message: PushMessage | None = None
    spans: set[int] = field(default_factory=set)


class WorkerSession:
    def __init__(
        self,
        name: str,
        link: Link,
        slots: Sequence[FlatTensors],
        *,
        travels: bool,
        spans: Sequence[Span],
    ) -> None:
        """`slots`: its gradients. `travels`: if true, they are sent over the network, in these runs."""
        self.name = name
        self.slots = slots
        self.travels = travels
        self.done = 0
        """Its last push that is in the weights of this server."""
        self.late: list[int] = []
        """Its last pushes that were dropped."""
        self.link = link
        self.wants: Sequence[int] = ()
        """The runs of parameters to send it, in the order in which it needs them."""
        self._spans = spans
        self._lane_links: list[Link] = []
        self._channel: PriorityChannel | None = None
        self._arriving: dict[int, IncomingPush] = {}
        self._sent_before = 0

    @property
    def bytes_sent(self) -> int:
        channel = self._channel.bytes_sent if self._channel else 0
        return self._sent_before + self.link.bytes_sent + channel

    def enter_again(self, link: Link) -> None:
        """The worker has lost its connections, and reconnects."""
        self.close()
        self._sent_before = self.bytes_sent
        self.link, self._channel, self._lane_links = link, None, []

    def add_lane(self, link: Link) -> bool:
        """Add a connection for bulk data. Returns whether all are here."""
        if not self.travels or len(self._lane_links) == LANES:
            raise ProtocolError(f"{self.name} has no use for one more lane")
        self._lane_links.append(link)
        if len(self._lane_links) < LANES:
            return False
        self._channel = PriorityChannel(self._lane_links)
        return True

    def tell(self, message: Any, payload: memoryview | None = None) -> None:
        """Send one of the messages TO_WORKER."""
        try:
            self.link.send(message, payload)
        except LinkError:
            pass  # it is gone, or reconnects and asks again

    def tell_all(self, messages: Iterable[tuple[Any, memoryview | None]]) -> None:
        for message, payload in messages:
            self.tell(message, payload)

    def send_spans(self, version: int, params: FlatTensors) -> None:
        if self._channel is None:
            return
        for priority, i in enumerate(self.wants):
            span = bytes_of(self._spans[i].of(params))
            self._channel.put(priority, ParameterSpan(version, i), span)

    def room(self, slot: int, i: int) -> memoryview:
        """The memory for a run of a gradient."""
        if not self.travels or not (0 <= slot < len(self.slots) and 0 <= i < len(self._spans)):
            raise ProtocolError(f"a run {i} for slot {slot}, which there is not")
        return bytes_of(self._spans[i].of(self.slots[slot]))

    def arrived(
        self, seq: int, slot: int, *, span: int | None = None, message: PushMessage | None = None
    ) -> PushMessage | None:
        """Note a part of a push: a run or its message. Returns the message once all parts are here."""
        if not 0 <= slot < len(self.slots):
            raise ProtocolError(f"a push in slot {slot}, which there is not")
        if seq <= self.done:
            return None
        arriving = self._arriving.get(seq) or self._begin(seq, slot)
        if arriving.slot != slot:
            raise ProtocolError(f"push {seq} is in slot {arriving.slot}, and in {slot}")
        if span is not None:
            arriving.spans.add(span)
        if message is not None:
            arriving.message = message
        if arriving.message is None or (self.travels and len(arriving.spans) < len(self._spans)):
            return None
        del self._arriving[seq]
        return arriving.message

    def _begin(self, seq: int, slot: int) -> IncomingPush:
        if len(self._arriving) >= MAX_ARRIVING:
            # Some may have been resolved by what came over an earlier connection.
            resolved = [s for s in self._arriving if s <= self.done or s in self.late]
            for number in resolved:
                del self._arriving[number]
            if not resolved:
                raise ProtocolError(f"push {seq} begins, and {MAX_ARRIVING} others have not ended")
        arriving = self._arriving[seq] = IncomingPush(slot)
        return arriving

    def close(self) -> None:
        self.link.close()
        if self._channel is not None:
            self._channel.close()
        for link in self._lane_links:
            link.close()


def find_slots(
    params: FlatTensors, addresses: Sequence[str], count: int, *, shared: bool
) -> Sequence[FlatTensors]:
    """The memory of a worker's gradients: its own if it is shared, else new."""
    if len(addresses) != (count if shared else 0):
        raise ProtocolError(f"{len(addresses)} slots in shared memory")
    try:
        found = [FlatTensors.attached(params.layout, address) for address in addresses]
    except (LinkError, OSError, ValueError, RuntimeError) as error:
        raise ProtocolError(f"slots that are not there: {error}") from error
    if any(_nbytes(flat) != _nbytes(params) for flat in found):
        raise ProtocolError(f"slots of {[_nbytes(flat) for flat in found]} bytes")
    return found or [FlatTensors.private(params.layout) for _ in range(count)]


def _nbytes(flat: FlatTensors) -> int:
    return 0 if flat.segment is None else flat.segment.nbytes
