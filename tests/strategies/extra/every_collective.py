"""All-reduce whose steps use every operation of a group, in the group of all workers and in splits of it, so
that a worker can be killed inside any of them.

    everyone    0 1 2 3     all workers of the view; an all-reduce runs here while the splits are used
    pair        0 1, 2 3    a split
    trio          1 2 3     a split
    inner           2 3     a split of the split; in each step, another split of it is formed

The gradients are summed as in `allreduce`. Before that, every operation is done in every group, and its
result is checked.

If the variable EVERY_COLLECTIVE names a folder, each worker keeps a file there, named after its process, with
the place where it is ("12 pair/all_gather"). It kills itself at places that stand in the file `plan` there,
once at each: lines such as "pair/all_gather 1", with the rank in that group. Only while there are four.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from manyhands.contract import AppliedSteps, Context, Learner, StepReport
from manyhands.strategies.allreduce import AllReduce, AllReduceLearner

if TYPE_CHECKING:
    from torch import Tensor

    from manyhands.collectives.group import Group, Work
    from manyhands.compute.feed import Share

FOLDER = "EVERY_COLLECTIVE"
SIZE = 30_000
WHOLE = 4
"""Number of workers of the run."""
LENGTH = 40
"""Of a line in a worker's file."""


@dataclass(frozen=True)
class EveryCollective(AllReduce):
    name: ClassVar[str] = "every-collective"

    round_trips: int = 1
    """How often in a step every operation is done in every group."""

    def build(self, context: Context) -> Learner:
        return EveryCollectiveLearner(self, context)


class EveryCollectiveLearner(AllReduceLearner):
    _round_trip: RoundTrip | None = None

    def __init__(self, config: EveryCollective, context: Context) -> None:
        super().__init__(config, context)
        self._round_trips = config.round_trips

    def step(self, share: Share) -> StepReport:
        if self._group is not None:
            with self._view_change_on_lost_peer():
                if self._round_trip is None:
                    self._round_trip = RoundTrip(self._group)
                for _ in range(self._round_trips):
                    self._round_trip.make(share.step)
        note(f"{share.step} training")
        return super().step(share)

    def close(self) -> AppliedSteps | None:
        self._round_trip = None
        return super().close()


class RoundTrip:
    """Every operation in every group of this worker."""

    def __init__(self, everyone: Group) -> None:
        self._plan = read_plan() if everyone.size == WHOLE else {}
        self._groups = {"everyone": everyone}
        for name, parent, ranks in splits(everyone.size):
            group = self._groups.get(parent)
            if group is not None and group.rank in ranks:
                note(f"0 {parent}/split")
                self._groups[name] = group.split(ranks)

    def make(self, step: int) -> None:
        import torch

        everyone = self._groups["everyone"]
        beside = torch.full((10 * SIZE,), float(step))
        work = everyone.all_reduce(beside, async_op=True)
        for name, group in self._groups.items():
            for operation, begin in operations(group, step):
                place = f"{name}/{operation}"
                note(f"{step} {place}")
                self._do(place, group.rank, begin)
        work.wait()
        assert beside.eq(everyone.size * step).all()
        if (inner := self._groups.get("inner")) is not None:
            note(f"{step} inner/split")
            if self._dies_at("inner/split", inner.rank):
                die()
            inner.split([1, 0]).close()

    def _do(self, place: str, rank: int, begin: Callable[[], Begun]) -> None:
        begun = begin()
        if self._dies_at(place, rank):
            die()  # while others may have some of it, and wait for the rest
        begun.finish()

    def _dies_at(self, place: str, rank: int) -> bool:
        """Return true once in the run, if the plan says so."""
        if self._plan.get(place) != rank:
            return False
        try:
            (Path(os.environ[FOLDER]) / place.replace("/", "-")).touch(exist_ok=False)
        except FileExistsError:
            return False
        return True


@dataclass
class Begun:
    """An operation that was started, and what is to be there in the end."""

    works: list[Work]
    found: Tensor
    expected: float | Tensor
    alive: Any = None
    """A tensor that must live until then."""

    def finish(self) -> None:
        for work in self.works:
            work.wait()
        assert self.found.eq(self.expected).all()


def splits(size: int) -> Iterator[tuple[str, str, list[int]]]:
    """Yield the name, the parent and the ranks of each split, in a group of so many workers."""
    for first in range(0, size - 1, 2):
        yield "pair", "everyone", [first, first + 1]
    if size > 2:
        yield "trio", "everyone", list(range(1, size))
        yield "inner", "trio", [size - 3, size - 2]


def operations(group: Group, step: int) -> Iterator[tuple[str, Callable[[], Begun]]]:
    import torch

    size, rank = group.size, group.rank
    mine = float(step + rank)
    total = sum(step + each for each in range(size))
    ranks = torch.arange(size, dtype=torch.float32).repeat_interleave(SIZE)

    def all_reduce() -> Begun:
        tensor = torch.full((SIZE,), mine)
        return Begun([group.all_reduce(tensor, async_op=True)], tensor, total)

    def reduce_scatter() -> Begun:
        sent, into = torch.full((size * SIZE,), mine), torch.empty(SIZE)
        return Begun([group.reduce_scatter(sent, into=into, async_op=True)], into, total, sent)

    def all_gather() -> Begun:
        sent, into = torch.full((SIZE,), mine), torch.empty(size * SIZE)
        work = group.all_gather(sent, into=into, async_op=True)
        return Begun([work], into, step + ranks, sent)

    def all_to_all() -> Begun:
        sent, into = torch.full((size * SIZE,), mine), torch.empty(size * SIZE)
        work = group.all_to_all(sent, into=into, async_op=True)
        return Begun([work], into, step + ranks, sent)

    def broadcast() -> Begun:
        tensor, source = torch.full((SIZE,), mine), step % size
        work = group.broadcast(tensor, source=source, async_op=True)
        return Begun([work], tensor, step + source)

    def send_and_recv() -> Begun:
        sent, into, before = torch.full((SIZE,), mine), torch.empty(SIZE), (rank - 1) % size
        works = [
            group.send(sent, to=(rank + 1) % size, async_op=True),
            group.recv(into, source=before, async_op=True),
        ]
        return Begun(works, into, step + before, sent)

    for operation in (all_reduce, reduce_scatter, all_gather, all_to_all, broadcast, send_and_recv):
        yield operation.__name__, operation


def read_plan() -> dict[str, int]:
    """Return the places to die at, with the rank in the group of that place."""
    folder = os.environ.get(FOLDER)
    if folder is None or not (plan := Path(folder) / "plan").exists():
        return {}
    lines = [line.split() for line in plan.read_text().splitlines()]
    return {place: int(rank) for place, rank in lines}


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


_files: dict[str, int] = {}


def note(where: str) -> None:
    """Write where this worker is into its file, which outlives it."""
    folder = os.environ.get(FOLDER)
    if folder is None:
        return
    path = f"{folder}/{os.getpid()}"
    if path not in _files:
        _files[path] = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
    os.pwrite(_files[path], where.ljust(LENGTH).encode(), 0)
