"""The one place where the environment is read.

`MANYHANDS_<OPTION>` stands for a flag that was not given (flag > environment > default). The variables
that launchers such as torchrun set say who this process is.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from manyhands.errors import UsageError

PREFIX = "MANYHANDS_"


def option(name: str) -> str | None:
    """The environment's value for a flag: `run_dir` is MANYHANDS_RUN_DIR."""
    return os.environ.get(PREFIX + name.upper()) or None


@dataclass(frozen=True)
class Placement:
    """Who a process is that somebody else has started."""

    rank: int
    world: int
    local_rank: int
    store: str | None
    """host:port of the meeting place; None when alone."""
    source: str


def torchrun(environ: Mapping[str, str] | None = None) -> Placement | None:
    """The place that RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT give, or None."""
    environ = os.environ if environ is None else environ
    if "RANK" not in environ and "WORLD_SIZE" not in environ:
        return None
    try:
        rank, world = int(environ["RANK"]), int(environ["WORLD_SIZE"])
        local = int(environ.get("LOCAL_RANK", rank))
        store = f"{environ['MASTER_ADDR']}:{int(environ['MASTER_PORT'])}"
    except KeyError as error:
        raise UsageError(
            f"RANK or WORLD_SIZE is set, but {error.args[0]} is not: torchrun sets RANK, WORLD_SIZE, "
            "MASTER_ADDR and MASTER_PORT together. Start with torchrun, or unset them."
        ) from None
    except ValueError as error:
        raise UsageError(
            f"RANK, WORLD_SIZE, LOCAL_RANK and MASTER_PORT are numbers: {error}"
        ) from None
    if not 0 <= rank < world:
        raise UsageError(
            f"RANK is {rank} and WORLD_SIZE is {world}: ranks go from 0 to {world - 1}."
        )
    return Placement(rank, world, local, store, "torchrun")


def alone() -> Placement:
    return Placement(0, 1, 0, None, "nobody: one worker")
