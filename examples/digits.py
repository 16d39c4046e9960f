"""Handwritten digits of 8 by 8 pixels: a whole job on one screen, trained in seconds.

    manyhands train examples/digits.py --workers 2
    manyhands train examples/digits.py --workers 2 --set lr=0.05 --set hidden=128

A job defines what is trained and contains nothing about processes, so one worker or fifty run this same
file. Its fields are hyperparameters, which --set changes. The training loop calls its methods: for every
batch it computes `loss(model(batch[0]), batch)` and steps the optimizer.
"""

from dataclasses import dataclass

import torch
from torch import nn

import manyhands as mh


@dataclass
class Digits(mh.Job):
    """A perceptron with one hidden layer: over 97 % of the test digits correct."""

    lr: float = 0.2
    hidden: int = 128
    batch_size: int = 64  # of all workers together: their number does not change the mathematics
    epochs: int = 20
    monitor: str = "accuracy"  # the evaluation metric that selects the best model

    def model(self):
        return nn.Sequential(
            nn.Flatten(),
            nn.Linear(8 * 8, self.hidden),
            nn.ReLU(),
            nn.Linear(self.hidden, 10),
        )

    def optimizer(self, params):
        return torch.optim.SGD(params, lr=self.lr, momentum=0.9)

    def schedule(self, optimizer, num_steps):
        """Decay the learning rate to zero along a cosine, over all steps of the training."""
        return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, num_steps)

    def data(self):
        return mh.data.digits("train")

    def eval_data(self):
        return mh.data.digits("test")

    def loss(self, output, batch):
        return nn.functional.cross_entropy(output, batch[1])

    def metrics(self, output, batch):
        return {"accuracy": (output.argmax(-1) == batch[1]).float().mean()}
