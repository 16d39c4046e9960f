"""The benchmark's model, optimizer and data in torch, the same for every contender that uses torch."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

import torch
from ps_load import LEARNING_RATE, MOMENTUM, POOL, Load
from torch import Tensor, nn


def make_model(widths: Iterable[int]) -> nn.Module:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for fan_in, fan_out in pairwise(widths):
        layers += [nn.Linear(fan_in, fan_out), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def make_optimizer(parameters: Iterable[Tensor]) -> torch.optim.Optimizer:
    # Fused for all: a parameter server should not win by a faster optimizer.
    return torch.optim.SGD(parameters, lr=LEARNING_RATE, momentum=MOMENTUM, fused=True)


def make_data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(POOL, 784, generator=generator)
    return inputs, torch.randint(0, 10, (POOL,), generator=generator)


def loss_of(output: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output, targets)


class Batches:
    """Batch after batch of one worker, each gathered by an index, as a data set would be."""

    def __init__(self, load: Load, rank: int) -> None:
        self._inputs, self._targets = make_data()
        self._order = torch.randperm(POOL, generator=torch.Generator().manual_seed(1))
        self._batch, self._world, self._next = load.batch, load.workers, rank

    def take(self) -> tuple[Tensor, Tensor]:
        start = self._next * self._batch % (POOL - self._batch)
        self._next += self._world
        index = self._order[start : start + self._batch]
        return self._inputs.index_select(0, index), self._targets.index_select(0, index)
