"""Views: the numbered membership of a run.

A view never changes; when the membership does, the coordinator forms the next one. Ranks are positions
among a view's workers, so they are always 0, 1, ... without gaps, while a member keeps its name for life.

A replica is the workers that hold one copy of the model together: neighbours in rank, one worker unless the
strategy says otherwise. All of them compute the same samples.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

WORKER = "worker"
SERVER = "server"


@dataclass(frozen=True)
class Seat:
    """One member in a view."""

    name: str
    host: str
    role: str = WORKER
    device: str = "cpu"
    device_id: str = "cpu"
    """Identifies the device in the whole cluster: two members with the same id share one device."""


def gpu_each(workers: Collection[Seat]) -> bool:
    """Return whether every worker has a GPU of its own."""
    gpus = {seat.device_id for seat in workers if seat.device.startswith("cuda")}
    return len(gpus) == len(workers) > 0


def reduces_in_hosts(view: View) -> bool:
    """Return whether workers reduce in the memory of their hosts: all are on CPUs, and some on one host."""
    hosts = {seat.host for seat in view.workers}
    return len(hosts) < view.world and all(seat.device == "cpu" for seat in view.workers)


@dataclass(frozen=True)
class View:
    """The members of a run, from one change of the membership to the next."""

    number: int
    """Larger than that of every earlier view."""
    seats: tuple[Seat, ...]
    replica_size: int = 1
    """Number of workers in each replica; the number of workers is a multiple of it."""

    def __post_init__(self) -> None:
        if self.replica_size < 1 or len(self.workers) % self.replica_size:
            raise ValueError(f"{len(self.workers)} workers, in replicas of {self.replica_size}")

    @property
    def workers(self) -> tuple[Seat, ...]:
        return tuple(seat for seat in self.seats if seat.role == WORKER)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(seat.name for seat in self.seats)

    @property
    def world(self) -> int:
        """The number of workers, as torch's world size."""
        return len(self.workers)

    @property
    def replicas(self) -> tuple[tuple[Seat, ...], ...]:
        """The workers of each replica, in rank order."""
        workers, size = self.workers, self.replica_size
        return tuple(workers[first : first + size] for first in range(0, len(workers), size))

    @property
    def one_host(self) -> bool:
        """If true, all members are on the same host."""
        return len({seat.host for seat in self.seats}) <= 1

    def rank(self, name: str) -> int:
        """Return the position of a worker among the workers; servers have none."""
        return [seat.name for seat in self.workers].index(name)

    def replica(self, name: str) -> int:
        """Return the index of a worker's replica."""
        return self.rank(name) // self.replica_size

    def seat(self, name: str) -> Seat:
        return next(seat for seat in self.seats if seat.name == name)
