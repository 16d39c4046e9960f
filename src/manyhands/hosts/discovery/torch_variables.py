"""RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT: set by torchrun and most other launchers of torch. Pure.

A process knows its own rank, the number of ranks, and where rank 0 is. It knows nothing else about the other
ranks, except under torchrun, where the ranks of a host are consecutive.

torchrun itself keeps a store at MASTER_ADDR:MASTER_PORT (TORCHELASTIC_USE_AGENT_STORE), so that port is
taken. With any other launcher the port is for rank 0.
"""

from __future__ import annotations

from collections.abc import Mapping

from manyhands.errors import ClusterError
from manyhands.hosts.discovery import values
from manyhands.hosts.spec import ClusterSpec, join_address

NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def applies(environ: Mapping[str, str]) -> bool:
    return "RANK" in environ or "WORLD_SIZE" in environ


def is_torchrun(environ: Mapping[str, str]) -> bool:
    return "TORCHELASTIC_RUN_ID" in environ and applies(environ)


def read(environ: Mapping[str, str], *, hostname: str = "") -> ClusterSpec:
    """Read the cluster from these variables; `hostname` is the name of this machine."""
    for name in NEEDED:
        if name not in environ:
            raise ClusterError(
                f"RANK or WORLD_SIZE is set, but {name} is not: torchrun sets {', '.join(NEEDED[:-1])} "
                f"and {NEEDED[-1]} together. Start with torchrun, set {name}, or unset RANK and WORLD_SIZE."
            )
    world = values.number(environ, "WORLD_SIZE", least=1, most=values.MAX_ENTRIES)
    rank = values.number(environ, "RANK")
    values.check_below("RANK", rank, "WORLD_SIZE", world, "ranks")
    where = values.host(environ, "MASTER_ADDR")
    at = values.number(environ, "MASTER_PORT", least=1, most=values.MAX_PORT)
    local, here = values.number(environ, "LOCAL_RANK", default=rank), 1
    if "LOCAL_WORLD_SIZE" in environ:
        here = values.number(environ, "LOCAL_WORLD_SIZE", least=1, most=world)
        values.check_below("LOCAL_RANK", local, "LOCAL_WORLD_SIZE", here, "local ranks")
    first = rank - local
    beside = range(first, first + here) if is_torchrun(environ) else range(rank, rank + 1)
    entries = values.ranked_entries(
        "rank",
        (
            (hostname, each - first) if each in beside else ("" if each else where, None)
            for each in range(world)
        ),
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
