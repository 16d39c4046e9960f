"""Measures: numbers that a job logs with `self.log(name, value)` in loss() or metrics().

Each is a mean over its batch. Like the loss, it is averaged over micro-batches and workers by their weights.
A value stays on its device until the step is reported, so logging does not wait for the device. Workers send
name -> [sum of value times weight, weight], and the coordinator divides.
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
"""Names that a step has already; on TensorBoard they are train/loss and so on."""

Sums = dict[str, list[float]]
"""Name to [sum of value times weight, weight]."""
Logged = list[tuple[str, Any, Any]]
"""Name, value and weight; the numbers may be on a device."""


class Measures:
    """The measures of one step of one worker."""

    def __init__(self) -> None:
        self._logged: Logged = []

    @contextmanager
    def weighted(self, weight: Any) -> Iterator[None]:
        """Collect what is logged inside the block, with the weight of the batch."""
        with collecting() as logged:
            yield
        self._logged += [(name, checked(name, value), weight) for name, value in logged]

    def take(self) -> Logged:
        """Return and forget the measures of the step so far."""
        taken, self._logged = self._logged, []
        return taken


def checked(name: Any, value: Any) -> Any:
    """Check a logged value; return a copy of it, on its device."""
    if not isinstance(name, str) or not name.strip():
        raise JobError(f'self.log({name!r}, ...): the name is a string, such as "grad_penalty".')
    if name in TAKEN:
        raise JobError(
            f"self.log({name!r}, ...): a step has its own {name!r}. Choose another name, such as "
            f'"my_{name}".'
        )
    if isinstance(value, Real):
        return float(value)
    if hasattr(value, "detach") and value.dim() == 0:
        value = value.detach()
        # A copy: a logged parameter would change before it is read.
        return float(value) if value.device.type == "cpu" else value.float().clone()
    shape = f" of shape {tuple(value.shape)}" if hasattr(value, "shape") else ""
    raise JobError(
        f"self.log({name!r}, ...): the value must be a number or a scalar tensor, the mean over the batch; "
        f"it is {type(value).__name__}{shape}."
    )


def add_up(logged: Iterable[tuple[str, float, float]]) -> Sums:
    """Sum up names, values and weights."""
    sums: Sums = {}
    for name, value, weight in logged:
        add_to(sums, name, value * weight, weight)
    return sums


def add_to(sums: Sums, name: str, total: float, weight: float) -> None:
    pair = sums.setdefault(name, [0.0, 0.0])
    pair[0] += total
    pair[1] += weight


def means(parts: Iterable[Mapping[str, Sequence[float]]]) -> dict[str, float]:
    """Return the mean of each measure over the parts of all workers; not all parts have all measures."""
    sums: Sums = {}
    for part in parts:
        for name, (total, weight) in part.items():
            add_to(sums, name, total, weight)
    return {name: total / weight if weight else math.nan for name, (total, weight) in sums.items()}
