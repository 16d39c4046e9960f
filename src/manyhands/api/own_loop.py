"""`mh.join()`: strategies for users who keep their own training loop.

    with mh.join("allreduce") as hands:
        model, optimizer = hands.prepare(model, optimizer)
        for epoch in range(3):
            for batch in hands.batches(dataset, batch_size=64, epoch=epoch):
                report = hands.step(loss_fn, batch)          # loss_fn(model, batch) -> mean loss

Start it with `torchrun --nproc-per-node 2 script.py` for two workers, or with plain `python script.py`
for one. `batch_size` is the global batch; `batches` gives each worker its share of it.

Save and load as with any model, rows of sparse tables included: `model.load_state_dict(...)` before
`prepare`, in the first worker at least, and `model.state_dict()` in one of them.
"""

from __future__ import annotations

import socket
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from manyhands.collectives.group import view_change_on_lost_peer
from manyhands.compute.feed import Feed, Share, is_map_style
from manyhands.compute.param_groups import foreign_parameters, untrained_parameters
from manyhands.compute.train_state import Loss, TrainState, to_device
from manyhands.contract import Context, Joined, Learner, StepReport, Strategy
from manyhands.control.messages import Portion
from manyhands.coordinator.leases import Leases
from manyhands.embeddings.local_tables import LocalTables
from manyhands.embeddings.modules import RowModel
from manyhands.errors import ClusterError, JobError, UsageError
from manyhands.hosts.devices import device_id, pick_device
from manyhands.hosts.discovery import detect
from manyhands.hosts.me import Me
from manyhands.hosts.scratch import Scratch
from manyhands.hosts.spec import EVALUATOR
from manyhands.hosts.view import Seat, View
from manyhands.job import Job
from manyhands.pairs import FP32, OWN_LOOP, ROW_MODEL, TABLES, Feature
from manyhands.ranges import shares, split
from manyhands.strategies.pairs import check_pairs
from manyhands.strategies.registry import make_strategy

OWN: Mapping[Feature, str] = {OWN_LOOP: "mh.join()", FP32: "float32"}
"""What is combined with any strategy here."""


class Hands:
    """This process among the workers."""

    def __init__(self, strategy: Strategy, me: Me, *, seed: int = 0) -> None:
        self._strategy = strategy
        self._learner: Learner | None = None
        self._joined = Joined()
        self._me = me
        self._seed = seed
        self._train_state: TrainState | None = None
        self._steps = 0
        self._given: tuple[int, int] | None = None

    @property
    def rank(self) -> int:
        return self._me.rank

    @property
    def world(self) -> int:
        return self._me.world

    @property
    def device(self) -> str:
        return self._me.device

    def prepare(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        *,
        scheduler: LRScheduler | None = None,
        clip_norm: float | None = None,
    ) -> tuple[nn.Module, Optimizer]:
        """Register what is trained. Every worker starts from the weights and table rows of rank 0."""
        if foreign := foreign_parameters(model, optimizer):
            raise UsageError(
                f"prepare(model, optimizer): the optimizer has {foreign}, which would train nothing. Build "
                "it from the same model:  torch.optim.SGD(model.parameters(), lr=0.1)"
            )
        if left_out := untrained_parameters(model, optimizer):
            # Not refused: the user's loop may have another optimizer for them.
            warnings.warn(
                f"the optimizer leaves out {left_out}; hands.step() does not change them",
                stacklevel=2,
            )
        self._train_state = TrainState(
            model=model.to(self.device),
            optimizer=optimizer,
            loss=_no_loss,
            device=self.device,
            seed=self._seed,
            scheduler=scheduler,
            clip_norm=clip_norm,
            tables=LocalTables.of(model, seed=self._seed),
        )
        self._check_model(self._train_state)
        self._learner = self._strategy.build(Context(self._train_state, self._me))
        self._joined = self._learner.on_view(self._me.view)
        return model, optimizer

    def _check_model(self, train_state: TrainState) -> None:
        """Refuse a strategy that the model can't be combined with."""
        given, model = dict(OWN), train_state.model
        if specs := train_state.tables.specs:
            given[TABLES] = f"a model with sparse tables ({', '.join(specs)})"
        if isinstance(model, RowModel):
            given[ROW_MODEL] = f"{type(model).__name__}, which changes rows itself,"
        check_pairs(self._strategy, given, workers=self.world)

    def batches(
        self,
        dataset: Any,
        *,
        batch_size: int,
        epoch: int = 0,
        collate: Callable[[list[Any]], Any] | None = None,
    ) -> Iterator[Any]:
        """Yield this worker's share of each global batch of an epoch. All workers together use each sample
        once."""
        if not is_map_style(dataset):
            raise JobError(
                "hands.batches() needs a map-style dataset (len() and []), to divide its samples; it got "
                f"{type(dataset).__name__}. Or give each worker its own batches: hands.step(loss, batch)  "
                "takes them."
            )
        if len(dataset) == 0:
            raise JobError("hands.batches() got a data set without samples.")
        if batch_size < self.world:
            raise UsageError(
                f"{self.world} workers share a global batch of {batch_size}: every worker needs at "
                f"least one sample. Use batch_size={self.world} or more."
            )
        data = Job(seed=self._seed) if collate is None else _Collating(self._seed, collate)
        return self._batches(Feed(data, dataset, device=self.device), dataset, batch_size, epoch)

    def _batches(self, feed: Feed, dataset: Any, batch_size: int, epoch: int) -> Iterator[Any]:
        leases = Leases(len(dataset))
        while ranges := leases.take(batch_size):
            total = sum(stop - start for start, stop in ranges)
            parts = split(ranges, shares(total, [1.0] * len(self._me.view.replicas)))
            portion = Portion(
                self._steps, epoch, total, tuple(parts[self._me.replica]), self._me.replica
            )
            batch, samples = feed.share(portion).batches[0]
            self._given = (samples, total)
            yield batch

    def step(self, loss: Loss, batch: Any) -> StepReport:
        """Make one global step with this worker's batch; `loss(model, batch)` is its mean loss."""
        if self._train_state is None or self._learner is None:
            raise UsageError("Call hands.prepare(model, optimizer) before hands.step(loss, batch).")
        train_state = self._train_state
        train_state.loss = loss
        if self._given is not None:
            # A batch of batches(), perhaps transformed by the user.
            samples, total = self._given
            self._given, train_state.weight = None, None
        else:
            # The user's own batches: the samples of all workers are added up over the network.
            batch = to_device(batch, self.device)
            samples = total = _count(batch)
            train_state.weight = _count
        self._steps += 1
        began = time.perf_counter()
        share = Share(self._steps, 0, samples, total, [(batch, samples)], self._me.replica)
        report = self._learner.step(share)
        report.step_s = time.perf_counter() - began
        return report

    def mean(self, value: float | Tensor, *, weight: float = 1.0) -> float:
        """Return the weighted mean of a number over all workers, for evaluation."""
        sums = [float(value) * weight, weight]
        total = torch.tensor(sums, dtype=torch.float64, device=self.device)
        if (group := self._joined.group) is not None:
            with view_change_on_lost_peer(self._me):
                group.all_reduce(total)
        return float(total[0] / total[1])

    def close(self) -> None:
        if self._learner is not None:
            self._learner.close()


@contextmanager
def join(strategy: str = "allreduce", *, device: str = "auto", seed: int = 0) -> Iterator[Hands]:
    """Join the workers that torchrun, srun or another launcher started, or be the only one."""
    cluster = detect(or_alone=True)
    place, world = cluster.me, cluster.size
    if cluster.servers or place.role == EVALUATOR or any(e.slots != 1 for e in cluster.entries):
        raise ClusterError(
            f"{cluster.source} describes servers, evaluators or several slots per process; join() supports "
            "only workers, one per process. Use  manyhands train JOB."
        )
    config = make_strategy(strategy)
    check_pairs(config, OWN, workers=world)
    config.check(world)
    mine = pick_device(device, place.local_rank or 0)
    seats = tuple(
        # The others are assumed to be like this one.
        Seat(
            name=f"worker-{rank}",
            host=socket.gethostname(),
            device=mine,
            device_id=device_id(mine) if rank == place.rank else f"of rank {rank}",
        )
        for rank in range(world)
    )
    with Scratch() as scratch:
        me = Me(
            name=f"worker-{place.rank}",
            host=socket.gethostname(),
            device=mine,
            scratch=scratch,
            view=View(next(_views), seats, config.replica_size(world)),
            rendezvous=cluster.rendezvous,
        )
        hands = Hands(config, me, seed=seed)
        yield hands
        # Not after an error: leaving a group waits for peers, and one of them may have failed.
        hands.close()


_views = count(1)
"""Numbers of views. All workers join equally often, so keys in a store never repeat those of an earlier
join."""


class _Collating(Job):
    """The part of a job that a feed needs, with the user's collate."""

    def __init__(self, seed: int, collate: Callable[[list[Any]], Any]) -> None:
        super().__init__(seed=seed)
        self._collate = collate

    def collate(self, samples: list[Any]) -> Any:
        return self._collate(samples)


def _count(batch: Any) -> int:
    """Count the samples of a batch: the length of its first tensor."""
    if isinstance(batch, Tensor):
        return len(batch)
    values = batch.values() if isinstance(batch, dict) else batch
    return _count(next(iter(values)))


def _no_loss(model: nn.Module, batch: Any) -> Tensor:
    raise AssertionError("each step brings its own loss")
