"""Event loops: a few threads per process that read and write all links of its parameter servers.

An EventLoop is one thread around epoll. A LinkReader delivers the messages of one link, a LinkWriter sends
what its owner has for one link, and a PriorityChannel sends bulk data over several links. None of them has a
thread of its own, so the number of threads does not grow with the number of connections.

Concurrency: all callbacks of a reader or writer run in the thread of its loop, one at a time. They must not
block: every other link of that loop would wait. Sockets are never waited for: a frame that is half received
or half sent continues when epoll reports the socket. Reading and writing have separate loops, since a large
copy to the kernel would delay messages that others wait for.

Cost: a small message costs one epoll_wait more than a thread of its own; payloads are received straight into
their destination.
"""

from __future__ import annotations

import contextlib
import functools
import heapq
import itertools
import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from manyhands.errors import LinkError, LinkTimeout, ProtocolError
from manyhands.threads import fail_process, start_thread
from manyhands.transport.fields import MessageSet
from manyhands.transport.link import Link, Payload, Place, Received
from manyhands.transport.tls import WouldBlock

NUM_LOOPS = 2
"""Threads for reading, and as many for writing: one core copies or encrypts 2 to 3 GB/s."""
DATA_LINKS = 2
"""Connections for bulk data between two members: the second fills the pauses of the first."""

Frame = tuple[Any, Payload | None]
"""A message and its payload."""


@dataclass(order=True)
class Timer:
    at: float
    number: int
    callback: Callable[[], None] = field(compare=False)
    cancelled: bool = field(default=False, compare=False)


class EventLoop:
    def __init__(self, name: str) -> None:
        self._epoll = select.epoll()
        self._handlers: dict[int, tuple[int, Callable[[], None]]] = {}
        """By descriptor: the events, and what to call."""
        self._calls: deque[Callable[[], None]] = deque()
        self._timers: list[Timer] = []
        self._numbers = itertools.count()
        self._waker = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._epoll.register(self._waker, select.EPOLLIN)
        self._thread = start_thread(self._run, name=name, on_error=fail_process)

    def call(self, callback: Callable[[], None]) -> None:
        """Run `callback` in the loop's thread soon. From any thread."""
        self._calls.append(callback)
        if threading.current_thread() is not self._thread:
            os.eventfd_write(self._waker, 1)

    def call_later(self, delay_s: float, callback: Callable[[], None]) -> Timer:
        """Run `callback` after `delay_s`, unless the timer is cancelled. From the loop's thread."""
        timer = Timer(time.monotonic() + delay_s, next(self._numbers), callback)
        heapq.heappush(self._timers, timer)
        return timer

    def watch(self, descriptor: int, events: int, handler: Callable[[], None]) -> None:
        """Call `handler` whenever poll would report one of `events`. From the loop's thread."""
        before = self._handlers.get(descriptor)
        if before is None:
            self._epoll.register(descriptor, events)
        elif before[0] != events:
            self._epoll.modify(descriptor, events)
        self._handlers[descriptor] = events, handler

    def unwatch(self, descriptor: int) -> None:
        if self._handlers.pop(descriptor, None) is not None:
            self._epoll.unregister(descriptor)

    def _run(self) -> None:
        while True:
            for descriptor, _ in self._epoll.poll(self._patience_s()):
                if descriptor == self._waker:
                    with contextlib.suppress(BlockingIOError):
                        os.eventfd_read(self._waker)
                # A handler before this one may have removed it.
                elif (watched := self._handlers.get(descriptor)) is not None:
                    watched[1]()
            for _ in range(len(self._calls)):
                self._calls.popleft()()
            while self._timers and self._timers[0].at <= time.monotonic():
                timer = heapq.heappop(self._timers)
                if not timer.cancelled:
                    timer.callback()

    def _patience_s(self) -> float | None:
        if self._calls:
            return 0.0
        return max(0.0, self._timers[0].at - time.monotonic()) if self._timers else None


@functools.cache
def _loops(kind: str) -> itertools.cycle[EventLoop]:
    return itertools.cycle([EventLoop(f"manyhands-{kind}-{i}") for i in range(NUM_LOOPS)])


class LinkReader:
    """Delivers the messages of a link, until it is closed.

    All callbacks are called in the loop's thread: `on_message`, then `on_end` once, with the LinkError, the
    ProtocolError, or the exception of `on_message` or `place`, which closes the link.
    """

    def __init__(
        self,
        link: Link,
        messages: MessageSet | None = None,
        *,
        on_message: Callable[[Received], None],
        on_end: Callable[[Exception], None],
        place: Place | None = None,
        refusal: Callable[[ProtocolError], object] | None = None,
    ) -> None:
        """`refusal` makes the last message to a peer that breaks the protocol."""
        self.ended = threading.Event()
        """Set when nothing more is delivered."""
        self._link, self._messages = link, messages
        self._on_message, self._on_end, self._place = on_message, on_end, place
        self._refusal = refusal
        self._loop = next(_loops("read"))
        self._descriptor = -1
        self._paused = False
        self._timer: Timer | None = None

    def start(self, *, first_within_s: float | None = None) -> None:
        """`first_within_s`: close the link if no message arrives within this time."""
        self._loop.call(functools.partial(self._start, first_within_s))

    def handle_with(
        self, messages: MessageSet, on_message: Callable[[Received], None], place: Place
    ) -> None:
        """Expect other messages, from a callback or before the start."""
        self._messages, self._on_message, self._place = messages, on_message, place

    def pause(self) -> None:
        """Deliver nothing until `resume`. From a callback."""
        self._paused = True
        self._loop.unwatch(self._descriptor)

    def resume(self) -> None:
        """Continue after `pause`. From any thread."""
        self._loop.call(self._resume)

    def _start(self, first_within_s: float | None) -> None:
        try:
            self._descriptor = self._link.hold(lambda: self._loop.call(self._wake))
        except LinkError as error:
            self._end(error)
            return
        if first_within_s is not None:
            self._timer = self._loop.call_later(
                first_within_s,
                lambda: self._end(LinkTimeout(f"no message within {first_within_s:g} s")),
            )
        self._resume()

    def _resume(self) -> None:
        self._paused = False
        self._wake()

    def _wake(self) -> None:
        """Look again: it was resumed or closed, or bytes wait inside the TLS layer."""
        if not self.ended.is_set() and (not self._paused or self._link.closed):
            self._read()

    def _read(self) -> None:
        try:
            received = self._link.try_recv(self._messages, self._place)
            if self._timer is not None:
                self._timer.cancelled, self._timer = True, None
            self._on_message(received)
        except WouldBlock as block:
            self._loop.watch(self._descriptor, block.events, self._read)
        except Exception as error:
            self._end(error)
        else:
            if not self._paused:
                # epoll knows nothing of bytes that TLS has decrypted already.
                if self._link.has_pending:
                    self._loop.call(self._wake)
                self._loop.watch(self._descriptor, select.EPOLLIN, self._read)

    def _end(self, error: Exception) -> None:
        if self.ended.is_set():
            return
        if self._timer is not None:
            self._timer.cancelled = True
        self._loop.unwatch(self._descriptor)
        if self._refusal is not None and isinstance(error, ProtocolError):
            self._link.send_last(self._refusal(error))
        self._link.close()
        if self._descriptor >= 0:
            self._link.release()
        try:
            self._on_end(error)
        finally:
            self.ended.set()


class LinkWriter:
    """Sends frames over a link, one after the other, without a thread of its own.

    `take` returns the next frame or None; `on_end` is called once, with the error that ended it. Both are
    called in the loop's thread.
    """

    def __init__(
        self,
        link: Link,
        *,
        take: Callable[[], Frame | None],
        on_end: Callable[[Exception], None],
    ) -> None:
        self._link = link
        self._take, self._on_end = take, on_end
        self._loop = next(_loops("write"))
        self._scheduled = self._ended = False
        self._descriptor = -1
        self._next: Frame | None = None
        self._parts: list[memoryview] | None = None
        self._frame_bytes = 0

    def notify(self) -> None:
        """`take` has something. From any thread."""
        if self._parts is None:  # else it takes the next frame by itself
            self.wake()

    def wake(self) -> None:
        """Look again: there is something to send, or the link is free or closed. From any thread."""
        if not self._scheduled:
            self._scheduled = True
            self._loop.call(self._run)

    def _run(self) -> None:
        self._scheduled = False
        if not self._ended:
            self._write()

    def _write(self) -> None:
        try:
            if self._parts is None and not self._begin():
                return
            assert self._parts is not None
            self._link.try_send(self._parts)
        except WouldBlock as block:
            self._loop.watch(self._descriptor, block.events, self._write)
            return
        except Exception as error:
            self._end(error)
            return
        self._parts = None
        self._loop.unwatch(self._descriptor)
        self._link.end_frame(self._frame_bytes)
        self.wake()

    def _begin(self) -> bool:
        """Take the next frame, and the link for it: a frame must not be cut by another thread's."""
        if self._descriptor < 0:
            self._descriptor = self._link.hold(self.wake)
        self._link.check_open()
        self._next = self._next or self._take()
        if self._next is None or not self._link.begin_frame(self.wake):
            return False
        try:
            self._parts, self._next = self._link.pack(*self._next), None
        except BaseException:
            self._link.end_frame(0)
            raise
        self._frame_bytes = sum(map(len, self._parts))
        return True

    def _end(self, error: Exception) -> None:
        self._ended = True
        self._loop.unwatch(self._descriptor)
        if self._parts is not None:
            self._link.end_frame(0)
        self._link.close()
        if self._descriptor >= 0:
            self._link.release()
        self._on_end(error)


class PriorityChannel:
    """Sends bulk data to one peer: its links take frames from one queue, the most urgent first.

    A large transfer neither waits for one slow stream nor delays what matters more. The kernel's queues are
    kept short; otherwise the order would be theirs. Frames of equal priority are sent in the order of `put`.

    Payloads are not copied: their memory must not change until the peer has confirmed them. This also bounds
    the queue (a worker has two gradient buffers, and may not fill one again before it was taken).
    """

    def __init__(self, links: Sequence[Link]) -> None:
        self._links = list(links)
        for link in links:
            link.queue_little()
        self._error: BaseException | None = None
        self._order = itertools.count()
        self._queue: list[tuple[int, int, Frame]] = []
        self._lock = threading.Lock()
        self._writers = [LinkWriter(link, take=self._take, on_end=self._end) for link in links]

    def put(self, priority: int, message: Any, payload: memoryview | None = None) -> None:
        """Queue a frame; smaller priorities go first. Raises the error of an earlier frame, unless the link
        is lost. From any thread."""
        if self._error is not None:
            raise self._error
        with self._lock:
            heapq.heappush(self._queue, (priority, next(self._order), (message, payload)))
        for writer in self._writers:
            writer.notify()

    @property
    def bytes_sent(self) -> int:
        return sum(link.bytes_sent for link in self._links)

    def close(self) -> None:
        for link in self._links:
            link.close()
        with self._lock:
            self._queue.clear()

    def _take(self) -> Frame | None:
        with self._lock:
            return heapq.heappop(self._queue)[2] if self._queue else None

    def _end(self, error: Exception) -> None:
        """Close all links after one is lost. Their readers handle it."""
        if not isinstance(error, LinkError):
            self._error = error
        self.close()
