"""Evaluation on all workers: each takes a contiguous part of the data, the coordinator adds up.

A metric's mean over the whole set is the weighted mean of the workers' means, so nothing but a few
numbers a worker travels.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from manyhands.job import Job
from manyhands.train.feed import gather
from manyhands.train.trainee import checked_weight, evaluating, job_loss, to_device, wrong


def evaluate(
    job: Job, model: nn.Module, dataset: Any, *, rank: int, world: int, device: str
) -> dict[str, Any]:
    """This worker's part: {"samples", "weight", "sums": {name: weighted sum}}."""
    start, stop = len(dataset) * rank // world, len(dataset) * (rank + 1) // world
    sums: dict[str, float] = {}
    weight_sum = 0.0
    with evaluating(model), torch.no_grad():
        for low in range(start, stop, job.batch_size):
            indices = torch.arange(low, min(stop, low + job.batch_size))
            batch = to_device(gather(job, dataset, indices, 0, low), device)
            loss, output = job_loss(job, model, batch)
            metrics = job.metrics(output, batch)
            if not isinstance(metrics, Mapping):
                raise wrong(job, "metrics", "a dict of name to number", metrics)
            own = job.weight(batch)
            weight = float(len(indices) if own is None else checked_weight(own))
            weight_sum += weight
            for name, value in {"loss": loss, **metrics}.items():
                sums[name] = sums.get(name, 0.0) + _number(job, name, value) * weight
    return {"samples": stop - start, "weight": weight_sum, "sums": sums}


def _number(job: Job, name: str, value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError):
        wanted = f"a number or a scalar tensor for {name!r}"
        raise wrong(job, "metrics", wanted, value) from None
