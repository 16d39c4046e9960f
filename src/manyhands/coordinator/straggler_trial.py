"""Finds stragglers that slow a run down more than they help, by trying instead of guessing.

A CPU next to a GPU gets a small share of a batch, and all wait for the exchange with it. Whether it helps
depends on the model, the batch and the machine: a large GPU takes as long for half of a batch as for all of
it, an old one does not. So a run in lockstep with very different workers measures its throughput once they
have their shares, and again without the slow ones. If it is faster, they stay out; if not, they come back.

    together    measure with all workers
    leaving     the slow ones leave, one a view
    without     measure without them
    apart       faster: they stay out, as long as that holds
    settled     not faster: they are back, or on their way

When a worker dies, or the run is resized, the trial starts over with all workers.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum

from manyhands.coordinator.throughput import Throughput
from manyhands.coordinator.worker_pool import WorkerPool

WINDOW_S = 3.0
"""Length of a measurement; only time with work to do counts."""
WINDOW_STEPS = 10
WARM_S = 1.0
"""Time before a measurement in which no worker's share may change."""
WORTHWHILE = 1.05
"""Minimum gain of speed without the slow workers: noise must not remove any."""
CLEARLY_SLOWER = 0.8
"""Ratio after the first few steps below which no full measurement is needed."""
CLEAR_STEPS = 3
MUCH_SLOWER = 4.0
"""Minimum ratio of the fastest worker's speed to a slow one's; next to other devices, a CPU always is
slow."""
MAX_TRIALS = 3


class Meter:
    """Samples per second, over the time with work to do."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._busy_since: float | None = None
        self.begin()

    def begin(self) -> None:
        self.samples = self.steps = 0
        self._seconds = 0.0
        if self._busy_since is not None:
            self._busy_since = self._clock()

    def note(self, samples: int) -> None:
        """Count a step."""
        self.samples += samples
        self.steps += 1

    def busy(self, busy: bool) -> None:
        """Set whether there is work to do from now on."""
        self._seconds = self.seconds
        self._busy_since = self._clock() if busy else None

    @property
    def seconds(self) -> float:
        since = self._busy_since
        return self._seconds + (self._clock() - since if since is not None else 0.0)

    @property
    def full(self) -> bool:
        return self.seconds >= WINDOW_S and self.steps >= WINDOW_STEPS

    @property
    def per_s(self) -> float:
        return self.samples / self.seconds

    def take(self) -> float:
        """Return the throughput and start over."""
        per_s = self.per_s
        self.begin()
        return per_s


class TrialPhase(StrEnum):
    TOGETHER = "together"
    LEAVING = "leaving"
    WITHOUT = "without"
    APART = "apart"
    SETTLED = "settled"


class StragglerTrial:
    def __init__(self, pool: WorkerPool, meter: Meter, notice: Callable[[str], None]) -> None:
        self.phase = TrialPhase.TOGETHER
        self._pool = pool
        self._meter = meter
        self._notice = notice
        self._num_changes = pool.num_changes
        self._workers: Sequence[str] = ()
        self._parts: Mapping[str, float] = {}
        self._warm = False
        """If true, no share has changed for a while, and the speed of each worker is known."""
        self._slow: list[str] = []
        self._names = ""
        self._together = 0.0
        self._trials = 0
        self._doubts = 0

    def tick(self, throughput: Throughput) -> None:
        """Continue the trial. Not called while a view is being joined."""
        pool = self._pool
        if pool.num_changes != self._num_changes:
            self._num_changes = pool.num_changes
            self._to(TrialPhase.TOGETHER)
            pool.take_back()
        if (pool.workers, throughput.parts) != (self._workers, self._parts):
            self._workers, self._parts = pool.workers, throughput.parts
            self._begin()
        if self.phase == TrialPhase.LEAVING and not set(self._slow) & set(pool.workers):
            self._to(TrialPhase.WITHOUT)
        watched = self.phase in (TrialPhase.TOGETHER, TrialPhase.WITHOUT, TrialPhase.APART)
        if not watched or pool.changes_soon:
            return
        if self.phase == TrialPhase.WITHOUT and self._clearly_slower:
            self._judge(self._meter.take())
            return
        speeds = throughput.speeds_of(pool.workers)
        if not self._warm or speeds is None:
            if self._meter.seconds >= WARM_S:
                self._warm = speeds is not None
                self._meter.begin()
        elif not self._meter.full:
            return
        elif self.phase == TrialPhase.TOGETHER:
            self._try(speeds)
        elif self.phase == TrialPhase.WITHOUT:
            self._judge(self._meter.take())
        else:
            self._watch(self._meter.take())

    def _try(self, speeds: Mapping[str, float]) -> None:
        self._together = self._meter.take()
        self._slow = self._find_slow(speeds)
        can_leave_out = self._pool.can_leave_out(len(self._slow)) and self._trials < MAX_TRIALS
        if not self._slow or not can_leave_out:
            self._to(TrialPhase.SETTLED)
            return
        self._trials += 1
        kinds = sorted({self._pool.device_type(name) for name in self._slow})
        self._names = f"{', '.join(self._slow)} ({', '.join(kinds)})"
        self._pool.leave_out(self._slow)
        self._to(TrialPhase.LEAVING)

    def _judge(self, without: float) -> None:
        result = f"{without:,.0f} samples/s without {self._names}, {self._together:,.0f} with"
        left = len(self._workers)
        all_of_them = left + len(self._slow)
        if without > WORTHWHILE * self._together:
            self._notice(f"{result}: left out (--workers {all_of_them}:{all_of_them} keeps all)")
            self._to(TrialPhase.APART)
        else:
            self._notice(f"{result}: started again")
            self._pool.take_back()
            self._to(TrialPhase.SETTLED)

    @property
    def _clearly_slower(self) -> bool:
        meter = self._meter
        enough = meter.steps >= CLEAR_STEPS and meter.seconds >= WARM_S
        return enough and meter.per_s < CLEARLY_SLOWER * self._together

    def _watch(self, without: float) -> None:
        """Keep them out for as long as that is faster."""
        self._doubts = self._doubts + 1 if without < self._together else 0
        if self._doubts == 2:
            self._notice(f"{without:,.0f} samples/s without {self._names} now: started again")
            self._pool.take_back()
            self._to(TrialPhase.SETTLED)

    def _find_slow(self, speeds: Mapping[str, float]) -> list[str]:
        """Return the workers that may slow the run down; never all."""
        fastest = max(speeds.values())
        kinds = {name: self._pool.device_type(name) for name in speeds}
        mixed = len({kind == "cpu" for kind in kinds.values()}) == 2
        return [
            name
            for name, speed in speeds.items()
            if (mixed and kinds[name] == "cpu") or (not mixed and speed * MUCH_SLOWER < fastest)
        ]

    def _to(self, phase: TrialPhase) -> None:
        self.phase = phase
        self._doubts = 0
        self._begin()

    def _begin(self) -> None:
        self._warm = False
        self._meter.begin()
