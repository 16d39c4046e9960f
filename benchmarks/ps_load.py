"""The load of the parameter-server benchmark: the shape of a model, a batch, a number of steps.

Imports neither torch nor any other package, so that the scripts of all peers can read it. The models are
perceptrons with ReLU between their layers, trained by SGD with momentum on synthetic data.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from itertools import pairwise

POOL = 4096
"""Samples in memory; longer trainings go round."""
LEARNING_RATE = 1e-3
"""Small: weights that grow or vanish would change the speed of the arithmetic."""
MOMENTUM = 0.9


@dataclass(frozen=True)
class Model:
    widths: tuple[int, ...]
    batch: int
    """Samples a worker and step."""
    steps: int
    """Timed steps when each worker has a core."""
    warm_up: int

    @property
    def parameters(self) -> int:
        return sum(fan_in * fan_out + fan_out for fan_in, fan_out in pairwise(self.widths))

    def __str__(self) -> str:
        count = f"{self.parameters / 1e6:.1f} M parameters"
        return f"perceptron {'-'.join(map(str, self.widths))}, {count}, batch {self.batch} a worker"


MODELS = {
    "perceptron": Model((784, 1024, 1024, 10), batch=128, steps=400, warm_up=40),
    "25m": Model((784, *[3328] * 3, 10), batch=128, steps=24, warm_up=4),
    # A smaller batch: a step stays near a second on one core, and communication weighs more.
    "100m": Model((784, *[4032] * 7, 10), batch=32, steps=16, warm_up=3),
}


@dataclass(frozen=True)
class Load:
    """One measurement's work."""

    model: str
    workers: int
    threads: int
    """Compute threads of each worker, and of a peer's server."""
    batch: int
    """Samples a worker and step."""
    steps: int
    """Timed steps."""
    warm_up: int
    """Steps before them."""
    seconds: float
    """A peer that is driven from one place may stop after so long, with fewer steps."""

    @property
    def widths(self) -> tuple[int, ...]:
        return MODELS[self.model].widths

    @property
    def parameter_bytes(self) -> int:
        return 4 * MODELS[self.model].parameters

    @property
    def all_steps(self) -> int:
        return self.warm_up + self.steps

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Load:
        return cls(**json.loads(text))
