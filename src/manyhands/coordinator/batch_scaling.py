"""Scales the batch and the learning rate with the number of workers (`--scale-batch`). Pure.

The job's `batch_size` and learning rate are for a *reference* number of workers, r. With w workers the
global batch is batch_size * w / r, so that each has as many samples as there, and the learning rate is
multiplied by w / r (`linear`: Goyal et al. 2017, "Accurate, Large Minibatch SGD") or by its square root
(`sqrt`: Krizhevsky 2014, "One weird trick for parallelizing convolutional neural networks"). A larger
factor is reached over a warm-up, as in Goyal et al.; a smaller one applies at once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

NONE, LINEAR, SQRT = "none", "linear", "sqrt"
RULES = (NONE, LINEAR, SQRT)
WARMUP = 100
"""Default number of warm-up steps."""


@dataclass(frozen=True)
class Scaling:
    rule: str = NONE
    reference: int = 1
    """The number of workers that the job's batch_size and learning rate are for."""
    warmup: int = WARMUP
    """Steps until a larger factor is reached."""

    @property
    def on(self) -> bool:
        return self.rule != NONE

    def batch(self, batch_size: int, world: int) -> int:
        """Return the global batch for a number of workers: the nearest whole number."""
        if not self.on:
            return batch_size
        return max(1, (2 * batch_size * world + self.reference) // (2 * self.reference))

    def factor(self, world: int) -> float:
        """Return the factor of the learning rate for a number of workers."""
        if not self.on:
            return 1.0
        ratio = world / self.reference
        return math.sqrt(ratio) if self.rule == SQRT else ratio


FIXED = Scaling()
"""No scaling: batch and learning rate are the job's."""


@dataclass(frozen=True)
class Ramp:
    """A factor on its way from one value to another."""

    start: float = 1.0
    end: float = 1.0
    since: int = 0
    """The last step with `start`."""
    over: int = 0
    """Steps from there to the first with `end`."""

    def at(self, step: int) -> float:
        done = step - self.since
        if done <= 0:
            return self.start
        if done >= self.over:
            return self.end
        return self.start + (self.end - self.start) * done / self.over

    def left(self, step: int) -> int:
        """Return the number of steps after this one until the first with `end`; 0: the next one has it."""
        return max(0, self.since + self.over - step) if self.over > 1 else 0

    def turn(self, end: float, *, step: int, over: int) -> Ramp:
        """Approach another end after this step: over a warm-up if it is higher, else at once."""
        now = self.at(step)
        return Ramp(now, end, step, over if end > now else 0)
