"""Jobs for the conformance suite: small, deterministic, with awkward sizes.

98 samples in batches of 16 leave a last batch of 2, too small to give each of four workers a sample.
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

from manyhands.data.arrays import Arrays
from manyhands.data.digits_bundle import digits
from manyhands.embeddings.modules import SparseEmbedding, SparseEmbeddingBag
from manyhands.job import Job
from manyhands.measure import Measure

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": torch.optim.SGD,
    "momentum": lambda params, lr: torch.optim.SGD(params, lr, momentum=0.9, weight_decay=1e-3),
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
}


@dataclass
class Regression(Job):
    """A small network on synthetic data, with momentum, weight decay, a schedule and clipping."""

    samples: int = 98
    batch_size: int = 16
    epochs: int = 3
    lr: float = 0.05
    clip_norm: float | None = 1.0
    width: int = 24
    """Size of the hidden layer; from 20000 on, parameter servers have at least ten blocks to distribute."""
    optim: str = "momentum"
    """One of OPTIMIZERS."""
    grouped: bool = False
    """If true, biases form their own group, with another learning rate and no weight decay."""
    anneal: bool = True
    """If true, the learning rate follows a cosine."""
    evaluates: bool = True
    """If true, there is evaluation data."""
    pause_s: float = 0.0
    """Seconds by which each step is slowed down, so that it can be interrupted."""

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
        return _synthetic(self.samples, seed=1)

    def eval_data(self) -> TensorDataset | None:
        return _synthetic(31, seed=2) if self.evaluates else None

    def loss(self, output: Any, batch: Any) -> Tensor:
        if self.pause_s:
            time.sleep(self.pause_s)
        return nn.functional.mse_loss(output, batch[1])

    def metrics(self, output: Any, batch: Any) -> dict[str, Any]:
        return {"worst": (output - batch[1]).abs().mean()}


@dataclass
class Digits(Job):
    """Handwritten digits of 8 by 8 pixels, from scikit-learn, and a network with one hidden layer."""

    batch_size: int = 64
    epochs: int = 6
    lr: float = 0.2
    pause_s: float = 0.0

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 10))

    def optimizer(self, params: Any, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(params, lr=self.lr, momentum=0.9)

    def schedule(self, optimizer: torch.optim.Optimizer, num_steps: int) -> Any:
        return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, num_steps)

    def data(self) -> Arrays:
        return digits("train")

    def eval_data(self) -> Arrays:
        return digits("test")

    def loss(self, output: Any, batch: Any) -> Tensor:
        if self.pause_s:
            time.sleep(self.pause_s)
        return nn.functional.cross_entropy(output, batch[1])

    def metrics(self, output: Any, batch: Any) -> dict[str, Any]:
        return {"accuracy": (output.argmax(-1) == batch[1]).float().mean()}


@dataclass
class Gated(Regression):
    """Regression in which all workers wait for a test: in the loss of some steps, or in their backward when
    all large gradients are there."""

    samples: int = 960
    clip_norm: float | None = None
    anneal: bool = False
    evaluates: bool = False
    depth: int = 0
    """Number of square layers in the middle."""
    gate: str = ""
    """The folder in which workers and the test meet (testing/gates.py)."""
    gates: str = ""
    """Numbers of the micro-batches, from 1, before which each worker waits: "5,15"."""
    in_backward: bool = False
    """If true, it waits in the backward instead."""

    def model(self) -> nn.Module:
        middle = [nn.Linear(self.width, self.width) for _ in range(self.depth)]
        first = nn.Linear(6, self.width)
        first.weight.register_hook(self._at_first_layer)
        return nn.Sequential(first, nn.Tanh(), *middle, nn.Linear(self.width, 2))

    def loss(self, output: Any, batch: Any) -> Tensor:
        if torch.is_grad_enabled():
            self._number = getattr(self, "_number", 0) + 1
            (Path(self.gate) / f"computed-{os.getpid()}").write_text(str(self._number))
            if not self.in_backward:
                self._wait()
        return super().loss(output, batch)

    def _at_first_layer(self, gradient: Tensor) -> None:
        if self.in_backward:
            self._wait()

    def _wait(self) -> None:
        if str(getattr(self, "_number", 0)) in self.gates.split(","):
            folder = Path(self.gate)
            (folder / f"at-{self._number}-{os.getpid()}").touch()
            while not (folder / f"go-{self._number}").exists():
                time.sleep(0.01)


@dataclass
class GatedRows(Gated):
    """Gated with a sparse table beside the small network; every sample looks up rows of its own."""

    dim: int = 64
    lookups: int = 8
    """Rows that a sample looks up."""

    def model(self) -> nn.Module:
        return _RowSums(super().model(), self.dim)

    def data(self) -> TensorDataset:
        ids = torch.arange(self.samples * self.lookups).view(self.samples, self.lookups)
        return TensorDataset(*_synthetic(self.samples, seed=1).tensors, ids)

    def inputs(self, batch: Any) -> Any:
        return batch[0], batch[2]


class _RowSums(nn.Module):
    def __init__(self, body: nn.Module, dim: int) -> None:
        super().__init__()
        self.body = body
        self.rows = SparseEmbedding(None, dim, optimizer="sgd", lr=0.1, init="normal(0.1)")

    def forward(self, inputs: Tensor, ids: Tensor) -> Tensor:
        output: Tensor = self.body(inputs) + self.rows(ids).sum(dim=(1, 2)).unsqueeze(1)
        return output


@dataclass
class Adam(Regression):
    """Regression with AdamW and two groups of parameters."""

    lr: float = 0.01
    grouped: bool = True
    optim: str = "adamw"


@dataclass
class Tokens(Regression):
    """Regression with samples of unequal weight, like texts of unequal length."""

    evaluates: bool = False

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
        inputs, targets = _synthetic(self.samples, seed=1).tensors
        weights = torch.randint(1, 9, (self.samples,), generator=torch.Generator().manual_seed(3))
        return TensorDataset(inputs, targets, weights.float())


@dataclass
class Logging(Regression):
    """Regression that logs a number by each rule: its samples, the largest and the last batch, their mean."""

    def loss(self, output: Any, batch: Any) -> Tensor:
        for name in ("counted", "largest", "newest", "usual"):
            self.log(name, len(batch[1]))
        return super().loss(output, batch)

    def measures(self) -> list[Measure]:
        return [
            Measure("counted", unit="samples", rule="sum", help="all that were used"),
            Measure("largest", unit="samples", rule="max"),
            Measure("newest", unit="samples", rule="last"),
        ]


@dataclass
class Dropout(Regression):
    """Regression with dropout: a resumed run must draw the same random numbers."""

    def model(self) -> nn.Module:
        return nn.Sequential(
            nn.Linear(6, self.width), nn.Tanh(), nn.Dropout(0.3), nn.Linear(self.width, 2)
        )


@dataclass
class Sparse(Regression):
    """Regression with two sparse tables: one of rows, one of bags, with repeated ids."""

    evaluates: bool = False
    table_optim: str = "adagrad"

    def model(self) -> nn.Module:
        return LookupModel(self.width, self.table_optim)

    def data(self) -> TensorDataset:
        inputs, targets = _synthetic(self.samples, seed=1).tensors
        ids = torch.randint(0, 40, (self.samples, 5), generator=torch.Generator().manual_seed(4))
        return TensorDataset(inputs, targets, ids * ids * 1_000_003 - 7)

    def inputs(self, batch: Any) -> Any:
        return batch[0], batch[2]


@dataclass
class Passing(Sparse):
    """Ids that occur only once, in a table that evicts unused rows."""

    samples: int = 1600
    batch_size: int = 8
    epochs: int = 1
    unused: int = 20
    """Number of steps after which an unused row is evicted; 0: never."""

    def model(self) -> nn.Module:
        model = LookupModel(self.width, self.table_optim)
        unused = self.unused or None
        model.rows = SparseEmbedding(None, 4, optimizer=self.table_optim, evict_unused=unused)
        return model

    def data(self) -> TensorDataset:
        inputs, targets = _synthetic(self.samples, seed=1).tensors
        ids = torch.arange(self.samples).unsqueeze(1).expand(-1, 5)
        return TensorDataset(inputs, targets, ids)


class LookupModel(nn.Module):
    """Dense layers over two sparse tables."""

    def __init__(self, width: int, optimizer: str) -> None:
        super().__init__()
        options: dict[str, Any] = {"optimizer": optimizer, "init": "normal(0.3)"}
        self.rows = SparseEmbedding(None, 4, lr=0.1, **options)
        self.bags = SparseEmbeddingBag(None, 3, mode="sum", **options)
        self.body = nn.Sequential(nn.Linear(6 + 2 * 4 + 3, width), nn.Tanh(), nn.Linear(width, 2))

    def forward(self, inputs: Tensor, ids: Tensor) -> Tensor:
        rows = self.rows(ids[:, :2]).flatten(1)
        output: Tensor = self.body(torch.cat([inputs, rows, self.bags(ids[:, 2:])], dim=1))
        return output


@dataclass
class Straggling(Regression):
    """Regression with a straggler: the first worker to begin is slower. All workers keep a diary."""

    samples: int = 1600
    epochs: int = 1
    evaluates: bool = False
    pause_s: float = 0.01
    """Seconds per step of a worker."""
    sample_s: float = 0.0
    """Additional seconds per sample."""
    slow_by: float = 10.0
    """Factor on the time of the straggler; 1: there is none."""
    diary: str = ""
    """A file that gets a line "PID SLOW" (0 or 1) whenever a worker begins to compute."""

    def __post_init__(self) -> None:
        self._slow = False
        self._file = -1

    def loss(self, output: Any, batch: Any) -> Tensor:
        if self._file < 0:
            self._file = os.open(self.diary, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
            self._slow = _creates(Path(f"{self.diary}.slow")) and self.slow_by != 1
        os.write(self._file, f"{os.getpid()} {int(self._slow)}\n".encode())
        pause_s = self.pause_s + self.sample_s * len(output)
        time.sleep(pause_s * (self.slow_by if self._slow else 1.0))
        return nn.functional.mse_loss(output, batch[1])


def _creates(path: Path) -> bool:
    """Create a file; return false if another process was first."""
    try:
        path.touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def _synthetic(samples: int, *, seed: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(samples, 6, generator=generator)
    truth = torch.randn(6, 2, generator=torch.Generator().manual_seed(0))
    return TensorDataset(inputs, torch.sin(inputs @ truth))
