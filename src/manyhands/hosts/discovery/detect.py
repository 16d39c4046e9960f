"""Picks the description of the cluster that applies to this process: the first of

1. a cluster file, by `--cluster FILE` or MANYHANDS_CLUSTER: it was given for exactly this run;
2. torchrun: it started this very process, even if a scheduler started torchrun;
3. TF_CONFIG;
4. RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, set by anything else;
5. srun;
6. the variables of a Kubernetes job.

If several of 3 to 6 are present, each describes this process, so they must agree on its rank and on the
number of processes. If they don't, the error names both.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from pathlib import Path

from manyhands.errors import ClusterError
from manyhands.hosts.discovery import file, kubernetes, slurm, tf_config, torch_variables
from manyhands.hosts.spec import COORDINATOR, ClusterSpec, Entry

FILE, AS = "MANYHANDS_CLUSTER", "MANYHANDS_AS"


def detect(
    environ: Mapping[str, str] | None = None,
    *,
    cluster: Path | None = None,
    name: str | None = None,
    hostname: str | None = None,
    or_alone: bool = False,
) -> ClusterSpec:
    """Return the cluster that this process belongs to.

    `cluster` and `name` are the values of `--cluster` and `--as`. If nothing describes a cluster, it is an
    error, or with `or_alone` a cluster of this process only.
    """
    environ = os.environ if environ is None else environ
    hostname = socket.gethostname() if hostname is None else hostname
    name = name or environ.get(AS) or None
    path = cluster or (Path(environ[FILE]) if environ.get(FILE) else None)
    if path is not None:
        return file.read(path, name=name, hostname=hostname)
    if name is not None:
        given = f"--as {name}" if environ.get(AS) != name else f"{AS}={name}"
        raise ClusterError(
            f"{given}: names are those of a cluster file. Give it too:  --cluster FILE."
        )
    if torch_variables.is_torchrun(environ):
        return torch_variables.read(environ, hostname=hostname)
    found = [
        reader.read(environ, hostname=hostname)
        for reader in (tf_config, torch_variables, slurm, kubernetes)
        if reader.applies(environ) and not _leftover(reader, environ)
    ]
    for other in found[1:]:
        _agree(found[0], other)
    if found:
        return found[0]
    if not or_alone:
        raise ClusterError(_nothing(environ))
    me = Entry(name="rank-0", role=COORDINATOR, rank=0, host=hostname, local_rank=0)
    return ClusterSpec((me,), host=hostname, port=None, source="no description", mine=me)


def _leftover(reader: object, environ: Mapping[str, str]) -> bool:
    """Return whether torch's variables are only a WORLD_SIZE that a Slurm job script sets; the rank is from
    srun."""
    if reader is not torch_variables or "RANK" in environ or not slurm.applies(environ):
        return False
    spec = slurm.read(environ)
    if environ["WORLD_SIZE"].strip() != str(spec.size):
        raise ClusterError(
            f"WORLD_SIZE is {environ['WORLD_SIZE']!r}, and srun has started {spec.size} tasks. "
            "Make them equal, or unset WORLD_SIZE."
        )
    return True


def _agree(one: ClusterSpec, other: ClusterSpec) -> None:
    if (one.me.rank, one.size) != (other.me.rank, other.size):
        raise ClusterError(
            f"{one.source} says that this process is number {one.me.rank} of {one.size}, and {other.source} "
            f"that it is number {other.me.rank} of {other.size} (counted from 0). Unset the variables of the "
            "one that is not meant, or name a cluster file with  --cluster FILE."
        )


def _nothing(environ: Mapping[str, str]) -> str:
    if slurm.is_batch_script(environ):
        return (
            f"This is inside the Slurm job {environ['SLURM_JOB_ID']}, but srun has not started it, so "
            "it is one process that knows of no others. Put  srun  before the command, or write the "
            "job's script with  manyhands launch slurm."
        )
    if kubernetes.INDEX in environ:
        return (
            f"{kubernetes.INDEX} is set, but {kubernetes.PODS} and {kubernetes.FIRST} are not: the "
            "index alone does not say how many pods there are, nor where the first one is. Write the "
            "job's file with  manyhands launch kubernetes."
        )
    return (
        "This process does not know which cluster it belongs to. Start it with torchrun, with srun, or "
        "from a file of  manyhands launch kubernetes; or set RANK, WORLD_SIZE, MASTER_ADDR and "
        "MASTER_PORT, or TF_CONFIG; or give a cluster file with  --cluster FILE."
    )
