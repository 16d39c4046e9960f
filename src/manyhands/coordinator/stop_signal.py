"""A signal that asks the run to stop. The first one stops it with a checkpoint, the next one at once."""

from __future__ import annotations

import signal
import time

from manyhands.errors import Interrupted

PREEMPTED = 75
"""Exit code of a run that a scheduler stopped, and that can be resumed."""


class StopSignal:
    def __init__(self, stop_s: float) -> None:
        """`stop_s`: how long the checkpoint may take."""
        self.number: int | None = None
        self._stop_s = stop_s
        self._deadline = 0.0

    @property
    def received(self) -> bool:
        return self.number is not None

    def receive(self, number: int, *, can_save: bool, restarted: bool) -> str | None:
        """Handle a signal. Returns the outcome to stop the plan with, or None if it changes nothing.

        `can_save`: a checkpoint of this start can be written. `restarted`: the run has started again from a
        checkpoint, so that there may be one all the same.
        """
        name = signal.Signals(number).name
        if self.number == signal.SIGUSR1 and number == signal.SIGTERM:
            return (
                None  # schedulers warn first and then stop: the run is stopping since the warning
            )
        by_user = number == signal.SIGINT
        if self.received or not can_save:
            code = 130 if by_user else 128 + number
            if not self.received and restarted and not by_user:
                code = PREEMPTED  # everything that can be saved is saved already
            raise Interrupted(f"Stopped at once by {name}.", exit_code=code)
        self.number, self._deadline = number, time.monotonic() + self._stop_s
        return "interrupted" if by_user else "preempted"

    def check_deadline(self) -> None:
        if self.number is not None and time.monotonic() > self._deadline:
            raise Interrupted(
                f"The checkpoint took more than {self._stop_s:.0f} s; stopped.",
                exit_code=128 + self.number,
            )
