"""Jobs for the conformance suite: small, without randomness of their own, awkward on purpose.

98 samples in batches of 16 leave a last batch of 2, which has nothing for some of four workers.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from manyhands.job import Job


@dataclass
class Regression(Job):
    """A small network on made-up data: momentum, weight decay, a schedule and clipping at once."""

    samples: int = 98
    batch_size: int = 16
    epochs: int = 3
    lr: float = 0.05
    clip_norm: float | None = 1.0
    width: int = 24
    pause_s: float = 0.0
    """Makes each step slow, so that it can be interrupted."""

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(6, self.width), nn.Tanh(), nn.Linear(self.width, 2))

    def optimizer(self, params: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(params, lr=self.lr, momentum=0.9, weight_decay=1e-3)

    def schedule(self, optimizer: torch.optim.Optimizer, num_steps: int) -> Any:
        return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, max(1, num_steps))

    def data(self) -> TensorDataset:
        return _made_up(self.samples, seed=1)

    def eval_data(self) -> TensorDataset | None:
        return _made_up(31, seed=2)

    def loss(self, output: Any, batch: Any) -> Tensor:
        if self.pause_s:
            time.sleep(self.pause_s)
        return nn.functional.mse_loss(output, batch[1])

    def metrics(self, output: Any, batch: Any) -> dict[str, Any]:
        return {"worst": (output - batch[1]).abs().mean()}


@dataclass
class Adam(Regression):
    """The same with Adam."""

    lr: float = 0.01

    def optimizer(self, params: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(params, lr=self.lr)


@dataclass
class Tokens(Regression):
    """Samples of unequal weight, as texts of unequal length are."""

    def loss(self, output: Any, batch: Any) -> Tensor:
        weights = batch[2]
        errors = ((output - batch[1]) ** 2).mean(dim=1)
        return (errors * weights).sum() / weights.sum()

    def weight(self, batch: Any) -> Tensor:
        weight: Tensor = batch[2].sum()
        return weight

    def data(self) -> TensorDataset:
        inputs, targets = _made_up(self.samples, seed=1).tensors
        weights = torch.randint(1, 9, (self.samples,), generator=torch.Generator().manual_seed(3))
        return TensorDataset(inputs, targets, weights.float())

    def eval_data(self) -> None:
        return None


@dataclass
class Dropout(Regression):
    """With random numbers in the model, so that a resumed run must draw the same ones."""

    def model(self) -> nn.Module:
        return nn.Sequential(
            nn.Linear(6, self.width), nn.Tanh(), nn.Dropout(0.3), nn.Linear(self.width, 2)
        )


def _made_up(samples: int, *, seed: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(samples, 6, generator=generator)
    truth = torch.randn(6, 2, generator=torch.Generator().manual_seed(0))
    return TensorDataset(inputs, torch.sin(inputs @ truth))
