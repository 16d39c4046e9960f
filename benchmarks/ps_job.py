"""The models of the parameter-server benchmark as a manyhands job."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ps_torch
import torch
from ps_load import MODELS, POOL
from torch import Tensor, nn

import manyhands as mh


class Round:
    """The pool of made-up samples as a data set of any length: it goes round."""

    def __init__(self, length: int) -> None:
        self._length = length
        self._inputs, self._targets = ps_torch.make_data()

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self._inputs[index % POOL], self._targets[index % POOL]

    def gather(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        index = indices % POOL
        return self._inputs.index_select(0, index), self._targets.index_select(0, index)


@dataclass
class Bench(mh.Job):
    size: str = "perceptron"
    steps: int = 100
    batch_size: int = 256

    def model(self) -> nn.Module:
        return ps_torch.make_model(MODELS[self.size].widths)

    def optimizer(self, params: Any) -> torch.optim.Optimizer:
        return ps_torch.make_optimizer(params)

    def data(self) -> Round:
        return Round(self.steps * self.batch_size)

    def loss(self, output: Tensor, batch: Any) -> Tensor:
        return ps_torch.loss_of(output, batch[1])
