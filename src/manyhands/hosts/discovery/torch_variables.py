"""RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT: set by torchrun and most other launchers of torch. Pure.

A process is told its own rank and how many there are, and where rank 0 is; of the others it knows no more,
except under torchrun, whose ranks on a host follow each other.

torchrun itself keeps a store at MASTER_ADDR:MASTER_PORT (TORCHELASTIC_USE_AGENT_STORE), so that port is
taken; whoever else sets these variables means it for rank 0.
"""

from __future__ import annotations

from collections.abc import Mapping

from manyhands.errors import ClusterError
from manyhands.hosts.discovery.values import MAX_ENTRIES, host, number, port
from manyhands.hosts.spec import COORDINATOR, WORKER, ClusterSpec, Entry, join_address

NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def applies(environ: Mapping[str, str]) -> bool:
    return "RANK" in environ or "WORLD_SIZE" in environ


def is_torchrun(environ: Mapping[str, str]) -> bool:
    return "TORCHELASTIC_RUN_ID" in environ and applies(environ)


def read(environ: Mapping[str, str], *, hostname: str = "") -> ClusterSpec:
    """The cluster of these variables; `hostname` is of this machine."""
    for name in NEEDED:
        if name not in environ:
            raise ClusterError(
                f"RANK or WORLD_SIZE is set, but {name} is not: torchrun sets {', '.join(NEEDED[:-1])} "
                f"and {NEEDED[-1]} together. Start with torchrun, set {name}, or unset RANK and WORLD_SIZE."
            )
    world = number(environ, "WORLD_SIZE", least=1, most=MAX_ENTRIES)
    rank = number(environ, "RANK")
    if rank >= world:
        raise ClusterError(
            f"RANK is {rank} and WORLD_SIZE is {world}: ranks go from 0 to {world - 1}."
        )
    where, at = host(environ, "MASTER_ADDR"), port(environ, "MASTER_PORT")
    local = number(environ, "LOCAL_RANK") if "LOCAL_RANK" in environ else rank
    here = _local_world(environ, world, local)
    first = rank - local if is_torchrun(environ) else rank
    beside = range(first, first + here) if is_torchrun(environ) else range(rank, rank + 1)
    entries = tuple(
        Entry(
            name=f"rank-{number}",
            role=WORKER if number else COORDINATOR,
            rank=number,
            host=hostname if number in beside else "" if number else where,
            local_rank=local if number == rank else number - first if number in beside else None,
        )
        for number in range(world)
    )
    taken = environ.get("TORCHELASTIC_USE_AGENT_STORE", "").lower() == "true"
    return ClusterSpec(
        entries,
        host=where,
        port=None if taken else at,
        source="torchrun" if is_torchrun(environ) else "RANK and WORLD_SIZE",
        mine=entries[rank],
        store=join_address(where, at) if taken else None,
    )


def _local_world(environ: Mapping[str, str], world: int, local: int) -> int:
    """The number of ranks on this host, if known."""
    if "LOCAL_WORLD_SIZE" not in environ:
        return 1
    here = number(environ, "LOCAL_WORLD_SIZE", least=1, most=world)
    if local >= here:
        raise ClusterError(
            f"LOCAL_RANK is {local} and LOCAL_WORLD_SIZE is {here}: local ranks go from 0 to {here - 1}."
        )
    return here
