"""Processes on the hosts of a lab: start, list, kill."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from manyhands.errors import LabError
from manyhands.lab.network import NAMESPACES
from manyhands.lab.records import Record
from manyhands.lab.tools import find

KILLED_WITHIN_S = 10.0


def enter_command(record: Record, index: int, *, dies_with_parent: bool) -> list[str]:
    """Return the prefix that makes a command run on a host, in the same process."""
    name, namespace = record.name_file(index), record.layout.namespaces[index]
    setpriv, nsenter, ip = (find(tool) or tool for tool in ("setpriv", "nsenter", "ip"))
    inside = [nsenter, f"--uts={name}", ip, "netns", "exec", namespace]
    return [setpriv, "--pdeathsig", "KILL", *inside] if dies_with_parent else inside


def inside(namespaces: Iterable[str]) -> list[int]:
    """Return the processes in these network namespaces."""
    targets = {number for name in namespaces if (number := _identity(NAMESPACES / name))}
    pids = [int(entry) for entry in os.listdir("/proc") if entry.isdigit()]
    return [pid for pid in pids if _identity(Path(f"/proc/{pid}/ns/net")) in targets]


def kill_inside(namespaces: Iterable[str]) -> None:
    """Kill all processes in these network namespaces except this one, and wait until they are gone."""
    namespaces = tuple(namespaces)
    deadline = time.monotonic() + KILLED_WITHIN_S
    # Repeat: a killed process may have started another just before.
    while left := [pid for pid in inside(namespaces) if pid != os.getpid()]:
        if time.monotonic() > deadline:
            raise LabError(f"Processes {left} in {', '.join(namespaces)} survived SIGKILL.")
        for pid in left:
            _kill(pid, namespaces)
        time.sleep(0.005)


def _kill(pid: int, namespaces: tuple[str, ...]) -> None:
    """Kill a process if it still is in one of the namespaces."""
    with suppress(ProcessLookupError):
        # The descriptor refers to this process, never to a later one with the same id, so the process
        # that is checked is the one that is killed.
        handle = os.pidfd_open(pid)
        try:
            here = {_identity(NAMESPACES / name) for name in namespaces}
            if _identity(Path(f"/proc/{pid}/ns/net")) in here - {None}:
                signal.pidfd_send_signal(handle, signal.SIGKILL)
        finally:
            os.close(handle)


def _identity(path: Path) -> tuple[int, int] | None:
    """Return what identifies a namespace; None if it or its process is gone."""
    try:
        status = path.stat()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return None
    return status.st_dev, status.st_ino
