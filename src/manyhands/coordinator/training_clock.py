"""Measures how long a run has trained, over all its starts, without start-up and evaluations. Pure.

    command starts  --start-up-->  training begins  --training, and evaluations in it-->  now

Training is all the time between: steps, pauses for checkpoints, and recoveries, also a restart of all
members from a checkpoint. An evaluation takes as long as its slowest worker. The times are saved with each
checkpoint, so what a start did after its last checkpoint does not count once the run is resumed: neither
its steps nor its time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class TrainingTimes:
    """Times of a run so far, over all its starts."""

    training_s: float = 0.0
    startup_s: float = 0.0
    """From the start of a command until training began."""
    evaluation_s: float = 0.0

    def __add__(self, other: TrainingTimes) -> TrainingTimes:
        return TrainingTimes(
            self.training_s + other.training_s,
            self.startup_s + other.startup_s,
            self.evaluation_s + other.evaluation_s,
        )


class TrainingClock:
    def __init__(self, started: float, saved: Mapping[str, Any] | None = None) -> None:
        """`saved`: the state in the checkpoint that this start resumes from."""
        self._started = started
        self._before: TrainingTimes | None = TrainingTimes()
        """Times of the earlier starts; None if they did not save them."""
        if saved is not None:
            self._before = TrainingTimes(**saved["times"]) if "times" in saved else None
        self._began: float | None = None
        self._evaluation_s = 0.0

    def begin(self, now: float) -> None:
        """Training begins, for the first time in this start."""
        if self._began is None:
            self._began = now

    def evaluated(self, seconds: float) -> None:
        self._evaluation_s += seconds

    def read(self, now: float) -> TrainingTimes | None:
        """Return the times so far; None if those of earlier starts are not known."""
        if self._before is None:
            return None
        if self._began is None:
            return self._before + TrainingTimes(startup_s=now - self._started)
        trained_s = max(0.0, now - self._began - self._evaluation_s)
        return self._before + TrainingTimes(
            trained_s, self._began - self._started, self._evaluation_s
        )

    def state(self, now: float) -> dict[str, Any]:
        """Return the state for a checkpoint."""
        times = self.read(now)
        return {} if times is None else {"times": asdict(times)}
