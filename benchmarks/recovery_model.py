"""The model and data of the recovery benchmark as plain functions, for the job and the torchrun script."""

from __future__ import annotations

import torch
from torch import Tensor, nn

BATCH = 512
SAVE_EVERY = 25
"""Steps of an epoch; both save after each."""


def perceptron() -> nn.Module:
    return nn.Sequential(nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 10))


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(SAVE_EVERY * BATCH, 784, generator=generator)
    return inputs, torch.randint(0, 10, (len(inputs),), generator=generator)


def optimizer(params) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.01, momentum=0.9)


def loss(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output, target)
