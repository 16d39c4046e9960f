"""How processes of one host wait for each other: counters in shared memory, and doorbells.

Each member counts what it has done in a counter of its own, which only it writes and all read. The member
that completes a count, so that all have reached a number, wakes the others through their doorbells; nothing
else is sent. Users: the rounds of `ps:sync` (ps/rounds.py) and the all-reduce inside a host
(collectives/shared_sums.py).

Memory order. Counters are 8 bytes at multiples of 8, so x86-64 and arm64 load and store them whole. A
counter is written with release semantics and read with acquire semantics: a process that sees a number also
sees what was written to shared memory before it. To complete a count, a member stores its own counter and
then loads the others'. These two must not be reordered: otherwise two members could each miss the other's
store, and neither would ring. Python has no fences; `SharedCounters.fence` builds a full one from a lock.
"""

from __future__ import annotations

import os
import select
import socket
import threading
from collections.abc import Iterable, Sequence
from contextlib import suppress
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

from manyhands.transport.address import MAX_UNIX_PATH

COUNTER_BYTES = 8
LOOK_S = 0.2
"""Interval at which a waiting member checks that there is still something to wait for."""


class SharedCounters:
    """Columns of counters in shared memory: one counter for each member, and as many columns as there are
    things to count."""

    def __init__(self) -> None:
        self._lock = threading.Lock()

    @staticmethod
    def columns(memory: memoryview, sizes: Sequence[int]) -> list[memoryview]:
        """Cut memory into columns of so many counters; what follows them is the caller's."""
        ends = [0, *accumulate(COUNTER_BYTES * size for size in sizes)]
        flat: Any = memory
        return [flat[a:b].cast("q") for a, b in pairwise(ends)]

    def announce(self, column: memoryview, i: int, number: int) -> bool:
        """Set a counter (release), then return whether all counters of the column have reached it."""
        self.store(column, i, number)
        self.fence()  # store the own counter before loading the others
        return self.reached(column, number)

    def store(self, column: memoryview, i: int, number: int) -> None:
        """Set a counter, with release semantics."""
        self.fence()
        column[i] = number

    def load(self, column: memoryview, i: int) -> int:
        """Read a counter, with acquire semantics."""
        number = int(column[i])
        self.fence()
        return number

    def reached(self, column: memoryview, number: int) -> bool:
        """Return whether all counters of the column have reached the number; if true, acquires."""
        if min(column, default=number) < number:
            return False
        self.fence()
        return True

    def fence(self) -> None:
        """Issue a full memory fence: no load or store is reordered across it, in either direction.

        On x86-64, acquiring a lock is a locked instruction, which is a full fence. On arm64, a lock is
        acquired with a load-acquire and released with a store-release, and these two are never reordered
        with each other (they are RCsc). So everything before the first release stays before everything
        after the second acquire. Costs about 0.1 us; the lock is never contended for long.
        """
        with self._lock:
            pass
        with self._lock:
            pass


class Doorbell:
    """Datagram socket that wakes one member."""

    def __init__(self, folder: Path, name: str) -> None:
        self._path_of_folder = folder
        self._folder = os.open(folder, os.O_PATH | os.O_DIRECTORY)
        self._path = self._path_of(name)
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._sock.setblocking(False)
        with suppress(FileNotFoundError):
            Path(self._path).unlink()
        try:
            self._sock.bind(self._path)
        except OSError:
            self._sock.close()
            os.close(self._folder)
            raise
        self._poll = select.poll()
        self._poll.register(self._sock, select.POLLIN)
        self._watched: list[int] = []
        """Descriptors."""
        self._ended = False
        self.name = name

    def watch(self, connections: Iterable[socket.socket]) -> None:
        """Have these connections to other members end a wait, too, when their other end is closed."""
        for connection in connections:
            # Not connection.dup(): that makes the connection blocking, also for its owner.
            self._watched.append(os.dup(connection.fileno()))
            self._poll.register(self._watched[-1], select.POLLRDHUP)

    def ring(self, names: Iterable[str]) -> None:
        """Wake other members. Errors are ignored: a full or missing doorbell needs no ring."""
        for name in names:
            with suppress(OSError):
                self._sock.sendto(b"!", self._path_of(name))

    def wait(self, timeout_s: float) -> bool:
        """Wait for a ring or the timeout. The ring may be for an event that was handled long ago. Returns
        true if a watched connection has ended by now."""
        for number, _ in self._poll.poll(timeout_s * 1000):
            if number != self._sock.fileno():
                self._ended = True
                self._poll.unregister(number)  # otherwise no wait would last any longer
                continue
            with suppress(OSError):
                for _ in range(64):  # bounded, so that endless rings can't block this member
                    self._sock.recv(16)
        return self._ended

    def close(self) -> None:
        self._sock.close()
        while self._watched:
            os.close(self._watched.pop())
        if self._folder < 0:
            return
        with suppress(OSError):
            Path(self._path).unlink()
        os.close(self._folder)
        self._folder = -1

    def _path_of(self, name: str) -> str:
        path = f"{self._path_of_folder}/bell-{name}"
        if len(os.fsencode(path)) <= MAX_UNIX_PATH:
            return path
        return (
            f"/proc/self/fd/{self._folder}/bell-{name}"  # of any folder, however long its path is
        )
