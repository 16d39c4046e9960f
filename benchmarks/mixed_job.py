"""Two small models for a GPU together with CPUs: a GPU computes one of them in parallel, but not the other.

`Wide` reads all sequences of a batch together: half of them take a GPU as long as all.
`Trees` combines the leaves of each sample in that sample's own order, one after the other: many small
kernels per sample, for which a GPU is no faster than a CPU.
"""

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


class Tree(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.leaf = nn.Linear(8, width)
        self.join = nn.Linear(2 * width, width)
        self.head = nn.Linear(width, 4)

    def forward(self, leaves: torch.Tensor, orders: list[list[int]]) -> torch.Tensor:
        roots = []
        for sample, order in zip(self.leaf(leaves), orders, strict=True):
            nodes = list(sample.unbind(0))
            for place in order:
                both = torch.cat([nodes[place], nodes.pop(place + 1)])
                nodes[place] = torch.tanh(self.join(both))
            roots.append(nodes[0])
        result: torch.Tensor = self.head(torch.stack(roots))
        return result


@dataclass
class Wide(mh.Job):
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


@dataclass
class Trees(Wide):
    length: int = 16

    def model(self) -> nn.Module:
        return Tree(self.width)

    def collate(self, samples):
        leaves = torch.stack([leaf for leaf, _ in samples])
        # Each sample's own order, by its first number.
        seeds = (leaves[:, 0, 0] * 1e6).long().tolist()
        orders = [
            [(seed * 7919 + n) % (self.length - 1 - n) for n in range(self.length - 1)]
            for seed in seeds
        ]
        return leaves, orders, torch.stack([label for _, label in samples])

    def inputs(self, batch):
        return {"leaves": batch[0], "orders": batch[1]}

    def loss(self, output, batch):
        return nn.functional.cross_entropy(output, batch[2])
