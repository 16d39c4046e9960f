"""Who knocks at the coordinator's door and is not let in: told to whoever watches, by host, and counted.

A host that tries again and again is told once. Beyond MAX_HOSTS hosts only the number is told, each time that
there are ten times more.
"""

from __future__ import annotations

import socket
from collections.abc import Callable

from manyhands.threads import start_thread

MAX_HOSTS = 10
"""Hosts whose refusal is told, with the reason."""
FIRST_COUNT = 100
"""When so many connections were refused, their number is told."""


class RefusedPeers:
    """For a Listener's `on_refused`."""

    def __init__(
        self,
        tell: Callable[[str], None],
        tell_count: Callable[[str], None] = lambda text: None,
    ) -> None:
        """`tell`: of a host; `tell_count`: of how many there were."""
        self.count = 0
        self._tell = tell
        self._tell_count = tell_count
        self._next = FIRST_COUNT
        self._known: set[str] = set()

    def __call__(self, who: str, why: object) -> None:
        self.count += 1
        if self.count == self._next:
            self._next *= 10
            self._tell_count(f"{self.count:,} connections were refused so far, the last from {who}")
        host = who.rpartition(":")[0] or who
        if host in self._known or len(self._known) >= MAX_HOSTS:
            return
        self._known.add(host)
        # Asking for its name may take a while.
        start_thread(
            *(self._tell_of, host, why),
            name="who",
            on_error=lambda error: self._tell(f"a process on {host} was refused: {why}"),
        )

    def _tell_of(self, host: str, why: object) -> None:
        try:
            name = socket.gethostbyaddr(host)[0]
        except OSError:
            name = ""
        known = f"{name} ({host})" if name and name != host else host
        reason = "it has another key" if "unknown ca" in str(why).lower() else str(why)
        self._tell(f"a process on {known} was refused: {reason}")
