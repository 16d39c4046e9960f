"""Evaluation on all workers: each takes a contiguous part of the data, by its speed; the coordinator adds up.

A metric's mean over the whole set is the weighted mean of the workers' means, so nothing but a few
numbers a worker travels.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from manyhands.compute.feed import gather
from manyhands.compute.measures import add_up, checked
from manyhands.compute.train_state import checked_weight, evaluating, job_loss, to_device, wrong
from manyhands.job import Job, collecting


def evaluate(
    job: Job,
    model: nn.Module,
    dataset: Any,
    *,
    part: tuple[float, float, float] = (0, 1, 1),
    device: str,
    progress: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """This worker's part (from, to, of how much): {"samples", "sums": {name: [weighted sum, weight]}}."""
    start, stop = (int(len(dataset) * end / part[2]) for end in part[:2])
    sums: dict[str, list[float]] = {}
    size = max(1, job.batch_size // job.accumulate)
    with evaluating(model), torch.no_grad():
        for low in range(start, stop, size):
            indices = torch.arange(low, min(stop, low + size))
            batch = to_device(gather(job, dataset, indices, 0), device)
            with collecting() as logged:
                loss, output = job_loss(job, model, batch)
                metrics = job.metrics(output, batch)
            if not isinstance(metrics, Mapping):
                raise wrong(job, "metrics", "a dict of name to number", metrics)
            own = job.weight(batch)
            weight = float(len(indices) if own is None else checked_weight(own))
            # What metrics() returns counts, where the job logs the same name for its training.
            found = {"loss": loss, **metrics}
            for name, value in {**found, **_means(logged), **found}.items():
                pair = sums.setdefault(name, [0.0, 0.0])
                if weight:  # a mean over nothing is NaN, and counts nothing
                    pair[0] += _number(job, name, value) * weight
                    pair[1] += weight
            progress()
    return {"samples": stop - start, "sums": sums}


def _means(logged: Sequence[tuple[str, Any]]) -> dict[str, float]:
    """What the job has logged of a batch; of a name that it has logged several times, the mean."""
    sums = add_up((name, float(checked(name, value)), 1.0) for name, value in logged)
    return {name: total / count for name, (total, count) in sums.items()}


def _number(job: Job, name: str, value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError):
        wanted = f"a number or a scalar tensor for {name!r}"
        raise wrong(job, "metrics", wanted, value) from None
