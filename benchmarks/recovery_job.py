"""The training of the recovery benchmark as a manyhands job. It runs until it is stopped."""

from __future__ import annotations

from dataclasses import dataclass

import recovery_model

import manyhands as mh


@dataclass
class Perceptron(mh.Job):
    batch_size: int = recovery_model.BATCH
    epochs: int = 1_000_000

    def model(self):
        return recovery_model.perceptron()

    def optimizer(self, params):
        return recovery_model.optimizer(params)

    def data(self):
        return mh.data.Arrays(*recovery_model.data())

    def loss(self, output, batch):
        return recovery_model.loss(output, batch[1])
