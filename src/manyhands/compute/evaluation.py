"""Evaluation on all workers: each takes a contiguous part of the data, sized by its speed.

The mean of a metric over the whole set is the weighted mean over the workers, so each worker sends only a few
numbers to the coordinator.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from manyhands.compute.feed import gather
from manyhands.compute.measures import Sums, add_to, add_up, checked
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
    """Evaluate this worker's part: the samples from part[0] to part[1] of part[2].

    Returns {"samples": number, "sums": {name: [sum of value times weight, weight]}}.
    """
    start, stop = (int(len(dataset) * end / part[2]) for end in part[:2])
    sums: Sums = {}
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
            # metrics() wins over a logged value of the same name.
            found = {"loss": loss, **metrics}
            for name, value in {**found, **_means(logged), **found}.items():
                # A mean over nothing may be NaN.
                add_to(sums, name, _number(job, name, value) * weight if weight else 0.0, weight)
            progress()
    return {"samples": stop - start, "sums": sums}


def _means(logged: Sequence[tuple[str, Any]]) -> dict[str, float]:
    """Return the mean of the values that a job logged under each name, for one batch."""
    sums = add_up((name, float(checked(name, value)), 1.0) for name, value in logged)
    return {name: total / count for name, (total, count) in sums.items()}


def _number(job: Job, name: str, value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError):
        wanted = f"a number or a scalar tensor for {name!r}"
        raise wrong(job, "metrics", wanted, value) from None
