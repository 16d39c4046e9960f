"""Workers that hold the others up more than they help: found by trying, not by guessing.

A CPU beside a GPU gets little of a batch, and all wait for the exchange with it. Whether that pays depends on
the model, the batch and the machine: a large GPU takes as long for half of a batch as for all of it, an old
one does not. So a run in lockstep whose workers are very unlike measures itself, once they have their shares,
and again without the slow ones. If it is faster so, they stay out; if not, they come back.

    together    all take part; how fast is that?
    leaving     the slow ones leave, one a view
    without     how fast is it without them?
    apart       faster: they stay out, as long as that is so
    settled     not faster: they are back, or on their way

When a worker dies, or another number of them is asked for, all begin together again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from typing import Protocol

from manyhands.coordinator.throughput import Throughput

WINDOW_S = 3.0
"""How long a measurement takes, of the time in which there was something to do."""
WINDOW_STEPS = 10
WARM_S = 1.0
"""The time before, in which nobody's share may change."""
WORTH = 1.05
"""So much faster it has to be without the slow ones: nobody is sent away for noise."""
PLAIN = 0.8
"""Slower than this by the first few steps, and nothing more needs to be measured."""
PLAIN_STEPS = 3
MUCH = 4.0
"""So many times slower than the fastest is slow, here; and a CPU beside anything else."""
MOST_TRIALS = 3


class Meter:
    """Samples a second, of the time in which there was something to do."""

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
        """One more step is done."""
        self.samples += samples
        self.steps += 1

    def busy(self, busy: bool) -> None:
        """Whether there is something to do from now on."""
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
        """What was measured; begins anew."""
        per_s = self.per_s
        self.begin()
        return per_s


class TrialPhase(StrEnum):
    TOGETHER = "together"
    LEAVING = "leaving"
    WITHOUT = "without"
    APART = "apart"
    SETTLED = "settled"


class TrialPool(Protocol):
    """The workers, as far as a trial needs them (see worker_pool.py)."""

    num_changes: int

    @property
    def workers(self) -> Sequence[str]: ...
    @property
    def changes_soon(self) -> bool: ...
    def device_type(self, worker: str) -> str: ...
    def can_leave_out(self, number: int) -> bool: ...
    def leave_out(self, workers: Sequence[str]) -> None: ...
    def take_back(self) -> None: ...


class StragglerTrial:
    def __init__(self, pool: TrialPool, meter: Meter, notice: Callable[[str], None]) -> None:
        self.phase = TrialPhase.TOGETHER
        self._pool = pool
        self._meter = meter
        self._notice = notice
        self._num_changes = pool.num_changes
        self._workers: Sequence[str] = ()
        self._parts: Mapping[str, float] = {}
        self._warm = False
        """Nobody's share has changed for a while, and everybody's speed is known."""
        self._slow: list[str] = []
        self._names = ""
        self._together = 0.0
        self._trials = 0
        self._doubts = 0

    def tick(self, throughput: Throughput) -> None:
        """Whatever happened; but not while a view is being joined."""
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
        if self.phase == TrialPhase.WITHOUT and self._plainly_slower:
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
        self._slow = self._slow_ones(speeds)
        can_leave_out = self._pool.can_leave_out(len(self._slow)) and self._trials < MOST_TRIALS
        if not self._slow or not can_leave_out:
            self._to(TrialPhase.SETTLED)
            return
        self._trials += 1
        kinds = sorted({self._pool.device_type(name) for name in self._slow})
        self._names = f"{', '.join(self._slow)} ({', '.join(kinds)})"
        self._pool.leave_out(self._slow)
        self._to(TrialPhase.LEAVING)

    def _judge(self, without: float) -> None:
        told = f"{without:,.0f} samples/s without {self._names}, {self._together:,.0f} with"
        left = len(self._workers)
        all_of_them = left + len(self._slow)
        if without > WORTH * self._together:
            self._notice(f"{told}: left out (--workers {all_of_them}:{all_of_them} keeps all)")
            self._to(TrialPhase.APART)
        else:
            self._notice(f"{told}: taken back")
            self._pool.take_back()
            self._to(TrialPhase.SETTLED)

    @property
    def _plainly_slower(self) -> bool:
        meter = self._meter
        enough = meter.steps >= PLAIN_STEPS and meter.seconds >= WARM_S
        return enough and meter.per_s < PLAIN * self._together

    def _watch(self, without: float) -> None:
        """They are out for as long as that is faster."""
        self._doubts = self._doubts + 1 if without < self._together else 0
        if self._doubts == 2:
            self._notice(f"{without:,.0f} samples/s without {self._names} by now: taken back")
            self._pool.take_back()
            self._to(TrialPhase.SETTLED)

    def _slow_ones(self, speeds: Mapping[str, float]) -> list[str]:
        """Those that may be a brake, never all."""
        fastest = max(speeds.values())
        kinds = {name: self._pool.device_type(name) for name in speeds}
        mixed = len({kind == "cpu" for kind in kinds.values()}) == 2
        return [
            name
            for name, speed in speeds.items()
            if (mixed and kinds[name] == "cpu") or (not mixed and speed * MUCH < fastest)
        ]

    def _to(self, phase: TrialPhase) -> None:
        self.phase = phase
        self._doubts = 0
        self._begin()

    def _begin(self) -> None:
        self._warm = False
        self._meter.begin()
