"""Loads batches by their positions in an epoch's permutation.

The permutation depends on (seed, epoch) alone, so every worker and every resumed run sees the same.
A dataset that can gather a whole batch (manyhands.data.Arrays, torch's TensorDataset, or any with a method
`gather(indices)`) is called once per batch. Any other map-style dataset is read sample by sample and
collated, in the worker or, with `loader_processes`, ahead of time in other processes (loaders.py).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import IterableDataset, TensorDataset

from manyhands.compute.loaders import Loaders
from manyhands.compute.seeds import derive, seed_loading
from manyhands.compute.train_state import to_device
from manyhands.control.messages import Portion
from manyhands.errors import JobError
from manyhands.job import Job
from manyhands.ranges import Range, shares, split


@dataclass
class Share:
    """A portion with its data: micro-batches, each with its number of samples."""

    step: int
    epoch: int
    samples: int
    total: int
    batches: list[tuple[Any, int]]
    part: int = 0
    uniform: bool = False
    """If true, all workers have equally many micro-batches, some of which may have no samples: those pass
    through the model too."""
    first: int = 0
    """Index of the first replica that has samples in this step."""


class Feed:
    """The training data as this worker reads it."""

    def __init__(
        self,
        job: Job,
        dataset: Any,
        *,
        device: str,
        loaders: Loaders | None = None,
        uniform: bool = False,
    ) -> None:
        """`uniform`: if true, every share has as many micro-batches as the job says."""
        self._uniform = uniform
        self._job = job
        self._dataset = dataset
        self._device = device
        self._loaders = loaders
        self._epoch = -1
        self._order: Tensor = torch.empty(0, dtype=torch.int64)
        self._expected: deque[Portion] = deque()
        self._coming: deque[list[tuple[Future[Any], int]]] = deque()

    def expect(self, portions: Iterable[Portion]) -> None:
        """Announce the next portions, in order, so that loader processes can begin."""
        if self._loaders is not None:
            self._expected.extend(portions)
            self._load_ahead(self._loaders)

    def forget(self) -> None:
        """Forget the announced portions."""
        self._expected.clear()
        for futures in self._coming:
            for future, _ in futures:
                future.cancel()
        self._coming.clear()

    def close(self) -> None:
        """End the loader processes."""
        if self._loaders is not None:
            self._loaders.close()

    def share(self, portion: Portion) -> Share:
        """Return the data of one step, in the announced order."""
        if self._loaders is None:
            pieces = self._micro_batches(portion)
            batches = [(gather(self._job, self._dataset, i, portion.epoch), n) for i, n in pieces]
        else:
            futures = self._coming.popleft()
            self._load_ahead(self._loaders)
            batches = [(future.result(), n) for future, n in futures]
        moved = [(to_device(batch, self._device), n) for batch, n in batches]
        return Share(
            portion.step,
            portion.epoch,
            portion.samples,
            portion.total,
            moved,
            portion.part,
            self._uniform,
            portion.first,
        )

    def _load_ahead(self, loaders: Loaders) -> None:
        while self._expected and len(self._coming) < loaders.ahead:
            portion = self._expected.popleft()
            pieces = self._micro_batches(portion)
            self._coming.append([(loaders.submit(portion.epoch, i), n) for i, n in pieces])

    def _micro_batches(self, portion: Portion) -> list[tuple[Tensor, int]]:
        """Return the indices of each micro-batch, and its number of samples."""
        number = min(self._job.accumulate, portion.samples)
        counts = shares(portion.samples, [1.0] * number) if number else []
        indices = [self._indices(portion.epoch, each) for each in split(portion.ranges, counts)]
        pieces = list(zip(indices, counts, strict=True))
        # An empty share (the last batch was too small for this worker) takes part with a sample of weight 0.
        wanted = self._job.accumulate if self._uniform else 1
        padding = self._indices(portion.epoch, [(0, 1)]), 0
        return pieces + [padding] * (wanted - len(pieces))

    def _indices(self, epoch: int, ranges: Sequence[Range]) -> Tensor:
        if epoch != self._epoch:
            generator = torch.Generator().manual_seed(derive(self._job.seed, "epoch", epoch))
            self._order = torch.randperm(len(self._dataset), generator=generator)
            self._epoch = epoch
        if len(ranges) == 1:
            return self._order[ranges[0][0] : ranges[0][1]]
        return torch.cat([self._order[start:stop] for start, stop in ranges])


def gather(job: Job, dataset: Any, indices: Tensor, epoch: int) -> Any:
    """Load one batch."""
    if type(job).collate is Job.collate:
        if _matches_getitem(dataset, "gather"):
            return dataset.gather(indices)
        if type(dataset) is TensorDataset:
            return tuple(tensor[indices] for tensor in dataset.tensors)
    numbers = indices.tolist()
    if _matches_getitem(dataset, "__getitems__"):
        seed_loading(job.seed, "load", epoch, numbers[0])
        samples = dataset.__getitems__(numbers)
    else:
        samples = [_sample(job, dataset, number, epoch) for number in numbers]
    return job.collate(samples)


def _sample(job: Job, dataset: Any, number: int, epoch: int) -> Any:
    """Load one sample. Random augmentation depends on the sample and the epoch alone, not on the process that
    loads it or on what was loaded before."""
    seed_loading(job.seed, "load", epoch, number)
    return dataset[number]


def _matches_getitem(dataset: Any, method: str) -> bool:
    """Return true if a method for many samples returns what `[]` returns for each.

    It does not if a subclass overrides only `[]`, to augment: that must not be bypassed.
    """
    for cls in type(dataset).__mro__:
        if method in vars(cls):
            return True
        if "__getitem__" in vars(cls):
            return False
    return False


def check_dataset(job: Job, method: str, dataset: Any) -> None:
    """Raise JobError unless a job's data set is map-style and not empty."""
    name = f"{type(job).__name__}.{method}()"
    if not is_map_style(dataset):
        got = "None (is a return missing?)" if dataset is None else type(dataset).__name__
        raise JobError(f"{name} must return a map-style dataset (len() and []); it returned {got}.")
    if len(dataset) == 0:
        raise JobError(f"{name} returned a data set without samples.")


def is_map_style(dataset: Any) -> bool:
    sized = hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")
    return sized and not isinstance(dataset, IterableDataset)
