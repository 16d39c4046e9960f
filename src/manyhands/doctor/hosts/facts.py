"""What a host says of itself, and what was measured between two. Both travel as JSON."""

from __future__ import annotations

import dataclasses
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from manyhands.doctor.machine import available_memory
from manyhands.hosts.launchers import cores
from manyhands.hosts.machine import versions

WATCH_S = 0.3
"""How long the cores are watched to see how many are idle."""


@dataclass(frozen=True)
class HostFacts:
    host: str
    cores: int
    idle_cores: float
    memory_bytes: int
    free_bytes: int
    versions: Mapping[str, str]
    address: str = ""
    """Where the others find it."""
    interface: str = ""
    ranks: tuple[int, ...] = ()
    """Of the processes there."""

    @classmethod
    def here(cls, host: str) -> HostFacts:
        total, free = available_memory()
        return cls(host, cores(), idle_cores(), total, free, versions())

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> HostFacts:
        """Checked as far as it is used: what comes from another version may lack anything."""
        known = {field.name for field in dataclasses.fields(cls)}
        given = {name: value for name, value in values.items() if name in known}
        return cls(**{**given, "ranks": tuple(given.get("ranks", ()))})


@dataclass(frozen=True)
class PairFacts:
    """Measured by the one towards the other."""

    one: str
    other: str
    trouble: str = ""
    """Why `one` does not reach `other`; then there are no numbers."""
    trouble_back: str = ""
    """Why `other` does not reach `one`."""
    round_trip_s: float = 0.0
    """Median."""
    clock_s: float = 0.0
    """What the clock of `other` is ahead of that of `one`."""
    there_bytes_per_s: float = 0.0
    back_bytes_per_s: float = 0.0

    @property
    def slower_bytes_per_s(self) -> float:
        return min(self.there_bytes_per_s, self.back_bytes_per_s)

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def idle_cores(stat: Path = Path("/proc/stat")) -> float:
    """How many cores had nothing to do, of those of the machine."""
    before = _times(stat)
    time.sleep(WATCH_S)
    idle, total = (after - old for old, after in zip(before, _times(stat), strict=True))
    return cores() * idle / total if total else float(cores())


def _times(stat: Path) -> tuple[int, int]:
    match = re.search(r"^cpu +([\d ]+)$", stat.read_text(), re.MULTILINE)
    assert match is not None
    times = [int(word) for word in match[1].split()]
    return times[3] + times[4], sum(times[:8])  # idle and waiting for disks; all but guests'
