"""Bulk data on its way to other members; what is needed first is sent first.

    PriorityChannel     several links to one peer, which take frames from one queue, ordered by priority: a
                        large transfer neither waits for one slow stream nor delays what matters more
    BackgroundChannel   one link to a peer, for frames that wait until no priority channel has any
    SendGate            counts the frames in all priority channels of this process: they share its uplink

Payloads are sent once and not copied: their memory must not change until the peer has confirmed them. This
also bounds the queues (a worker has two gradient buffers, and may not fill one again before it was taken).
The kernel's queues are kept short; otherwise the order would be theirs.

Concurrency: any thread puts frames in; the event loops of this process send them (transport/event_loop.py).
"""

from __future__ import annotations

import heapq
import itertools
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from manyhands.errors import LinkError
from manyhands.transport import Link
from manyhands.transport.event_loop import Frame, LinkWriter

LANES = 2
"""Connections for bulk data between two members: the second fills the pauses of the first."""


class SendGate:
    def __init__(self) -> None:
        self._left: dict[PriorityChannel, int] = {}
        self._waiting: list[Callable[[], None]] = []
        self._lock = threading.Lock()

    def join(self, channel: PriorityChannel) -> None:
        with self._lock:
            self._left[channel] = 0

    def leave(self, channel: PriorityChannel) -> None:
        """What is left in this channel is not sent any more."""
        with self._lock:
            self._left.pop(channel, None)
        self._open_if_idle()

    def add(self, channel: PriorityChannel, number: int) -> None:
        with self._lock:
            if channel in self._left:
                self._left[channel] += number
        if number < 0:
            self._open_if_idle()

    def is_open(self, otherwise: Callable[[], None]) -> bool:
        """Whether no channel has frames; if some has, `otherwise` is called once all are sent."""
        with self._lock:
            if not any(self._left.values()):
                return True
            self._waiting.append(otherwise)
            return False

    def _open_if_idle(self) -> None:
        with self._lock:
            if any(self._left.values()):
                return
            waiting, self._waiting = self._waiting, []
        for callback in waiting:
            callback()


class BackgroundChannel:
    def __init__(self, link: Link, send_gate: SendGate) -> None:
        link.queue_little()
        self._send_gate = send_gate
        self._queue: deque[Frame] = deque()
        self._num_unsent = 0
        self._lost = False
        self._error: BaseException | None = None
        self._changed = threading.Condition()
        self._writer = LinkWriter(link, take=self._take, on_sent=self._sent, on_end=self._end)

    def put(self, head: dict[str, Any], payload: memoryview | None = None) -> None:
        """Frames are sent in this order. Raises the error of an earlier frame, unless the link is lost."""
        if self._error is not None:
            raise self._error
        with self._changed:
            if self._lost:
                return
            self._num_unsent += 1
            self._queue.append((head, payload))
        self._writer.notify()

    def flush(self) -> None:
        """Wait until all frames are sent, or the link is lost."""
        with self._changed:
            self._changed.wait_for(lambda: not self._num_unsent)

    def _take(self) -> Frame | None:
        if not self._queue or not self._send_gate.is_open(self._writer.wake):
            return None
        return self._queue.popleft()

    def _sent(self) -> None:
        with self._changed:
            self._num_unsent -= 1
            self._changed.notify_all()

    def _end(self, error: Exception) -> None:
        """The peer is dead, or the view is over."""
        with self._changed:
            if not isinstance(error, LinkError):
                self._error = error
            self._lost, self._num_unsent = True, 0
            self._queue.clear()
            self._changed.notify_all()


class PriorityChannel:
    def __init__(self, links: Sequence[Link], *, send_gate: SendGate | None = None) -> None:
        self._links = list(links)
        self._send_gate = send_gate or SendGate()
        self._send_gate.join(self)
        for link in links:
            link.queue_little()
        self._error: BaseException | None = None
        self._order = itertools.count()
        self._queue: list[tuple[int, int, Frame]] = []
        self._lock = threading.Lock()
        self._writers = [
            LinkWriter(link, take=self._take, on_sent=self._sent, on_end=self._end)
            for link in links
        ]

    def put(self, priority: int, head: dict[str, Any], payload: memoryview) -> None:
        """Smaller numbers go first. Raises the error of an earlier frame, unless the link is lost."""
        if self._error is not None:
            raise self._error
        self._send_gate.add(self, 1)
        with self._lock:
            heapq.heappush(self._queue, (priority, next(self._order), (head, payload)))
        for writer in self._writers:
            writer.notify()

    @property
    def bytes_sent(self) -> int:
        return sum(link.bytes_sent for link in self._links)

    def close(self) -> None:
        self._send_gate.leave(self)
        for link in self._links:
            link.close()
        with self._lock:
            self._queue.clear()

    def _take(self) -> Frame | None:
        with self._lock:
            return heapq.heappop(self._queue)[2] if self._queue else None

    def _sent(self) -> None:
        self._send_gate.add(self, -1)

    def _end(self, error: Exception) -> None:
        """A link is lost: close all. Whoever reads from them knows what to do."""
        if not isinstance(error, LinkError):
            self._error = error
        self.close()
