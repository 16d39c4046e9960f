"""What a process can tell of the machine that it stands on, without loading torch."""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import platform
import socket
import tempfile
from dataclasses import dataclass
from pathlib import Path

import manyhands
from manyhands.hosts.launchers.local import cores


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
    """Two machines may have one name, and two containers one kernel: what counts is what is shared."""
    folder = os.stat(tempfile.gettempdir())
    parts = [socket.gethostname(), str(os.getuid()), f"{folder.st_dev}:{folder.st_ino}"]
    for space in ("pid", "net"):
        parts.append(os.readlink(f"/proc/self/ns/{space}"))
    parts.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:32]


def versions() -> dict[str, str]:
    """Of what computes. Asked of the package's metadata: the coordinator does not load torch."""
    return {
        "manyhands": manyhands.__version__,
        "torch": importlib.metadata.version("torch"),
        "python": platform.python_version(),
    }


def unfit(ours: dict[str, str], theirs: dict[str, str]) -> str:
    """In which version a host differs so that it can't take part; empty if in none."""
    for name in ("manyhands", "torch"):
        mine, other = ours[name], str(theirs.get(name, "none"))
        # Of torch the minor versions count; of manyhands, whose messages have no versions, all.
        parts = 2 if name == "torch" else 9
        if mine.split(".")[:parts] != other.split(".")[:parts]:
            return f"it has {name} {other}, and the coordinator {name} {mine}"
    return ""


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
