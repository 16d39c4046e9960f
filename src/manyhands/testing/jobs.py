"""Jobs for the conformance suite: small, without randomness of their own, awkward on purpose.

98 samples in batches of 16 leave a last batch of 2, which has nothing for some of four workers.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from manyhands.embeddings.modules import SparseEmbedding, SparseEmbeddingBag
from manyhands.job import Job

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": torch.optim.SGD,
    "momentum": lambda params, lr: torch.optim.SGD(params, lr, momentum=0.9, weight_decay=1e-3),
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
}


@dataclass
class Regression(Job):
    """A small network on made-up data: momentum, weight decay, a schedule and clipping at once."""

    samples: int = 98
    batch_size: int = 16
    epochs: int = 3
    lr: float = 0.05
    clip_norm: float | None = 1.0
    width: int = 24
    """From 20000 on, parameter servers have ten blocks to spread, and more."""
    optim: str = "momentum"
    """One of OPTIMIZERS."""
    grouped: bool = False
    """Biases are a group of their own: another learning rate, and no weight decay."""
    anneal: bool = True
    """The learning rate falls along a cosine."""
    pause_s: float = 0.0
    """Makes each step slow, so that it can be interrupted."""

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(6, self.width), nn.Tanh(), nn.Linear(self.width, 2))

    def optimizer(self, params: Any, model: nn.Module) -> torch.optim.Optimizer:
        if self.grouped:
            named = dict(model.named_parameters())
            biases = {"lr": 3 * self.lr, "weight_decay": 0.0}
            params = [
                {"params": [p for name, p in named.items() if "bias" in name], **biases},
                {"params": [p for name, p in named.items() if "bias" not in name]},
            ]
        return OPTIMIZERS[self.optim](params, lr=self.lr)

    def schedule(self, optimizer: torch.optim.Optimizer, num_steps: int) -> Any:
        if not self.anneal:
            return None
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
    """The same with Adam, and two groups of parameters."""

    lr: float = 0.01
    grouped: bool = True
    optim: str = "adamw"


@dataclass
class Tokens(Regression):
    """Samples of unequal weight, as texts of unequal length are."""

    def loss(self, output: Any, batch: Any) -> Tensor:
        weights = batch[2]
        errors = ((output - batch[1]) ** 2).mean(dim=1)
        loss: Tensor = (errors * weights).sum() / weights.sum()
        self.log("double", 2 * loss)
        return loss

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


@dataclass
class Sparse(Regression):
    """With two tables beside the dense layers: rows by any id, and bags of them, ids repeating."""

    table_optim: str = "adagrad"

    def model(self) -> nn.Module:
        return Looking(self.width, self.table_optim)

    def data(self) -> TensorDataset:
        inputs, targets = _made_up(self.samples, seed=1).tensors
        ids = torch.randint(0, 40, (self.samples, 5), generator=torch.Generator().manual_seed(4))
        return TensorDataset(inputs, targets, ids * ids * 1_000_003 - 7)

    def eval_data(self) -> None:
        return None

    def inputs(self, batch: Any) -> Any:
        return batch[0], batch[2]


@dataclass
class Passing(Sparse):
    """Ids that come once and never again, in a table that drops what was not used for a while."""

    samples: int = 1600
    batch_size: int = 8
    epochs: int = 1
    unused: int = 20
    """Steps; 0: it drops none."""

    def model(self) -> nn.Module:
        model = Looking(self.width, self.table_optim)
        unused = self.unused or None
        model.rows = SparseEmbedding(None, 4, optimizer=self.table_optim, evict_unused=unused)
        return model

    def data(self) -> TensorDataset:
        inputs, targets = _made_up(self.samples, seed=1).tensors
        ids = torch.arange(self.samples).unsqueeze(1).expand(-1, 5)
        return TensorDataset(inputs, targets, ids)


class Looking(nn.Module):
    def __init__(self, width: int, optimizer: str) -> None:
        super().__init__()
        options: dict[str, Any] = {"optimizer": optimizer, "init": "normal(0.3)"}
        self.rows = SparseEmbedding(None, 4, lr=0.1, **options)
        self.bags = SparseEmbeddingBag(None, 3, mode="sum", **options)
        self.body = nn.Sequential(nn.Linear(6 + 2 * 4 + 3, width), nn.Tanh(), nn.Linear(width, 2))

    def forward(self, inputs: Tensor, ids: Tensor) -> Tensor:
        rows = self.rows(ids[:, :2]).flatten(1)
        seen: Tensor = self.body(torch.cat([inputs, rows, self.bags(ids[:, 2:])], dim=1))
        return seen


@dataclass
class Straggling(Regression):
    """One worker, the first to begin, is slower than the others, and all write down what they do."""

    samples: int = 1600
    epochs: int = 1
    pause_s: float = 0.01
    """For each step of a worker."""
    sample_s: float = 0.0
    """For each sample besides."""
    slow_by: float = 10.0
    """What it is multiplied by for the slow one; 1: there is none."""
    diary: str = ""
    """A file that gets a line "process id, slow or not" whenever a worker begins to compute."""

    def __post_init__(self) -> None:
        self._slow = False
        self._pages = -1

    def loss(self, output: Any, batch: Any) -> Tensor:
        if self._pages < 0:
            self._pages = os.open(self.diary, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
            self._slow = _first_to_make(Path(f"{self.diary}.slow")) and self.slow_by != 1
        os.write(self._pages, f"{os.getpid()} {int(self._slow)}\n".encode())
        pause_s = self.pause_s + self.sample_s * len(output)
        time.sleep(pause_s * (self.slow_by if self._slow else 1.0))
        return nn.functional.mse_loss(output, batch[1])

    def eval_data(self) -> None:
        return None


def _first_to_make(path: Path) -> bool:
    """Of several processes that ask this of a path, one gets True."""
    try:
        path.touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def _made_up(samples: int, *, seed: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(samples, 6, generator=generator)
    truth = torch.randn(6, 2, generator=torch.Generator().manual_seed(0))
    return TensorDataset(inputs, torch.sin(inputs @ truth))
