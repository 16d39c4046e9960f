"""Stops all workers of a run at the same step, to count and measure exactly there. See `jobs.Gated`."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from pathlib import Path

from manyhands.testing.harness import DEADLINE_S, RunningCommand
from manyhands.testing.traffic import tcp_bytes_sent

STEADY_S = 0.5
"""A count that has not changed for this long is final."""


class Gates:
    def __init__(self, folder: Path, running: RunningCommand, *, workers: int) -> None:
        self.folder = folder
        self._running = running
        self._workers = workers

    def wait(self, number: int, *, least: int | None = None) -> None:
        """Wait until all workers are at a gate, or at least so many: without lockstep, those that stopped
        may keep the others from getting any work."""
        deadline = time.monotonic() + DEADLINE_S
        while self.num_at(number) < (least or self._workers):
            over = self._running.process.poll() is not None or time.monotonic() > deadline
            assert not over, f"not all workers came to gate {number}:\n{self._running.logs()}"
            time.sleep(0.02)

    def num_at(self, number: int) -> int:
        """Return how many workers have come to a gate."""
        return len(list(self.folder.glob(f"at-{number}-*")))

    def open(self, number: int) -> None:
        (self.folder / f"go-{number}").touch()

    def computed(self) -> int:
        """Return how many micro-batches all workers have computed or begun."""
        return sum(int(path.read_text()) for path in self.folder.glob("computed-*"))

    def bytes_sent(self) -> int:
        """Return the kernel's count of bytes that the members have sent over TCP, once it stands still."""
        pids = list(self._running.pids().values())
        before, since = -1, time.monotonic()
        while time.monotonic() - since < STEADY_S:
            if (now := tcp_bytes_sent(pids)) != before:
                before, since = now, time.monotonic()
            time.sleep(0.05)
        return before

    def memory(self) -> int:
        """Return the memory of all members: what processes share is counted once."""
        return memory_of(list(self._running.pids().values()))


def memory_of(pids: Sequence[int]) -> int:
    """Return the proportional set size of processes, as the kernel counts it."""
    total = 0
    for pid in pids:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
        found = re.search(r"^Pss:\s+(\d+) kB", text, re.MULTILINE)
        assert found is not None
        total += int(found.group(1)) << 10
    return total
