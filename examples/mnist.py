"""MNIST, handwritten digits of 28 by 28 pixels, with a perceptron and with a convolutional network.

    manyhands train examples/mnist.py --workers 2
    manyhands train examples/mnist.py:MnistConv --workers 2

The first job of a file is its default; choose another with a colon. The data is downloaded on
first use; MANYHANDS_DATA=/path/to/data reads it from a folder instead.
"""

from dataclasses import dataclass

import torch
from torch import nn

import manyhands as mh


@dataclass
class Mnist(mh.Job):
    """A perceptron with one hidden layer: over 98 % of the test digits correct."""

    lr: float = 0.1
    hidden: int = 512
    batch_size: int = 128
    epochs: int = 6
    monitor: str = "accuracy"

    def model(self):
        return nn.Sequential(
            nn.Flatten(),
            nn.Linear(28 * 28, self.hidden),
            nn.ReLU(),
            nn.Linear(self.hidden, 10),
        )

    def optimizer(self, params):
        return torch.optim.SGD(params, lr=self.lr, momentum=0.9, weight_decay=1e-4)

    def schedule(self, optimizer, num_steps):
        return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, num_steps)

    def data(self):
        return mh.data.mnist("train")

    def eval_data(self):
        return mh.data.mnist("test")

    def loss(self, output, batch):
        return nn.functional.cross_entropy(output, batch[1])

    def metrics(self, output, batch):
        return {"accuracy": (output.argmax(-1) == batch[1]).float().mean()}


@dataclass
class MnistConv(Mnist):
    """The same with another model: two convolutions, over 99 %."""

    lr: float = 0.05
    hidden: int = 128

    def model(self):
        return nn.Sequential(
            nn.Conv2d(1, 16, kernel_size=5),  # 28 -> 24
            nn.ReLU(),
            nn.MaxPool2d(2),  # 24 -> 12
            nn.Conv2d(16, 32, kernel_size=5),  # 12 -> 8
            nn.ReLU(),
            nn.MaxPool2d(2),  # 8 -> 4
            nn.Flatten(),
            nn.Linear(32 * 4 * 4, self.hidden),
            nn.ReLU(),
            nn.Linear(self.hidden, 10),
        )
