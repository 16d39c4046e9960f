"""Evaluation on all workers: each takes a contiguous part of the data, the coordinator adds up.

A metric's mean over the whole set is the weighted mean of the workers' means, so nothing but a few
numbers a worker travels.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from manyhands.errors import JobError
from manyhands.job import Job
from manyhands.train.feed import gather
from manyhands.train.trainee import job_loss, to_device


def evaluate(
    job: Job, model: nn.Module, dataset: Any, *, rank: int, world: int, device: str
) -> dict[str, Any]:
    """This worker's part: {"samples", "weight", "sums": {name: weighted sum}}."""
    start, stop = len(dataset) * rank // world, len(dataset) * (rank + 1) // world
    sums: dict[str, float] = {}
    weight_sum = 0.0
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            for low in range(start, stop, job.batch_size):
                indices = torch.arange(low, min(stop, low + job.batch_size))
                batch = to_device(gather(job, dataset, indices, 0, low), device)
                loss, output = job_loss(job, model, batch)
                metrics = job.metrics(output, batch)
                if not isinstance(metrics, Mapping):
                    raise JobError(
                        f"{type(job).__name__}.metrics() must return a dict of name to number; "
                        f"it returned {type(metrics).__name__}."
                    )
                own = job.weight(batch)
                weight = float(len(indices) if own is None else own)
                weight_sum += weight
                for name, value in {"loss": loss, **metrics}.items():
                    sums[name] = sums.get(name, 0.0) + float(value) * weight
    finally:
        model.train(training)
    return {"samples": stop - start, "weight": weight_sum, "sums": sums}
