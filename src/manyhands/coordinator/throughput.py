"""Throughput of each worker, and the shares of a batch with which all finish together. Pure.

Shares belong to replicas, of one worker or several that compute the same samples. A replica is as fast as
its slowest worker.

Only computing time counts, not waiting: the slow worker is the one that computes while the others wait.
Shares stay equal until others would make a step much shorter: small differences are noise, and with equal
shares sums are added in the same order in every run.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from statistics import median

MEMORY_S = 3.0
"""Seconds of computing after which the weight of a measurement has fallen to a third."""
KNOWN_AFTER_S = 1.5
"""Seconds of computing before a worker's speed counts as known."""
WORTH = 1.15
"""Minimum speedup of a step for which shares change."""
KEPT = 0.2
"""Weight of earlier measurements after shares change: a worker with a fixed cost per step has a new speed."""
SLOW = 1.5
"""A worker is reported if it takes this many times as long per sample as the median."""
AGAIN = 5.0
"""Factor of change of that ratio after which it is reported again."""
LEAST = 1e-4
"""The smallest share, relative to the fastest worker's. In whole samples it may be none, except now and then
(see dispatch.py): otherwise a worker that has become fast would never be noticed."""


@dataclass
class Speed:
    samples: float = 0.0
    seconds: float = 0.0
    """Recent samples and seconds; older ones count less."""
    known_s: float = 0.0
    """Seconds measured since the start."""

    def add(self, samples: int, seconds: float) -> None:
        self.fade(math.exp(-seconds / MEMORY_S))
        self.samples += samples
        self.seconds += seconds
        self.known_s += seconds

    def fade(self, factor: float) -> None:
        self.samples *= factor
        self.seconds *= factor

    @property
    def per_s(self) -> float:
        return self.samples / self.seconds


@dataclass
class Throughput:
    speeds: dict[str, Speed] = field(default_factory=dict)
    parts: dict[str, float] = field(default_factory=dict)
    """Current shares of a batch, in proportion, by worker: all workers of a replica have the replica's. A
    worker that is not in it has the mean."""
    reported: dict[str, float] = field(default_factory=dict)
    """Workers that were reported as slow, and how slow."""

    def note(self, worker: str, samples: int, seconds: float) -> None:
        """Count samples that a worker has computed, and the time it took."""
        if samples and seconds > 0.0:
            self.speeds.setdefault(worker, Speed()).add(samples, seconds)

    def weights(self, replicas: Sequence[Sequence[str]]) -> list[float]:
        """Return the shares of a batch for these replicas, in proportion."""
        workers = [worker for replica in replicas for worker in replica]
        now = self._parts_of(replicas)
        known = self.speeds_of(workers)
        if known is None:
            return now
        speeds = [min(known[worker] for worker in replica) for replica in replicas]
        best = 1.0 / sum(speeds)
        as_is = max(part / speed for part, speed in zip(now, speeds, strict=True)) / sum(now)
        if as_is < WORTH * best:
            return now
        fastest = max(speeds)
        rounded = [max(LEAST, round(speed / fastest, 4)) for speed in speeds]
        self.parts = {
            worker: part
            for replica, part in zip(replicas, rounded, strict=True)
            for worker in replica
        }
        for worker in workers:
            self.speeds[worker].fade(KEPT)
        return rounded

    def news(self, workers: Collection[str]) -> list[tuple[str, float]]:
        """Return the workers to report as slow now, with how many times slower than the median they are."""
        speeds = self.speeds_of(workers)
        if speeds is None or len(speeds) < 2:
            return []
        usual = median(speeds.values()) if len(speeds) > 2 else max(speeds.values())
        found = []
        for worker, speed in speeds.items():
            times, before = usual / speed, self.reported.get(worker)
            if times < SLOW:
                if before is not None and times < (1 + SLOW) / 2:
                    del self.reported[worker]
            elif before is None or not 1 / AGAIN < times / before < AGAIN:
                self.reported[worker] = times
                found.append((worker, times))
        return found

    def speeds_of(self, workers: Collection[str]) -> dict[str, float] | None:
        """Return the samples per second of each; None until all are known well enough."""
        speeds = {worker: self.speeds.get(worker, Speed()) for worker in workers}
        if any(speed.known_s < KNOWN_AFTER_S for speed in speeds.values()):
            return None
        return {worker: speed.per_s for worker, speed in speeds.items()}

    def _parts_of(self, replicas: Sequence[Sequence[str]]) -> list[float]:
        firsts = [replica[0] for replica in replicas]
        known = [self.parts[worker] for worker in firsts if worker in self.parts]
        usual = sum(known) / len(known) if known else 1.0
        return [self.parts.get(worker, usual) for worker in firsts]
