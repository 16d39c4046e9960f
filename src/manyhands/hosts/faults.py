"""Injects a network fault: resets one of a process's connections.

Needs pidfd_getfd (Linux 5.6) and the permission to inspect that process, which a parent usually has.
"""

from __future__ import annotations

import ctypes
import errno
import os
import random
import socket
import stat
from contextlib import suppress

PIDFD_GETFD = 438
"""The number of that system call; the C library of Python 3.11 has no name for it."""


def cut_a_link(pid: int, rng: random.Random, *, but_port: int = 0) -> bool:
    """Reset one of a child's TCP connections, as a broken network would: both of its ends live.

    Connections to `but_port` are not reset. PermissionError if this process may not inspect the child.
    """
    with suppress(FileNotFoundError, ProcessLookupError):
        descriptors = sorted(os.listdir(f"/proc/{pid}/fd"), key=int)
        rng.shuffle(descriptors)
        process = os.pidfd_open(pid)
        try:
            return any(_reset(process, int(number), but_port) for number in descriptors)
        finally:
            os.close(process)
    return False


def _reset(process: int, number: int, but_port: int) -> bool:
    """Disconnect a descriptor of another process; false if it is not a connection."""
    libc = ctypes.CDLL(None, use_errno=True)
    copied = libc.syscall(PIDFD_GETFD, process, number, 0)
    if copied < 0:
        error = ctypes.get_errno()
        if error == errno.EBADF:
            return False  # closed meanwhile
        raise OSError(error, os.strerror(error))
    if not stat.S_ISSOCK(os.fstat(copied).st_mode):
        os.close(copied)
        return False
    with socket.socket(fileno=copied) as sock:
        if sock.family not in (socket.AF_INET, socket.AF_INET6) or sock.type != socket.SOCK_STREAM:
            return False
        try:
            peer = sock.getpeername()
        except OSError:
            return False  # it listens
        if peer[1] == but_port:
            return False
        nowhere = bytes(16)  # connecting to AF_UNSPEC disconnects the socket and resets the peer
        return int(libc.connect(sock.fileno(), nowhere, len(nowhere))) == 0
