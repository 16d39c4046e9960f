"""A job whose weights count how often each sample was used.

Every sample has a row of a dense parameter and a row of a sparse table, both initially zero. The loss is the
mean of the rows of the batch, so the gradient of each number is 1/batch_size, and SGD with a learning rate of
batch_size subtracts exactly 1 for each use of a sample. After E epochs, every number is -E if and only if
every sample was used once per epoch. A lost sample shows as -E+1, a sample that was used twice as -E-1.

All numbers are integers and the batch size is a power of two, so float32 sums are exact in any order of
updates.

Where workers train weights of their own and average them, a use does not count 1: it counts by the worker's
part of the round. `RoundCounts` computes from the record of a run what the weights must then be.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from manyhands.compute.seeds import derive
from manyhands.embeddings.modules import RowModel, Rows, SparseEmbedding
from manyhands.embeddings.spec import Table
from manyhands.job import Job

COUNTING = f"{Path(__file__)}:Counting"
"""The job's reference, for `manyhands train`."""
COUNTING_ROWS = f"{Path(__file__)}:CountingRows"
FAR_APART = 1_000_003
"""Distance between the ids of two samples: ids may be any 64-bit numbers."""


@dataclass
class Counting(Job):
    """Count how often each sample is used."""

    samples: int = 96
    batch_size: int = 16
    epochs: int = 3
    width: int = 256
    """Numbers per sample in the dense parameter; 256 give enough blocks for several servers."""
    tables: bool = True
    """If true, a sparse table counts too."""
    pause_s: float = 0.0
    """Seconds by which each step is slowed down, so that it can be interrupted."""

    def model(self) -> nn.Module:
        return Counters(self.samples, self.width, lr=self.batch_size if self.tables else None)

    def optimizer(self, params: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(params, lr=self.batch_size)

    def data(self) -> TensorDataset:
        return TensorDataset(torch.arange(self.samples))

    def loss(self, output: Tensor, batch: Any) -> Tensor:
        if self.pause_s:
            time.sleep(self.pause_s)
        return output.sum() / len(output)


class Counters(nn.Module):
    """A dense row and a sparse row for each sample."""

    def __init__(self, samples: int, width: int, *, lr: float | None) -> None:
        super().__init__()
        self.dense = nn.Parameter(torch.zeros(samples, width))
        self.sparse: nn.Module | None = None
        if lr is not None:
            self.sparse = SparseEmbedding(None, 2, optimizer="sgd", lr=lr, init="zeros")

    def forward(self, numbers: Tensor) -> Tensor:
        counts = self.dense[numbers].sum(1)
        if self.sparse is not None:
            counts = counts + self.sparse(numbers * FAR_APART).sum(1)
        return counts


@dataclass
class CountingRows(Counting):
    """Count in a model that changes the rows of its table itself."""

    def model(self) -> nn.Module:
        return RowCounters()

    def loss(self, output: Any, batch: Any) -> Tensor:
        raise AssertionError("the model trains without a loss")


class RowCounters(RowModel):
    """A row for each sample."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = {"sparse": Table(dim=2, init="zeros")}

    def ids(self, batch: Any, *, seed: int) -> Mapping[str, NDArray[np.int64]]:
        return {"sparse": batch[0].numpy() * FAR_APART}

    def touch(
        self, batch: Any, rows: Mapping[str, Rows], *, lr: float, seed: int
    ) -> tuple[float, float]:
        counts, ids = rows["sparse"], batch[0].numpy() * FAR_APART
        np.subtract.at(counts.matrix, counts.find(ids), 1.0)
        return 0.0, float(len(ids))


def check_counts(
    state: Mapping[str, Any], *, epochs: int, samples: int = 96, rows: bool = True
) -> None:
    """Assert that the weights of a checkpoint count every sample once per epoch; with `rows`, tables too."""
    found = {name: state["model"][name] for name in ("dense",) if name in state["model"]}
    if rows and state["tables"]:
        table = state["tables"]["sparse"]
        assert table["ids"].tolist() == [n * FAR_APART for n in range(samples)]
        found["sparse"] = table["rows"]
    assert found, "nothing was counted"
    for name, numbers in found.items():
        assert numbers.shape[0] == samples
        wrong = (numbers != -epochs).any(dim=1).nonzero().flatten().tolist()
        used = {n: sorted({0.0 - float(value) for value in numbers[n]}) for n in wrong[:8]}
        assert not wrong, f"{name}: {len(wrong)} samples were not used {epochs} times: {used}"


class RoundCounts:
    """The numbers of the dense rows after a training in rounds, as its events tell them.

    In a round, a worker subtracts batch_size / n for each sample of a share of n, and its part of the average
    is its part of all samples that are used in the round. So a sample that is lost, used twice, or in the
    weights of a worker but not in the record shows in the numbers.
    """

    def __init__(self, round_steps: int, job: Counting) -> None:
        self._round_steps = round_steps
        self._job = job
        self._numbers = torch.zeros(job.samples, dtype=torch.float64)
        self._at_step = {0: self._numbers}
        """The numbers at the end of each round, by its last step."""
        self._shares: dict[str, list[Tensor]] = {}
        """Samples of each worker in each step of the open round."""
        self._last = (0, 0)
        """The last step, and its epoch."""

    def replay(self, events: Iterable[Mapping[str, Any]]) -> Tensor:
        """Return the number of each sample at the end."""
        for event in events:
            if event["event"] == "StepCommitted":
                self._add(event)
            elif event["event"] in ("ViewChanged", "Evaluated"):
                self._end_round()
            elif event["event"] == "Resumed":
                if event["step"] == self._last[0]:
                    self._end_round()
                self._shares = {}
                self._numbers = self._at_step[event["step"]]
                self._last = (event["step"], event["epoch"])
        self._end_round()
        return self._numbers

    def _add(self, event: Mapping[str, Any]) -> None:
        step, epoch = event["step"], event["epoch"]
        if epoch != self._last[1]:
            self._end_round()
        self._last = (step, epoch)
        generator = torch.Generator().manual_seed(derive(self._job.seed, "epoch", epoch))
        order = torch.randperm(self._job.samples, generator=generator)
        for worker, ranges in event["shares"].items():
            samples = [order[start:stop] for start, stop in ranges]
            self._shares.setdefault(worker, []).append(torch.cat([order[:0], *samples]))
        if step % self._round_steps == 0:
            self._end_round()

    def _end_round(self) -> None:
        total = sum(len(share) for shares in self._shares.values() for share in shares)
        numbers = self._numbers.clone()
        for shares in self._shares.values():
            part = sum(map(len, shares)) / max(total, 1)
            for share in shares:
                numbers[share] -= part * self._job.batch_size / max(len(share), 1)
        self._numbers, self._shares = numbers, {}
        self._at_step[self._last[0]] = numbers


def check_round_counts(
    state: Mapping[str, Any],
    events: Sequence[Mapping[str, Any]],
    *,
    round_steps: int,
    job: Counting | None = None,
) -> None:
    """Assert that the weights of a checkpoint are what the events of a training in rounds make of them."""
    wanted = RoundCounts(round_steps, job or Counting()).replay(events)
    found = state["model"]["dense"]
    torch.testing.assert_close(
        found, wanted.float()[:, None].expand_as(found), rtol=1e-4, atol=1e-4
    )
