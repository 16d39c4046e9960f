"""How far a worker has computed in the current view, and how long a portion takes it. Pure.

What is computed need not be in the weights yet: in a training in rounds, it is once the round has ended. How
far ahead orders are dispatched depends on what is computed, so that no worker waits for an order within a
round; what is committed depends on what is in the weights (progress.py).
"""

from __future__ import annotations

KEPT = 0.9
"""Weight of earlier portions in the mean time, after each new one."""


class ComputedPortions:
    """The portions that one worker has computed."""

    def __init__(self) -> None:
        self.num = 0
        """In this view."""
        self.step_s = 0.0
        """Mean time of a recent portion; 0 if none is known."""
        self._seconds = 0.0
        self._num_rows = 0

    def note(self, num: int, seconds: float) -> None:
        """Note a worker's report: how many it has computed in this view, and the time they took."""
        new = num - self.num
        if new <= 0:
            return
        each = max(0.0, seconds - self._seconds) / new
        kept = KEPT**new if self.step_s else 0.0
        self.step_s = kept * self.step_s + (1 - kept) * each
        self.num, self._seconds = num, seconds

    def note_row(self, step_s: float) -> None:
        """Note a report of one portion, which also says that it is computed."""
        self._num_rows += 1
        self.note(self._num_rows, self._seconds + step_s)

    def begin_view(self) -> None:
        self.num = self._num_rows = 0
        self._seconds = 0.0
