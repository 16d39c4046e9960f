"""Facts that a host reports about itself, and measurements between two hosts."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from pathlib import Path

from manyhands.hosts.interfaces import Endpoint
from manyhands.hosts.launchers.local import cores
from manyhands.hosts.machine import available_memory, versions
from manyhands.transport.fields import Count, Finite, Seconds

WATCH_S = 0.3
"""Time for which the cores are watched to see how many are idle."""


@dataclass(frozen=True)
class HostFacts:
    host: str
    cores: Count
    idle_cores: Finite
    memory_bytes: Count
    free_bytes: Count
    versions: dict[str, str]
    address: str = ""
    """Address at which other hosts reach it."""
    interface: str = ""
    ranks: tuple[int, ...] = ()
    """The ranks of the processes there."""

    @classmethod
    def here(cls, host: str, reach: Endpoint) -> HostFacts:
        total, free = available_memory()
        return cls(
            *(host, cores(), idle_cores(), total, free, versions()),
            address=reach.address,
            interface=reach.interface,
        )


@dataclass(frozen=True)
class PairFacts:
    """One host's measurements of its connection to another."""

    one: str
    other: str
    trouble: str = ""
    """Reason why `one` can't reach `other`; if set, there are no measurements."""
    trouble_back: str = ""
    """Reason why `other` can't reach `one`."""
    round_trip_s: Seconds = 0.0
    """Median."""
    clock_s: Finite = 0.0
    """Time by which the clock of `other` is ahead of the clock of `one`."""
    there_bytes_per_s: Finite = 0.0
    back_bytes_per_s: Finite = 0.0

    @property
    def slower_bytes_per_s(self) -> float:
        return min(self.there_bytes_per_s, self.back_bytes_per_s)


def idle_cores(stat: Path = Path("/proc/stat")) -> float:
    """Measure how many of the machine's cores are idle."""
    before = _times(stat)
    time.sleep(WATCH_S)
    idle, total = (after - old for old, after in zip(before, _times(stat), strict=True))
    return cores() * idle / total if total else float(cores())


def _times(stat: Path) -> tuple[int, int]:
    match = re.search(r"^cpu +([\d ]+)$", stat.read_text(), re.MULTILINE)
    assert match is not None
    times = [int(word) for word in match[1].split()]
    return times[3] + times[4], sum(times[:8])  # idle and iowait; all but guest time
