"""The variables that `srun` sets for each task: SLURM_PROCID and others. Pure.

Rank 0 runs on the first host of the step's list. The port is made from the job's number, so that all tasks
know it without communication and two jobs on a host rarely use the same one:

    15000 + (8 * SLURM_JOB_ID + SLURM_STEP_ID) % 16000

MASTER_ADDR and MASTER_PORT, which many job scripts set, take precedence over both.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from manyhands.errors import ClusterError
from manyhands.hosts.discovery import values
from manyhands.hosts.discovery.nodelist import expand_nodelist
from manyhands.hosts.spec import ClusterSpec

NODELISTS = ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
SHELL_STEPS = {str(2**32 - back) for back in range(3, 7)}
"""Pending, extern, batch and interactive steps: SLURM_PENDING_STEP to SLURM_INTERACTIVE_STEP in slurm.h."""
FIRST_PORT, NUM_PORTS, STEPS_A_JOB = 15000, 16000, 8


def applies(environ: Mapping[str, str]) -> bool:
    """Return whether this is inside a step: a job's script itself has most of these variables too, but is one
    process."""
    return "SLURM_PROCID" in environ and _step(environ) is not None


def is_batch_script(environ: Mapping[str, str]) -> bool:
    """Return whether this is inside an allocation, but not started by srun."""
    return "SLURM_JOB_ID" in environ and _step(environ) is None


def read(environ: Mapping[str, str], *, hostname: str = "") -> ClusterSpec:
    tasks = _needed(environ, "SLURM_NTASKS", "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")
    listed = _needed(environ, "SLURM_JOB_NODELIST", *NODELISTS)
    job = _needed(environ, "SLURM_JOB_ID", "SLURM_JOB_ID", "SLURM_JOBID")
    world = values.number(environ, tasks, least=1, most=values.MAX_ENTRIES)
    rank = values.number(environ, "SLURM_PROCID")
    values.check_below("SLURM_PROCID", rank, tasks, world, "tasks")
    hosts = expand_nodelist(environ[listed], name=listed)
    local = values.number(environ, "SLURM_LOCALID", default=0)
    at = _my_host(environ, hosts, listed)
    places = _places(environ, hosts, world)
    if places is None or places[rank] != (at, local):
        # An unusual layout: only the variables of this task itself are certain.
        places = [(0, 0), *[(None, None)] * (world - 1)]
        places[rank] = (at, local)
    entries = values.ranked_entries(
        "task", (("" if at is None else hosts[at], local_rank) for at, local_rank in places)
    )
    return ClusterSpec(
        entries,
        host=values.host(environ, "MASTER_ADDR") if "MASTER_ADDR" in environ else hosts[0],
        port=_port(environ, job),
        source="srun",
        mine=entries[rank],
    )


def _needed(environ: Mapping[str, str], usual: str, *names: str) -> str:
    """Return the first of these variables that is set, or report that the usual one is missing."""
    name = values.first_set(environ, *names)
    if name is None:
        raise ClusterError(
            f"SLURM_PROCID is set, but {usual} is not: srun sets both. Start each task with  srun, "
            "or unset SLURM_PROCID."
        )
    return name


def _step(environ: Mapping[str, str]) -> str | None:
    """Return the variable that names the step of srun, if there is one. The shell of salloc (interactive) and
    a job's script (batch) may have a step too: a single process, with a number that srun never uses."""
    name = values.first_set(environ, "SLURM_STEP_ID", "SLURM_STEPID")
    if name is None or environ[name].strip() in SHELL_STEPS:
        return None
    return name


def _port(environ: Mapping[str, str], job: str) -> int:
    if "MASTER_PORT" in environ:
        return values.number(environ, "MASTER_PORT", least=1, most=values.MAX_PORT)
    step = _step(environ)
    steps = values.number(environ, step) if step else 0
    return FIRST_PORT + (STEPS_A_JOB * values.number(environ, job) + steps) % NUM_PORTS


def _my_host(environ: Mapping[str, str], hosts: Sequence[str], listed: str) -> int:
    """Return the position of this host in the list."""
    if "SLURM_NODEID" not in environ:
        name = environ.get("SLURMD_NODENAME", "")
        if len(hosts) > 1 and name not in hosts:
            raise ClusterError(
                f"Neither SLURM_NODEID nor SLURMD_NODENAME says which host of {listed} this is: "
                "srun sets both. Start each task with  srun."
            )
        return hosts.index(name) if name in hosts else 0
    at = values.number(environ, "SLURM_NODEID")
    if at >= len(hosts):
        raise ClusterError(
            f"SLURM_NODEID is {at}, and {listed} is {environ[listed]!r}, which has {len(hosts)} "
            f"hosts: they go from 0 to {len(hosts) - 1}."
        )
    return at


Place = tuple[int | None, int | None]
"""Index of the host in the list, and the local rank there."""


def _places(environ: Mapping[str, str], hosts: Sequence[str], world: int) -> list[Place] | None:
    """Return where each task runs, for the two usual layouts; None if unknown."""
    name = values.first_set(environ, "SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE")
    if name is None:
        return None
    counts = expand_counts(environ[name], name=name)
    if len(counts) != len(hosts) or sum(counts) != world:
        return None
    spots: list[Place] = [(at, local) for at, count in enumerate(counts) for local in range(count)]
    layout = environ.get("SLURM_DISTRIBUTION", "block").partition(":")[0].partition(",")[0]
    if layout == "cyclic":
        spots.sort(key=lambda spot: (spot[1], spot[0]))
    return spots if layout in ("block", "cyclic") else None


def expand_counts(text: str, *, name: str = "SLURM_TASKS_PER_NODE") -> list[int]:
    """`2(x3),1` is 2, 2, 2, 1."""
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*([0-9]{1,6})(?:\(x([0-9]{1,6})\))?\s*", part)
        if match is None or len(counts) + int(match[2] or 1) > values.MAX_ENTRIES:
            raise ClusterError(
                f"{name} is {text!r}: {part!r} is not a number of tasks. Slurm writes it like  2(x3),1."
            )
        counts += [int(match[1])] * int(match[2] or 1)
    return counts
