"""Reports connections that the coordinator has refused, by host, and counts them.

A host that tries repeatedly is reported once. Beyond MAX_HOSTS hosts only the total is reported, each time it
has grown tenfold.
"""

from __future__ import annotations

import socket
from collections.abc import Callable

from manyhands.threads import start_thread

MAX_HOSTS = 10
"""Hosts whose refusal is reported, with the reason."""
FIRST_COUNT = 100
"""The first total that is reported."""


class RefusedPeers:
    """For a Listener's `on_refused`."""

    def __init__(
        self,
        tell: Callable[[str], None],
        tell_count: Callable[[str], None] = lambda text: None,
    ) -> None:
        """`tell` reports a host; `tell_count` reports the total."""
        self.count = 0
        self._tell = tell
        self._tell_count = tell_count
        self._next = FIRST_COUNT
        self._known: set[str] = set()

    def __call__(self, peer: str, reason: object) -> None:
        self.count += 1
        if self.count == self._next:
            self._next *= 10
            self._tell_count(
                f"{self.count:,} connections were refused so far, the last from {peer}"
            )
        host = peer.rpartition(":")[0] or peer
        if host in self._known or len(self._known) >= MAX_HOSTS:
            return
        self._known.add(host)
        # Looking up its name may take a while.
        start_thread(
            *(self._report, host, reason),
            name="lookup",
            on_error=lambda error: self._tell(f"a process on {host} was refused: {reason}"),
        )

    def _report(self, host: str, reason: object) -> None:
        try:
            name = socket.gethostbyaddr(host)[0]
        except OSError:
            name = ""
        shown = f"{name} ({host})" if name and name != host else host
        text = "it has another key" if "unknown ca" in str(reason).lower() else str(reason)
        self._tell(f"a process on {shown} was refused: {text}")
