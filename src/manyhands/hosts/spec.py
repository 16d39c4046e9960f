"""Who takes part, as somebody else has said it: a scheduler, torchrun, or a file. Pure.

A ClusterSpec is a list of entries. An entry is one process that was started for us, or one host: the first,
with rank 0, is the coordinator; each of the others is an agent that starts members where it stands. The
readers in `specs/` make one from what they are given, and check it; what is here can't be wrong any more.
"""

from __future__ import annotations

from dataclasses import dataclass

from manyhands.errors import ClusterError
from manyhands.hosts.view import SERVER, WORKER

COORDINATOR = "coordinator"
"""Coordinates, and works like the others unless it has no slots."""
EVALUATOR = "evaluator"
"""Has nothing to do: the workers evaluate. It is in no count."""
ROLES = (COORDINATOR, WORKER, SERVER, EVALUATOR)

DEFAULT_PORT = 29600
"""Of the coordinator, where nobody says another: not one of those that torch takes (29400, 29500)."""


@dataclass(frozen=True)
class Entry:
    """One process that was started for us, or one host."""

    name: str
    """Nobody else has it: `rank-1`, `worker-0`, `gpu-a`."""
    role: str
    rank: int
    """0, 1, ... without gaps; 0 is the coordinator, evaluators come last."""
    host: str = ""
    """A name or an address; empty where this process was not told of it."""
    port: int | None = None
    """Where it may listen, if somebody has said so."""
    local_rank: int | None = None
    """Its number on its host, which picks the GPU; None where this process was not told of it."""
    slots: int = 1
    """How many members may be started there."""
    devices: tuple[str, ...] = ()
    """Of its members, one each; empty: whatever they find."""


@dataclass(frozen=True)
class ClusterSpec:
    entries: tuple[Entry, ...]
    """By rank."""
    host: str
    """Where the coordinator is to be found."""
    port: int | None
    """Where the coordinator is to listen; None: nobody has said, or `store` has taken it."""
    source: str
    """Where this was read, in words: `TF_CONFIG`."""
    mine: Entry | None = None
    """The entry that this process is."""
    store: str | None = None
    """host:port of a store of torch that somebody keeps there (torchrun); its port is taken."""

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
        """The entry that this process is, where one has to be known."""
        if self.mine is None:
            names = ", ".join(entry.name for entry in self.entries)
            raise ClusterError(
                f"{self.source} does not say which entry this process is. Say it with  --as NAME, "
                f"one of {names}."
            )
        return self.mine

    @property
    def meeting(self) -> str | None:
        """host:port where processes meet without a coordinator: at that store, or at the port itself."""
        if self.store is not None or self.port is None:
            return self.store
        return join_address(self.host, self.port)

    @property
    def size(self) -> int:
        """How many take part: all but evaluators."""
        return sum(entry.role != EVALUATOR for entry in self.entries)

    @property
    def coordinator(self) -> Entry:
        return self.entries[0]

    @property
    def workers(self) -> tuple[Entry, ...]:
        """Where workers may run: the coordinator's own entry among them, if it has slots."""
        return tuple(e for e in self.entries if e.role in (COORDINATOR, WORKER) and e.slots)

    @property
    def servers(self) -> tuple[Entry, ...]:
        """Where nothing but parameter servers run."""
        return tuple(entry for entry in self.entries if entry.role == SERVER)

    @property
    def num_workers(self) -> int:
        """How many workers there is room for."""
        return sum(entry.slots for entry in self.workers)

    @property
    def num_servers(self) -> int:
        return sum(entry.slots for entry in self.servers)


def join_address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
