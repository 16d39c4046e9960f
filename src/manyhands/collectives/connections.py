"""The connections of a group: told apart from other sockets of the process, watched, counted, and shut down.

gloo does not tell which sockets are its own. They are the TCP connections that were opened while it
connected. That can be wrong for connections that another thread opens at that moment; those are shut down,
too, if the group is cut.
"""

from __future__ import annotations

import fcntl
import os
import socket
import struct
import termios
from collections.abc import Iterator
from contextlib import suppress

from manyhands.transport.keepalive import ask_now_and_then

_TCP_INFO = struct.Struct("@120xQ")
"""`tcpi_bytes_acked` in `struct tcp_info`, since Linux 4.1. `tcpi_bytes_sent` would count twice what TCP
sends again, which a busy machine does even on loopback: 64 kB at a time."""
_QUEUED = struct.Struct("@i")


class Connections:
    """The TCP connections that were opened since `before`; none if that is None. Not those that listen: gloo
    ends the process if one of them is shut down."""

    def __init__(self, before: dict[int, str] | None) -> None:
        self._sockets: dict[int, str] = {}
        """File descriptor to identity of the socket."""
        now = {} if before is None else open_sockets()
        for number, identity in now.items():
            if before is None or before.get(number) == identity:
                continue
            with suppress(OSError), socket.socket(fileno=os.dup(number)) as made:
                tcp = made.family in (socket.AF_INET, socket.AF_INET6)
                if tcp and not made.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    self._sockets[number] = identity
                    ask_now_and_then(made)
        self._bytes_sent: dict[int, int] = {}
        """Last count by file descriptor; that of a connection stays when it is closed."""

    def __len__(self) -> int:
        return len(self._sockets)

    def __iter__(self) -> Iterator[socket.socket]:
        """Yield duplicates of those that are still open; each is closed when the next is asked for."""
        now = open_sockets()
        for number, identity in self._sockets.items():
            if now.get(number) != identity:
                continue  # closed; the number may belong to another file by now
            with suppress(OSError), socket.socket(fileno=os.dup(number)) as connection:
                yield connection

    def bytes_sent(self) -> int | None:
        """Return the bytes that were written so far, as the kernel counts them: acknowledged, under way or
        waiting in its queues, each byte once. None if it does not count, or if there are no connections.
        Takes about 5 us per connection: cheap enough for every step."""
        for number, identity in self._sockets.items():
            with suppress(OSError):
                if f"socket:[{os.fstat(number).st_ino}]" != identity:
                    continue
                # With family and type given, Python does not ask the kernel for them.
                kind = (socket.AF_INET, socket.SOCK_STREAM, 0)
                with socket.socket(*kind, fileno=os.dup(number)) as connection:
                    info = connection.getsockopt(
                        socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size
                    )
                if len(info) < _TCP_INFO.size:
                    return None
                # Read second: what is acknowledged in between is missing from this count, not in it twice.
                queued = fcntl.ioctl(number, termios.TIOCOUTQ, bytes(_QUEUED.size))
                count = _TCP_INFO.unpack(info)[0] + _QUEUED.unpack(queued)[0]
                self._bytes_sent[number] = max(count, self._bytes_sent.get(number, 0))
        return sum(self._bytes_sent.values()) if self._bytes_sent else None

    def shut_down(self) -> None:
        """End every wait for a peer, here and there."""
        for connection in self:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)


def open_sockets() -> dict[int, str]:
    """Return the sockets of this process: file descriptor to identity. Empty without /proc."""
    found = {}
    with suppress(OSError):
        for name in os.listdir("/proc/self/fd"):
            with suppress(OSError):
                link = os.readlink(f"/proc/self/fd/{name}")
                if link.startswith("socket:"):
                    found[int(name)] = link
    return found
