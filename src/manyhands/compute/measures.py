"""Measures that a job logs with `self.log(name, value)` in loss() or metrics(); see manyhands/measure.py.

What is logged is combined over micro-batches and workers by the rule that the job declares in measures(); by
default it is a mean, weighted like the loss. A value stays on its device until the step is reported, so
logging does not wait for the device. Workers send name -> (number, weight); the coordinator combines them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from numbers import Real
from typing import Any

from manyhands.errors import JobError
from manyhands.job import Job, collecting
from manyhands.measure import STEP_MEASURES, Measure, Pair, add_to, registered

Logged = list[tuple[Measure, Any, Any]]
"""Measure, value and weight; the numbers may be on a device."""


class Measures:
    """The measures that a job declares, and what it logs in one step of one worker."""

    def __init__(self, declared: Mapping[str, Measure] | None = None) -> None:
        self.declared = dict(declared or {})
        self._known = dict(self.declared)
        """With those that it logs without declaring them."""
        self._logged: Logged = []

    @contextmanager
    def weighted(self, weight: Any) -> Iterator[None]:
        """Collect what is logged inside the block, with the weight of the batch."""
        with collecting() as logged:
            yield
        for name, value in logged:
            number, measure = checked(name, value), self._known.get(name)
            if measure is None:
                measure = self._known[name] = Measure(name)
            self._logged.append((measure, number, weight))

    def take(self) -> Logged:
        """Return and forget the measures of the step so far."""
        taken, self._logged = self._logged, []
        return taken


def declared_by(job: Job) -> dict[str, Measure]:
    """Return the measures that the job declares, by name; JobError if they can't be used."""
    where = f"{type(job).__name__}.measures()"
    declared: dict[str, Measure] = {}
    listed = job.measures()
    if not isinstance(listed, list | tuple) or not all(isinstance(m, Measure) for m in listed):
        raise JobError(
            f'{where} must return a list such as [mh.Measure("tokens", unit="tokens", rule="sum")], and '
            f"returned {listed!r}."
        )
    for measure in listed:
        _check_name(measure.name, f"{where}, Measure({measure.name!r}, ...)")
        if measure.name in registered():
            raise JobError(
                f"{where}: {measure.name!r} is a measure of manyhands. Choose another name, such as "
                f'"my_{measure.name}".'
            )
        if declared.setdefault(measure.name, measure) != measure:
            raise JobError(f"{where} has two different measures {measure.name!r}.")
    return declared


def checked(name: Any, value: Any) -> Any:
    """Check a logged value; return a copy of it, on its device."""
    _check_name(name, f"self.log({name!r}, ...)")
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


def _check_name(name: Any, where: str) -> None:
    if not isinstance(name, str) or not name.strip():
        raise JobError(f'{where}: the name is a string, such as "grad_penalty".')
    if name in STEP_MEASURES:
        raise JobError(
            f'{where}: a step has its own {name!r}. Choose another name, such as "my_{name}".'
        )


def add_up(logged: Iterable[tuple[Measure, float, float]]) -> dict[str, Pair]:
    """Combine measures, values and weights, in their order."""
    sums: dict[str, Pair] = {}
    for measure, value, weight in logged:
        add_to(sums, measure.name, measure.pair(value, weight), measure.rule)
    return sums
