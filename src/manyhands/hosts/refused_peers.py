"""Report connections that the coordinator has refused: each host once, and the total.

Beyond MAX_HOSTS hosts only the total is reported, at 100, 1,000, 10,000, ... connections.
"""

from __future__ import annotations

import socket
from collections.abc import Callable

from manyhands.threads import start_thread

MAX_HOSTS = 10
"""Number of hosts that are reported by name, with the reason."""
FIRST_COUNT = 100
"""The first total that is reported."""


class RefusedPeers:
    """Callback for a Listener's `on_refused`."""

    def __init__(
        self,
        notify: Callable[[str], None],
        notify_count: Callable[[str], None] = lambda text: None,
    ) -> None:
        """`notify` reports a host; `notify_count` reports the total."""
        self.count = 0
        self._notify = notify
        self._notify_count = notify_count
        self._next = FIRST_COUNT
        self._known: set[str] = set()

    def __call__(self, peer: str, reason: object) -> None:
        self.count += 1
        if self.count == self._next:
            self._next *= 10
            self._notify_count(f"{self.count:,} connections refused so far, the last from {peer}")
        host = peer.rpartition(":")[0] or peer
        if host in self._known or len(self._known) >= MAX_HOSTS:
            return
        self._known.add(host)
        # In a thread, since looking up the name may take a while.
        start_thread(
            *(self._report, host, reason),
            name="lookup",
            on_error=lambda error: self._notify(f"a process on {host} was refused: {reason}"),
        )

    def _report(self, host: str, reason: object) -> None:
        try:
            name = socket.gethostbyaddr(host)[0]
        except OSError:
            name = ""
        shown = f"{name} ({host})" if name and name != host else host
        text = "it has another key" if "unknown ca" in str(reason).lower() else str(reason)
        self._notify(f"a process on {shown} was refused: {text}")
