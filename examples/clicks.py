"""Predict clicks: a wide-and-deep model over a dozen categorical fields, with rows in sparse tables.

    manyhands train examples/clicks.py --strategy ps:async --workers 2
    manyhands train examples/clicks.py --strategy 'allreduce(tables=shared)' --workers 2

Ids are 64-bit hashes, as in real logs: their number is unknown, and a row is created when its id is first
seen. The data is synthetic with a structure to find: every id has a hidden taste vector, and a click is more
likely if those of user and item agree. The loss of a model that knows the taste vectors is the lower bound;
it is printed when the data is made, and the trained model should come close to it.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

import manyhands as mh

FIELDS = 12
"""Categorical fields: the first is the user, the second the item, the others describe either."""
DENSE = 4
TASTES = 4


class Clicks:
    """Synthetic impressions from a seed: (ids, numbers, clicked)."""

    def __init__(self, samples: int, *, seed: int):
        draw = np.random.default_rng(seed)
        # A few ids are frequent, most are rare.
        ranks = np.minimum(draw.zipf(1.3, (samples, FIELDS)), 20_000)
        self.ids = _mix(
            ranks.astype(np.uint64) * np.uint64(FIELDS) + np.arange(FIELDS, dtype=np.uint64)
        )
        self.numbers = draw.standard_normal((samples, DENSE), dtype=np.float32)
        odds = self.odds()
        self.clicked = (draw.random(samples) < odds).astype(np.float32)
        likely = np.where(self.clicked > 0, odds, 1 - odds)
        self.best_loss = float(-np.log(likely).mean())

    def odds(self):
        user, item = _tastes(self.ids[:, 0]), _tastes(self.ids[:, 1])
        fame = _tastes(self.ids)[:, :, 0].mean(axis=1)
        return 1 / (
            1 + np.exp(-(1.5 * (user * item).sum(axis=1) + 2 * fame + 0.5 * self.numbers[:, 0] - 1))
        )

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, i):
        return self.ids[i].astype(np.int64), self.numbers[i], self.clicked[i]


class WideAndDeep(nn.Module):
    """One weight per id (wide), and a network over the vectors of all fields and their products (deep)."""

    def __init__(self, dim: int, hidden: int, lr: float):
        super().__init__()
        self.wide = mh.SparseEmbeddingBag(
            None, 1, mode="sum", optimizer="adagrad", lr=lr, init="zeros"
        )
        self.deep = mh.SparseEmbedding(None, dim, optimizer="adagrad", lr=lr, init="normal(0.1)")
        pairs = FIELDS * (FIELDS - 1) // 2
        self.network = nn.Sequential(
            nn.Linear(FIELDS * dim + pairs + DENSE, hidden), nn.ReLU(), nn.Linear(hidden, 1)
        )
        self.register_buffer("upper", torch.triu_indices(FIELDS, FIELDS, 1), persistent=False)

    def forward(self, ids, numbers):
        rows = self.deep(ids)
        products = (rows @ rows.transpose(1, 2))[:, self.upper[0], self.upper[1]]
        seen = torch.cat([rows.flatten(1), products, numbers], dim=1)
        return (self.wide(ids) + self.network(seen)).squeeze(1)


@dataclass
class ClickThrough(mh.Job):
    """Wide and deep on synthetic clicks: the loss comes close to the lower bound."""

    lr: float = 0.002
    table_lr: float = 0.05
    dim: int = 8
    hidden: int = 64
    samples: int = 200_000
    batch_size: int = 1024
    epochs: int = 2

    def model(self):
        return WideAndDeep(self.dim, self.hidden, self.table_lr)

    def optimizer(self, params):
        return torch.optim.Adam(params, lr=self.lr)

    def data(self):
        return Clicks(self.samples, seed=1)

    def eval_data(self):
        data = Clicks(self.samples // 10, seed=2)
        print(f"lower bound of the evaluation loss: {data.best_loss:.4f}")
        return data

    def inputs(self, batch):
        return batch[0], batch[1]

    def loss(self, output, batch):
        return nn.functional.binary_cross_entropy_with_logits(output, batch[2])

    def metrics(self, output, batch):
        return {"accuracy": ((output > 0) == (batch[2] > 0.5)).float().mean()}


def _mix(x):
    """A 64-bit hash, so that the synthetic ids look like those of real logs."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _tastes(ids):
    """The taste vector of each id: TASTES numbers between -1 and 1, from its hash."""
    salted = _mix(ids[..., None] + np.arange(1, TASTES + 1, dtype=np.uint64))
    return salted.astype(np.float64) / 2.0**63 - 1
