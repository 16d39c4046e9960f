"""Bulk data over several connections to one peer, what is needed first going first.

Each connection has a thread that sends; all take from one queue, ordered by priority, so a large
transfer neither waits for one slow stream nor holds up what matters more. What is put in is sent once
and not copied: its memory must stay as it is until the peer has said that it has it, which also bounds
the queue (a worker has two gradient buffers, and may not fill one again before it was taken).
"""

from __future__ import annotations

import itertools
import queue
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from manyhands.errors import LinkError
from manyhands.wire import Link

LANES = 2
"""Connections for bulk data between two members: the second fills the pauses of the first."""

_LAST = 1 << 60


class Lanes:
    def __init__(self, links: Sequence[Link], *, name: str) -> None:
        self._links = list(links)
        self._order = itertools.count()
        self._queue: queue.PriorityQueue[tuple[int, int, Any]] = queue.PriorityQueue()
        for number, link in enumerate(self._links):
            threading.Thread(
                target=self._send, args=(link,), name=f"{name}-lane-{number}", daemon=True
            ).start()

    def put(self, priority: int, head: Mapping[str, Any], payload: memoryview) -> None:
        """Smaller numbers go first."""
        self._queue.put((priority, next(self._order), (head, payload)))

    @property
    def bytes_sent(self) -> int:
        return sum(link.bytes_sent for link in self._links)

    def close(self) -> None:
        for link in self._links:
            self._queue.put((_LAST, next(self._order), None))
            link.close()

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
