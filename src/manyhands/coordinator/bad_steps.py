"""Count the steps in a row whose loss is not a finite number. Pure.

Without lockstep, steps are committed in any order; a row is counted in the order of commits.
"""

from __future__ import annotations

import math

MAX_BAD_STEPS = 20


class BadSteps:
    def __init__(self, limit: int = MAX_BAD_STEPS) -> None:
        """`limit`: this many in a row are too many; 0: never."""
        self.since: int | None = None
        """The first step of the row, or None after a step with a finite loss."""
        self.count = 0
        self.too_many = False
        """If true, the limit was reached, and counting has stopped."""
        self.limit = limit

    def add(self, step: int, loss: float, *, weight: float = 1.0) -> None:
        """Count a committed step. One without weight has no loss and is skipped."""
        if not weight or self.too_many:
            return
        if math.isfinite(loss):
            self.since, self.count = None, 0
            return
        self.since = step if self.since is None else min(self.since, step)
        self.count += 1
        self.too_many |= 0 < self.limit <= self.count

    def __str__(self) -> str:
        steps = "1 step" if self.count == 1 else f"{self.count} steps"
        return f"no finite loss since step {self.since} ({steps})"
