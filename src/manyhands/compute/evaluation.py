"""Evaluation on all workers: each takes a contiguous part of the data, sized by its speed.

The mean of a metric over the whole set is the weighted mean over the workers, so each worker sends only a few
numbers to the coordinator.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from manyhands.compute.feed import gather
from manyhands.compute.measures import add_up, checked, declared_by
from manyhands.compute.seeds import derive
from manyhands.compute.train_state import (
    call,
    checked_weight,
    evaluating,
    job_loss,
    to_device,
    wrong,
)
from manyhands.errors import JobError
from manyhands.job import Job, collecting
from manyhands.measure import Measure, Pair, add_to, value_of


@dataclass(frozen=True)
class EvalSamples:
    """The samples that a job is evaluated on."""

    dataset: Any
    chosen: Tensor | None = None
    """Their indices; None: all of the data set."""

    @classmethod
    def of(cls, job: Job, dataset: Any) -> EvalSamples:
        """Choose the job's `eval_samples` by its seed: the same ones in every process, and in every resumed
        run."""
        number, there = job.eval_samples, len(dataset)
        if number is None:
            return cls(dataset)
        if number > there:
            raise JobError(
                f"eval_samples is {number}, and the evaluation data has {there} samples. Use  "
                f"--set eval_samples={there}  or fewer, or  --set eval_samples=none  for all."
            )
        generator = torch.Generator().manual_seed(derive(job.seed, "eval_samples"))
        return cls(dataset, torch.randperm(there, generator=generator)[:number].sort().values)

    def __len__(self) -> int:
        return len(self.dataset) if self.chosen is None else len(self.chosen)

    def indices(self, start: int, stop: int) -> Tensor:
        return torch.arange(start, stop) if self.chosen is None else self.chosen[start:stop]

    def first(self, number: int) -> EvalSamples:
        return EvalSamples(self.dataset, self.indices(0, min(number, len(self))))


def evaluate(
    job: Job,
    model: nn.Module,
    samples: EvalSamples,
    *,
    part: tuple[float, float, float] = (0, 1, 1),
    num_forwards: int = 0,
    device: str,
    progress: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """Evaluate this worker's part, (start, stop, total): the samples from start/total to stop/total of the
    set.

    If its batches are fewer than `num_forwards`, the first sample passes through the model for each that is
    missing, and does not count.

    Returns {"samples": number, "sums": {name: (number, weight)}}; see measure.py.
    """
    start, stop = (int(len(samples) * end / part[2]) for end in part[:2])
    declared = declared_by(job)
    sums: dict[str, Pair] = {}
    size = _batch_size(job)
    lows = range(start, stop, size)
    with evaluating(model), torch.no_grad():
        for _ in range(num_forwards - len(lows)):
            batch = to_device(gather(job, samples.dataset, samples.indices(0, 1), 0), device)
            call(model, job.inputs(batch))
            progress()
        for low in lows:
            indices = samples.indices(low, min(stop, low + size))
            batch = to_device(gather(job, samples.dataset, indices, 0), device)
            with collecting() as logged:
                loss, output = job_loss(job, model, batch)
                metrics = job.metrics(output, batch)
            if not isinstance(metrics, Mapping):
                raise wrong(job, "metrics", "a dict of name to number", metrics)
            own = job.weight(batch)
            weight = float(len(indices) if own is None else checked_weight(own))
            # metrics() wins over a logged value of the same name.
            found = {"loss": loss, **metrics}
            for name, value in {**found, **_of_batch(logged, declared), **found}.items():
                measure = declared.get(name) or Measure(name)
                if weight:
                    pair = measure.pair(_number(job, name, value), weight)
                elif measure.rule == "mean":
                    pair = 0.0, 0.0  # a mean over nothing may be NaN
                else:
                    continue
                add_to(sums, name, pair, measure.rule)
            progress()
    return {"samples": stop - start, "sums": sums}


def forwards_each(job: Job, samples: EvalSamples, *, parts: int) -> int:
    """Return the number of batches of the largest of several equal parts."""
    return math.ceil(math.ceil(len(samples) / parts) / _batch_size(job))


def _batch_size(job: Job) -> int:
    return max(1, job.batch_size // job.accumulate)


def _of_batch(
    logged: Sequence[tuple[str, Any]], declared: Mapping[str, Measure]
) -> dict[str, float]:
    """Combine the values that a job logged under each name, for one batch."""
    known = {name: declared.get(name) or Measure(name) for name, _ in logged}
    sums = add_up((known[name], float(checked(name, value)), 1.0) for name, value in logged)
    return {name: value_of(pair, known[name].rule) for name, pair in sums.items()}


def _number(job: Job, name: str, value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError):
        wanted = f"a number or a scalar tensor for {name!r}"
        raise wrong(job, "metrics", wanted, value) from None
