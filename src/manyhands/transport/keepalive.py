"""Keep-alive: notice within seconds that the other end of a connection is unreachable.

A pulled cable notifies nobody. A side that only receives waits forever, unless its kernel sends keep-alive
probes. A side that sends retransmits for a quarter of an hour before Linux gives up, so a thread watches the
retransmissions. In both cases the other host's kernel answers, so a process that is busy, stopped or does not
read breaks nothing. (With TCP_USER_TIMEOUT it would.)
"""

from __future__ import annotations

import functools
import socket
import time
import weakref
from collections.abc import Callable, Iterable
from contextlib import suppress

from manyhands.threads import fail_process, start_thread

PROBE_EVERY_S = 3
NUM_PROBES = 5
MAX_RETRANSMITS = 7
"""Retransmissions in a row: with pauses that double from a fifth of a second, about 25 seconds."""
LOOK_S = 2.0
_RETRANSMITS = 2
"""The offset of that number in Linux's tcp_info."""

_watched: weakref.WeakSet[socket.socket] = weakref.WeakSet()


def watch(sock: socket.socket) -> None:
    """Shut a connection down when it becomes unreachable; its readers and writers get an error. Does nothing
    if it is not TCP."""
    if ask_now_and_then(sock):
        _watched.add(sock)
        _look_after_watched()


@functools.cache
def _look_after_watched() -> None:
    look_after(lambda: list(_watched), until=lambda: False)


def look_after(
    connections: Callable[[], Iterable[socket.socket]], *, until: Callable[[], bool]
) -> None:
    """Keep shutting down unreachable connections, in a thread of its own."""

    def look() -> None:
        while not until():
            time.sleep(LOOK_S)
            for connection in connections():
                if unreached(connection):
                    with suppress(OSError):
                        socket.socket.shutdown(connection, socket.SHUT_RDWR)

    start_thread(look, name="silence", on_error=fail_process)


def ask_now_and_then(sock: socket.socket) -> bool:
    """Turn keep-alive probes on. Returns False if it is not a TCP connection, or this is not Linux."""
    try:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, PROBE_EVERY_S)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, PROBE_EVERY_S)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, NUM_PROBES)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    except (OSError, AttributeError):
        return False
    return True


def unreached(sock: socket.socket) -> bool:
    """Return whether the other end has stopped acknowledging."""
    with suppress(OSError, AttributeError):
        return (
            sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 8)[_RETRANSMITS] >= MAX_RETRANSMITS
        )
    return False
