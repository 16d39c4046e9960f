"""Who knocks at the coordinator's door and is not let in: told to whoever watches, by host."""

from __future__ import annotations

import socket
from collections.abc import Callable

from manyhands.threads import start_thread

MAX_STRANGERS = 100
"""Hosts whose refusal is told."""


class Strangers:
    """For a Listener's `on_refused`. Each host is told once: it may try again and again."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        self._tell = tell
        self._known: set[str] = set()

    def __call__(self, who: str, why: object) -> None:
        host = who.rpartition(":")[0] or who
        if host in self._known or len(self._known) > MAX_STRANGERS:
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
