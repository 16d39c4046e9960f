"""Whose statistics of BatchNorm count: those of a worker that has samples."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from manyhands.collectives.group import Group
from manyhands.compute.feed import Share
from manyhands.compute.train_state import TrainState
from manyhands.contract import Context
from manyhands.hosts.me import Me
from manyhands.hosts.view import Seat, View
from manyhands.strategies.allreduce import AllReduce
from manyhands.testing.thread_group import run_workers

NAMES = [f"worker-{rank}" for rank in range(3)]
BATCHES = [torch.randn(4, 2, generator=torch.Generator().manual_seed(n)) for n in range(4)]


def statistics(folder: Path, holders: Sequence[int]) -> list[list[Tensor]]:
    """Return the statistics of each worker after these steps, in each of which one worker has all samples."""
    view = View(1, tuple(Seat(name, "here") for name in NAMES))

    def train(group: Group) -> list[Tensor]:
        model = nn.BatchNorm1d(2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        state = TrainState(model, optimizer, loss=lambda model, batch: model(batch).sum())
        me = Me(NAMES[group.rank], "here", "cpu", folder, view, make_group=lambda view: group)
        learner = AllReduce().build(Context(state, me))
        learner.on_view(view)
        for number, holder in enumerate(holders):
            samples = 4 if group.rank == holder else 0
            batches = [(BATCHES[number], samples)]
            learner.step(Share(number + 1, 0, samples, 4, batches, group.rank, first=holder))
        learner.drain()
        return list(model.buffers())

    return run_workers(len(NAMES), train)


@pytest.mark.parametrize("holders", [(0, 0, 0, 0), (2, 2, 2, 2), (1, 0, 2, 1)], ids=str)
def test_statistics_follow_the_samples(holders: Sequence[int], tmp_path: Path) -> None:
    """Each batch counts, though no worker may have seen all of them, and rank 0 has them for a checkpoint."""
    alone = nn.BatchNorm1d(2)
    for batch in BATCHES:
        alone(batch)
    for found in statistics(tmp_path, holders):
        torch.testing.assert_close(found, list(alone.buffers()))
