"""The messages to one member: sent in order by a thread of their own.

The coordinator must not wait for a member that does not read because it is stopped or hostile: no other
member would get its messages. The queue is bounded; beyond the limit the link is closed.
"""

from __future__ import annotations

import threading
from collections import deque

from manyhands.errors import LinkError
from manyhands.threads import OnError, start_thread
from manyhands.transport import Link

MAX_WAITING_BYTES = 64 << 20


class Outgoing:
    def __init__(self, link: Link, *, name: str, on_error: OnError) -> None:
        self._link = link
        self._waiting: deque[list[memoryview]] = deque()
        self._num_bytes = 0
        self._closed = False
        self._changed = threading.Condition()
        start_thread(self._send, name=name, on_error=on_error)

    def put(self, message: object) -> bool:
        """Queue a message; False if too much waits already: then the link is closed."""
        parts = self._link.pack(message)
        with self._changed:
            if self._closed:
                return True
            self._num_bytes += sum(map(len, parts))
            fits = self._num_bytes <= MAX_WAITING_BYTES
            if fits:
                self._waiting.append(parts)
                self._changed.notify()
        if not fits:
            self.close()
            self._link.close()
        return fits

    def close(self) -> None:
        """Send nothing more."""
        with self._changed:
            self._closed = True
            self._waiting.clear()
            self._changed.notify()

    def _send(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._waiting)
                if self._closed:
                    return
                parts = self._waiting.popleft()
            try:
                self._link.send_packed(parts)
            except LinkError:
                return  # the thread that reads from the link notices, too
            with self._changed:
                self._num_bytes -= sum(map(len, parts))
