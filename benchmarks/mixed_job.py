"""A small recurrent model: many small kernels, for which a GPU is little faster than a CPU."""

from dataclasses import dataclass

import torch
from torch import nn
from torch.utils.data import TensorDataset

import manyhands as mh


class Reader(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.cell = nn.GRUCell(8, width)
        self.head = nn.Linear(width, 4)

    def forward(self, sequences: torch.Tensor) -> torch.Tensor:
        hidden = sequences.new_zeros(len(sequences), self.cell.hidden_size)
        for step in sequences.unbind(1):
            hidden = self.cell(step, hidden)
        result: torch.Tensor = self.head(hidden)
        return result


@dataclass
class Mixed(mh.Job):
    samples: int = 20_000
    batch_size: int = 256
    epochs: int = 1
    width: int = 64
    length: int = 40
    lr: float = 0.05

    def model(self) -> nn.Module:
        return Reader(self.width)

    def optimizer(self, params):
        return torch.optim.SGD(params, lr=self.lr, momentum=0.9)

    def data(self) -> TensorDataset:
        generator = torch.Generator().manual_seed(0)
        sequences = torch.randn(self.samples, self.length, 8, generator=generator)
        return TensorDataset(sequences, sequences[:, :, :4].sum(1).argmax(1))

    def inputs(self, batch):
        return batch[0]

    def loss(self, output, batch):
        return nn.functional.cross_entropy(output, batch[1])
