"""Bulk data on its way to others, what is needed first going first.

    Lanes       several connections to one peer; each has a thread that sends, and all take from one queue,
                ordered by priority, so a large transfer neither waits for one slow stream nor holds up
                what matters more
    Trailer     one connection to a peer, for what may wait until nothing of this process is in the lanes
    Uplink      what of this process is in the lanes, to whomever: it all goes the same way out

What is put in is sent once and not copied: its memory must stay as it is until the peer has said that it
has it, which also bounds the queues (a worker has two gradient buffers, and may not fill one again before
it was taken). The kernel is given no more than it can send soon, else the order would be that of its queues.
"""

from __future__ import annotations

import itertools
import queue
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from manyhands.errors import LinkError
from manyhands.threads import fail_process, start_thread
from manyhands.transport import Link

LANES = 2
"""Connections for bulk data between two members: the second fills the pauses of the first."""

_LAST = 1 << 60


class SendGate:
    def __init__(self) -> None:
        self._left: dict[PriorityChannel, int] = {}
        self._changed = threading.Condition()

    def join(self, channel: PriorityChannel) -> None:
        with self._changed:
            self._left[channel] = 0

    def leave(self, channel: PriorityChannel) -> None:
        """What is left in these does not go out any more."""
        with self._changed:
            self._left.pop(channel, None)
            self._changed.notify_all()

    def add(self, channel: PriorityChannel, number: int) -> None:
        with self._changed:
            if channel in self._left:
                self._left[channel] += number
                self._changed.notify_all()

    def wait(self) -> None:
        """Until nothing is in any lanes."""
        with self._changed:
            self._changed.wait_for(lambda: not any(self._left.values()))


class BackgroundChannel:
    def __init__(self, link: Link, send_gate: SendGate, *, name: str) -> None:
        link.queue_little()
        self._link, self._send_gate = link, send_gate
        self._queue: queue.Queue[Any] = queue.Queue()
        self._error: BaseException | None = None
        start_thread(self._send, name=name, on_error=fail_process)

    def put(self, head: Mapping[str, Any], payload: memoryview | None = None) -> None:
        """In this order. Raises what has kept an earlier one from being sent, unless the link is lost."""
        if self._error is not None:
            raise self._error
        self._queue.put((head, payload))

    def flush(self) -> None:
        """Until all that was put in has left, or can't any more."""
        self._queue.join()

    def close(self) -> None:
        """Nothing more is put in."""
        self._queue.put(None)

    def _send(self) -> None:
        lost = False
        while (item := self._queue.get()) is not None:
            if not lost:
                self._send_gate.wait()
                try:
                    self._link.send(*item)
                except LinkError:  # it is dead, or the view is over
                    lost = True
                except (
                    BaseException
                ) as error:  # the queue is emptied all the same: flush() waits for it
                    lost, self._error = True, error
                    self._link.close()
            self._queue.task_done()
        self._queue.task_done()


class PriorityChannel:
    def __init__(
        self, links: Sequence[Link], *, name: str, send_gate: SendGate | None = None
    ) -> None:
        """`uplink`: where others look whether these are busy."""
        self._links = list(links)
        self._send_gate = send_gate or SendGate()
        self._send_gate.join(self)
        for link in links:
            link.queue_little()
        self._error: BaseException | None = None
        self._order = itertools.count()
        self._queue: queue.PriorityQueue[tuple[int, int, Any]] = queue.PriorityQueue()
        for number, link in enumerate(self._links):
            start_thread(self._send, link, name=f"{name}-lane-{number}", on_error=self._fail)

    def put(self, priority: int, head: Mapping[str, Any], payload: memoryview) -> None:
        """Smaller numbers go first. Raises what has kept an earlier one from being sent, unless the link is
        lost."""
        if self._error is not None:
            raise self._error
        self._send_gate.add(self, 1)
        self._queue.put((priority, next(self._order), (head, payload)))

    @property
    def bytes_sent(self) -> int:
        return sum(link.bytes_sent for link in self._links)

    def close(self) -> None:
        self._send_gate.leave(self)
        for link in self._links:
            self._queue.put((_LAST, next(self._order), None))
            link.close()

    def _fail(self, error: BaseException) -> None:
        self._error = error
        self.close()

    def _send(self, link: Link) -> None:
        while True:
            _, _, item = self._queue.get()
            if item is None:
                return
            try:
                link.send(*item)
            except LinkError:
                self.close()  # whoever reads from them knows what to do
                return
            self._send_gate.add(self, -1)
