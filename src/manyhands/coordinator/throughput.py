"""How fast each worker computes, and which part of a batch it should have so that all end together. Pure.

What counts is the time that a worker computes, not the time that it waits for others: the slow one is who
computes long while the others wait. Parts stay equal until other ones would make a step shorter by a good
deal: small differences are noise, and equal parts add up in the same order in every run.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from statistics import median

MEMORY_S = 3.0
"""Seconds of computing after which a measurement counts a third."""
KNOWN_AFTER_S = 1.5
"""Seconds of computing before a worker's speed is believed."""
WORTH = 1.15
"""A step has to become so many times shorter for parts to change."""
KEPT = 0.2
"""Of what was measured, when parts change: who has a fixed cost in each step has another speed now."""
SLOW = 1.5
"""A worker that takes so many times as long as the median for a sample is told of."""
AGAIN = 5.0
"""And again when it has become so many times slower, or faster, since."""
LEAST = 1e-4
"""Of the fastest's part. In whole samples it may be none, but now and then (see dispatch.py): a worker that
has nothing to do would never be known to be fast again."""


@dataclass
class Speed:
    samples: float = 0.0
    seconds: float = 0.0
    """Both of late, what is longer ago counting less."""
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
    """Of a batch, as they are now, in proportion to each other; who is not in it has the mean."""
    told: dict[str, float] = field(default_factory=dict)
    """Who is known to be slow, and how much."""

    def note(self, worker: str, samples: int, seconds: float) -> None:
        """It has computed so many samples in so many seconds."""
        if samples and seconds > 0.0:
            self.speeds.setdefault(worker, Speed()).add(samples, seconds)

    def weights(self, workers: Sequence[str]) -> list[float]:
        """The parts of a batch for these workers, in proportion."""
        now = self._parts_of(workers)
        known = self.speeds_of(workers)
        if known is None:
            return now
        speeds = list(known.values())
        best = 1.0 / sum(speeds)
        as_is = max(part / speed for part, speed in zip(now, speeds, strict=True)) / sum(now)
        if as_is < WORTH * best:
            return now
        fastest = max(speeds)
        rounded = [max(LEAST, round(speed / fastest, 4)) for speed in speeds]
        self.parts = dict(zip(workers, rounded, strict=True))
        for worker in workers:
            self.speeds[worker].fade(KEPT)
        return rounded

    def news(self, workers: Collection[str]) -> list[tuple[str, float]]:
        """Workers slower than the median, and how many times: once each, again when that changed a lot."""
        speeds = self.speeds_of(workers)
        if speeds is None or len(speeds) < 2:
            return []
        usual = median(speeds.values()) if len(speeds) > 2 else max(speeds.values())
        found = []
        for worker, speed in speeds.items():
            times, before = usual / speed, self.told.get(worker)
            if times < SLOW:
                if before is not None and times < (1 + SLOW) / 2:
                    del self.told[worker]
            elif before is None or not 1 / AGAIN < times / before < AGAIN:
                self.told[worker] = times
                found.append((worker, times))
        return found

    def speeds_of(self, workers: Collection[str]) -> dict[str, float] | None:
        """Samples a second of each; None as long as one is not known well enough."""
        speeds = {worker: self.speeds.get(worker, Speed()) for worker in workers}
        if any(speed.known_s < KNOWN_AFTER_S for speed in speeds.values()):
            return None
        return {worker: speed.per_s for worker, speed in speeds.items()}

    def _parts_of(self, workers: Sequence[str]) -> list[float]:
        known = [self.parts[worker] for worker in workers if worker in self.parts]
        usual = sum(known) / len(known) if known else 1.0
        return [self.parts.get(worker, usual) for worker in workers]
