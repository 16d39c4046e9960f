"""Processes on a lab's hosts: how they get there, who they are, and how they end."""

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


def entrance(record: Record, index: int, *, dies_with_parent: bool) -> list[str]:
    """What to write before a command so that it runs on a host. The process stays the same one."""
    name, namespace = record.name_file(index), record.layout.namespaces[index]
    inside = [*_path("nsenter"), f"--uts={name}", *_path("ip"), "netns", "exec", namespace]
    return [*_path("setpriv"), "--pdeathsig", "KILL", *inside] if dies_with_parent else inside


def _path(tool: str) -> list[str]:
    return [find(tool) or tool]


def inside(namespaces: Iterable[str]) -> list[int]:
    """The processes in network namespaces, given by name."""
    wanted = {number for name in namespaces if (number := _identity(NAMESPACES / name))}
    pids = [int(entry) for entry in os.listdir("/proc") if entry.isdigit()]
    return [pid for pid in pids if _identity(Path(f"/proc/{pid}/ns/net")) in wanted]


def kill_inside(namespaces: Iterable[str]) -> None:
    """Kill all processes in network namespaces but this one, and wait until they are gone."""
    namespaces = tuple(namespaces)
    deadline = time.monotonic() + KILLED_WITHIN_S
    # Again and again: what is killed may have started another a moment before.
    while left := [pid for pid in inside(namespaces) if pid != os.getpid()]:
        if time.monotonic() > deadline:
            raise LabError(f"Processes {left} in {', '.join(namespaces)} do not die of SIGKILL.")
        for pid in left:
            _kill(pid, namespaces)
        time.sleep(0.005)


def _kill(pid: int, namespaces: tuple[str, ...]) -> None:
    """Kill a process if it still is in one of the namespaces."""
    with suppress(ProcessLookupError):
        # The descriptor means this process and never one that gets the same number later; so what
        # is looked at is what is killed.
        handle = os.pidfd_open(pid)
        try:
            here = {_identity(NAMESPACES / name) for name in namespaces}
            if _identity(Path(f"/proc/{pid}/ns/net")) in here - {None}:
                signal.pidfd_send_signal(handle, signal.SIGKILL)
        finally:
            os.close(handle)


def _identity(path: Path) -> tuple[int, int] | None:
    """What tells a namespace from all others; None if it or its process is gone."""
    try:
        status = path.stat()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return None
    return status.st_dev, status.st_ino
