"""The processes of a cluster, as described by a scheduler, torchrun or a file. Pure.

A ClusterSpec is a list of entries. An entry is one process that was started for us, or one host: the first,
with rank 0, is the coordinator; each of the others is an agent that starts members on its host. The readers
in `discovery/` build it from a description and check it, so a ClusterSpec is always valid.
"""

from __future__ import annotations

from dataclasses import dataclass

from manyhands.errors import ClusterError
from manyhands.hosts.view import SERVER, WORKER

COORDINATOR = "coordinator"
"""Coordinates, and runs members like the others unless it has no slots."""
EVALUATOR = "evaluator"
"""Has nothing to do, because the workers evaluate; not counted."""
ROLES = (COORDINATOR, WORKER, SERVER, EVALUATOR)

DEFAULT_PORT = 29600
"""The coordinator's default port; not one of torch's (29400, 29500)."""


@dataclass(frozen=True)
class Entry:
    """One process that was started for us, or one host."""

    name: str
    """Unique: `rank-1`, `worker-0`, `gpu-a`."""
    role: str
    rank: int
    """0, 1, ... without gaps; 0 is the coordinator, evaluators come last."""
    host: str = ""
    """A name or an address; empty if unknown to this process."""
    port: int | None = None
    """Port at which it may listen, if given."""
    local_rank: int | None = None
    """Its number on its host, which picks the GPU; None if unknown to this process."""
    slots: int = 1
    """The number of members that may be started there."""
    devices: tuple[str, ...] = ()
    """Devices of its members, one each; empty: they choose."""


@dataclass(frozen=True)
class ClusterSpec:
    entries: tuple[Entry, ...]
    """By rank."""
    host: str
    """The coordinator's host."""
    port: int | None
    """The coordinator's port; None: not given, or taken by `store`."""
    source: str
    """Source of the description: `TF_CONFIG`."""
    mine: Entry | None = None
    """The entry of this process."""
    store: str | None = None
    """host:port of a torch store that another process keeps there (torchrun); its port is taken."""

    def __post_init__(self) -> None:
        ranks = [entry.rank for entry in self.entries]
        assert ranks == list(range(len(ranks))), f"ranks {ranks}"
        assert len({entry.name for entry in self.entries}) == len(ranks), "a name was given twice"
        assert all(entry.role in ROLES for entry in self.entries)
        assert [e.rank for e in self.entries if e.role == COORDINATOR] == [0]
        last = [entry.role for entry in self.entries[self.size :]]
        assert all(role == EVALUATOR for role in last), "evaluators come last"
        assert self.mine is None or self.mine == self.entries[self.mine.rank]

    @property
    def me(self) -> Entry:
        """The entry of this process; an error if unknown."""
        if self.mine is None:
            names = ", ".join(entry.name for entry in self.entries)
            raise ClusterError(
                f"{self.source} does not say which entry this process is. Say it with  --as NAME, "
                f"one of {names}."
            )
        return self.mine

    @property
    def rendezvous(self) -> str | None:
        """host:port for a rendezvous without a coordinator: that store, or the port itself."""
        if self.store is not None or self.port is None:
            return self.store
        return join_address(self.host, self.port)

    @property
    def size(self) -> int:
        """The number of entries, without evaluators."""
        return sum(entry.role != EVALUATOR for entry in self.entries)

    @property
    def coordinator(self) -> Entry:
        return self.entries[0]

    @property
    def workers(self) -> tuple[Entry, ...]:
        """Entries where workers may run, including the coordinator's if it has slots."""
        return tuple(e for e in self.entries if e.role in (COORDINATOR, WORKER) and e.slots)

    @property
    def servers(self) -> tuple[Entry, ...]:
        """Entries where only parameter servers run."""
        return tuple(entry for entry in self.entries if entry.role == SERVER)

    @property
    def num_workers(self) -> int:
        """The number of slots for workers."""
        return sum(entry.slots for entry in self.workers)

    @property
    def num_servers(self) -> int:
        return sum(entry.slots for entry in self.servers)


def join_address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
