"""Measures how long training stands still after a death. Pure.

    last progress  --detection-->  death noticed  --view-->  all joined  --redo-->  first new progress

Progress is a committed step, or an evaluation. A step counts as new if it was not committed before: after a
restart from a checkpoint, steps are first done again. Further deaths before that belong to the same recovery,
and their time is in `view_s`.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RecoveryTimes:
    detection_s: float
    """From the last progress before the death until it was noticed."""
    view_s: float
    """Until all members had joined the next view."""
    redo_s: float
    """Until the first new progress."""
    redone_steps: int
    """Number of steps that were dispatched again."""

    @property
    def seconds(self) -> float:
        return self.detection_s + self.view_s + self.redo_s


class RecoveryClock:
    def __init__(self) -> None:
        self._last: float | None = None
        """Time of the last progress; None before training begins."""
        self._stopped: float | None = None
        """The last progress before the death; None: there is no recovery."""
        self._noticed = 0.0
        self._joined: float | None = None
        self._redone_steps = 0
        self._steps_before = 0

    def active(self, now: float) -> None:
        """Training has begun, or an evaluation is advancing."""
        self._last = now if self._last is None else max(now, self._last)

    def lost(self, now: float) -> None:
        """A member has died."""
        if self._stopped is None:
            self._stopped = now if self._last is None else self._last
            self._noticed = now
        self._joined = None

    def joined(self, now: float, *, redone_steps: int, steps_before: int = 0) -> None:
        """All members have joined the next view. Only steps above `steps_before` are new."""
        if self._stopped is not None:
            self._joined = now
            self._redone_steps += redone_steps
            self._steps_before = max(self._steps_before, steps_before)

    def progress(self, now: float, step: int) -> RecoveryTimes | None:
        """The step is committed or evaluated. Returns the times if the run has recovered with it."""
        self._last = now
        if self._joined is None or step <= self._steps_before:
            return None
        return self._end(now)

    def ended(self) -> RecoveryTimes | None:
        """Training has ended. Returns the times if nothing was left to do after a death."""
        return None if self._joined is None else self._end(self._joined)

    def _end(self, now: float) -> RecoveryTimes:
        assert self._stopped is not None
        assert self._joined is not None
        times = RecoveryTimes(
            detection_s=self._noticed - self._stopped,
            view_s=self._joined - self._noticed,
            redo_s=now - self._joined,
            redone_steps=self._redone_steps,
        )
        self._stopped = self._joined = None
        self._redone_steps = self._steps_before = 0
        return times
