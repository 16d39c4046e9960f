"""Numbers that a job logs: `self.log(name, value)` in its loss() or metrics().

Each is a mean over its batch, and counts as the loss does: over micro-batches and workers by their weights.
In a worker a value stays on its device until the step is reported, so that logging waits for nothing.
A measure travels as name -> [sum of value times weight, weight]; the coordinator divides.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from numbers import Real
from typing import Any

from manyhands.errors import JobError
from manyhands.job import collecting

TAKEN = ("loss", "lr", "samples_per_s", "staleness", "lr_factor", "batch_size")
"""What a step has already; on TensorBoard these are train/loss and so on."""

Sums = dict[str, list[float]]
"""Name to [sum of value times weight, weight]."""
Logged = list[tuple[str, Any, Any]]
"""Name, value and weight, each perhaps still on a device."""


class Measures:
    """What a job has logged in one step of one worker."""

    def __init__(self) -> None:
        self._logged: Logged = []

    @contextmanager
    def weighted(self, weight: Any) -> Iterator[None]:
        """What is logged here is of a batch that counts so much."""
        with collecting() as logged:
            yield
        self._logged += [(name, checked(name, value), weight) for name, value in logged]

    def take(self) -> Logged:
        """Of the step so far; forgets it."""
        taken, self._logged = self._logged, []
        return taken


def checked(name: Any, value: Any) -> Any:
    """A value as it was when it was logged, on its device."""
    if not isinstance(name, str) or not name.strip():
        raise JobError(f'self.log({name!r}, ...): the name is a text, such as "grad_penalty".')
    if name in TAKEN:
        raise JobError(
            f"self.log({name!r}, ...): a step has its own {name!r}. Choose another name, such as "
            f'"my_{name}".'
        )
    if isinstance(value, Real):
        return float(value)
    if hasattr(value, "detach") and value.dim() == 0:
        value = value.detach()
        # A copy: the job may log a parameter, which changes before anybody reads it.
        return float(value) if value.device.type == "cpu" else value.float().clone()
    shape = f" of shape {tuple(value.shape)}" if hasattr(value, "shape") else ""
    raise JobError(
        f"self.log({name!r}, ...): the value is a number or a scalar tensor, the mean over the batch; it is "
        f"{type(value).__name__}{shape}."
    )


def add_up(logged: Iterable[tuple[str, float, float]]) -> Sums:
    sums: Sums = {}
    for name, value, weight in logged:
        pair = sums.setdefault(name, [0.0, 0.0])
        pair[0] += value * weight
        pair[1] += weight
    return sums


def means(parts: Sequence[Mapping[str, Sequence[float]]]) -> dict[str, float]:
    """Of each measure over all workers' parts; a part may know nothing of it."""
    names = dict.fromkeys(name for part in parts for name in part)
    found = {}
    for name in names:
        pairs = [part.get(name, (0.0, 0.0)) for part in parts]
        weight = sum(pair[1] for pair in pairs)
        found[name] = sum(pair[0] for pair in pairs) / weight if weight else math.nan
    return found
