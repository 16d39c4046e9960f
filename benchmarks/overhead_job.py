"""The models of the overhead benchmark as manyhands jobs."""

from __future__ import annotations

from dataclasses import dataclass

import overhead_models as models
import torch

import manyhands as mh


@dataclass
class Perceptron(mh.Job):
    steps: int = 500
    batch_size: int = models.PERCEPTRON_BATCH

    def model(self):
        return models.perceptron()

    def optimizer(self, params):
        return torch.optim.SGD(params, lr=0.01, momentum=0.9)

    def data(self):
        return mh.data.Arrays(*models.perceptron_data(self.steps * self.batch_size))

    def loss(self, output, batch):
        return models.loss(output, batch[1])


@dataclass
class Transformer(Perceptron):
    batch_size: int = models.TRANSFORMER_BATCH

    def model(self):
        return models.Transformer()

    def data(self):
        return mh.data.Arrays(*models.transformer_data(self.steps * self.batch_size))
