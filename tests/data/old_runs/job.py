"""The job of the run folders beside it: a dense layer over the rows of a table."""

import os
import time
from dataclasses import dataclass

import torch
from torch import nn

import manyhands as mh


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rows = mh.SparseEmbedding(embedding_dim=4)
        self.head = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.rows(ids)).squeeze(-1)


@dataclass
class Rows(mh.Job):
    lr: float = 0.1
    batch_size: int = 10
    epochs: int = 4

    def model(self):
        return Model()

    def optimizer(self, params):
        return torch.optim.SGD(params, lr=self.lr, momentum=0.9)

    def schedule(self, optimizer, num_steps):
        return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, num_steps)

    def data(self):
        ids = torch.arange(64)
        return torch.utils.data.TensorDataset(ids, torch.sin(ids / 5.0))

    def eval_data(self):
        return self.data()

    def inputs(self, batch):
        return batch[0]

    def loss(self, output, batch):
        time.sleep(float(os.environ.get("STEP_S", "0")))
        return nn.functional.mse_loss(output, batch[1])
