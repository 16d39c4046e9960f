"""The minimum for training together inside a host, as a baseline for the parameter server.

The parameters exist once in shared memory, the gradients once per worker. Between two barriers, each worker
sums its part of all gradients and updates it. There is no handling of failures, and there are no reports.
"""

from __future__ import annotations

import os

import ps_torch
import torch
from ps_load import Load
from torch import Tensor, nn

SPINS = 1000
"""Looks before a waiting worker lets others run."""


class Together:
    """A barrier of processes: a count of each in shared memory, looked at until all are there."""

    def __init__(self, rank: int, workers: int, folder: str) -> None:
        self._counts = _shared(folder, "counts", workers, torch.int64).numpy()
        self._rank, self._count = rank, 0

    def wait(self) -> None:
        self._count += 1
        self._counts[self._rank] = self._count
        looks = 0
        while self._counts.min() < self._count:
            looks += 1
            if looks > SPINS:
                os.sched_yield()


class Trainer:
    def __init__(self, model: nn.Module, rank: int, load: Load, folder: str) -> None:
        numel = sum(p.numel() for p in model.parameters())
        self._model = model
        self._together = Together(rank, load.workers, folder)
        self._params = _shared(folder, "params", numel, torch.float32)
        grads = [_shared(folder, f"grads-{r}", numel, torch.float32) for r in range(load.workers)]
        start = 0
        for parameter in model.parameters():
            stop = start + parameter.numel()
            place = self._params[start:stop].view_as(parameter)
            place.copy_(parameter.detach())  # the same by all
            parameter.data = place
            parameter.grad = grads[rank][start:stop].view_as(parameter)
            start = stop
        self._grads = grads[rank]
        begin, end = (numel * r // load.workers for r in (rank, rank + 1))
        self._parts = [each[begin:end] for each in grads]
        self._mine = nn.Parameter(self._params[begin:end])
        self._optimizer = ps_torch.make_optimizer([self._mine])

    def step(self, inputs: Tensor, targets: Tensor) -> None:
        self._grads.zero_()
        ps_torch.loss_of(self._model(inputs), targets).backward()
        self._together.wait()
        total = self._parts[0].clone()
        for part in self._parts[1:]:
            total += part
        self._mine.grad = total.div_(len(self._parts))
        self._optimizer.step()
        self._together.wait()


def _shared(folder: str, name: str, numel: int, dtype: torch.dtype) -> Tensor:
    """Zeros that all processes of a crew have in common, in the crew's folder, which is memory."""
    return torch.from_file(f"{folder}/{name}", shared=True, size=numel, dtype=dtype)
