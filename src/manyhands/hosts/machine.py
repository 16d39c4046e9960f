"""Facts about the machine that this process runs on, without loading torch."""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import platform
import re
import socket
import tempfile
from dataclasses import dataclass
from pathlib import Path

import manyhands
from manyhands.hosts import cgroup
from manyhands.hosts.launchers.local import cores

MEMINFO = Path("/proc/meminfo")


@dataclass(frozen=True)
class Machine:
    host: str
    identity: str
    """The same for two processes that share memory, process numbers, network and temporary files."""
    cores: int
    gpus: int
    versions: dict[str, str]

    @classmethod
    def here(cls) -> Machine:
        gpus = len(list(Path("/dev").glob("nvidia[0-9]*")))
        return cls(socket.gethostname(), identity(), cores(), gpus, versions())

    def __str__(self) -> str:
        parts = [_count(self.cores, "core")]
        if self.gpus:
            parts.append(_count(self.gpus, "GPU"))
        return ", ".join(parts)


def identity() -> str:
    """Identify what processes share: two machines may have one name, and two containers one kernel."""
    folder = os.stat(tempfile.gettempdir())
    parts = [socket.gethostname(), str(os.getuid()), f"{folder.st_dev}:{folder.st_ino}"]
    for space in ("pid", "net"):
        parts.append(os.readlink(f"/proc/self/ns/{space}"))
    parts.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:32]


def available_memory() -> tuple[int, int]:
    """Return the bytes that this process may use in all, and how many of them are free."""
    total, available = machine_memory(MEMINFO)
    if (limit := cgroup.memory_limit()) is not None and limit.limit_bytes < total:
        left = max(0, limit.limit_bytes - limit.used_bytes)
        total, available = limit.limit_bytes, min(available, left)
    return total, available


def machine_memory(meminfo: Path) -> tuple[int, int]:
    """Return the machine's memory and how much of it is available, in bytes."""
    kb = dict(re.findall(r"^(\w+):\s+(\d+) kB$", meminfo.read_text(), re.MULTILINE))
    return int(kb["MemTotal"]) * 1024, int(kb["MemAvailable"]) * 1024


def versions() -> dict[str, str]:
    """Return the versions of packages that compute, from metadata: the coordinator does not load torch."""
    return {
        "manyhands": manyhands.__version__,
        "torch": importlib.metadata.version("torch"),
        "python": platform.python_version(),
    }


def unfit(ours: dict[str, str], theirs: dict[str, str]) -> str:
    """Return why a host's versions exclude it from the run; empty if they don't."""
    for name in ("manyhands", "torch"):
        mine, other = ours[name], str(theirs.get(name, "none"))
        # The minor version of torch must match, and all of that of manyhands: its messages have no version.
        parts = 2 if name == "torch" else 9
        if mine.split(".")[:parts] != other.split(".")[:parts]:
            return f"it has {name} {other}, and the coordinator {name} {mine}"
    return ""


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
