"""Detects whether this process is one of several that were started together. Pure.

For a command without `--on`, where each process would train by itself, in its own run folder. Only reliable
signs count. A Slurm allocation does not, unless srun started this process; nor does a WORLD_SIZE that a
script exports for later, an index of a Kubernetes job (sweeps have one), or a description that can't be read.
"""

from __future__ import annotations

import os
import shlex
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from manyhands.errors import ClusterError
from manyhands.hosts.discovery import kubernetes, slurm, tf_config, torch_variables
from manyhands.hosts.spec import ClusterSpec

STARTERS = {
    "torchrun": "torchrun ... --no-python ",
    "srun": "srun ... ",
    "mpirun": "mpirun ... ",
}
"""Text typed before the command, by the source of the description."""
MPI = {
    "OMPI_COMM_WORLD_RANK": "OMPI_COMM_WORLD_SIZE",  # Open MPI
    "PMI_RANK": "PMI_SIZE",  # MPICH, Intel MPI
}


@dataclass(frozen=True)
class LauncherProcess:
    source: str
    """Source of the description: "torchrun"."""
    size: int
    variables: str = ""
    """Variables that a shell between the launcher and the command has to set."""
    spec: ClusterSpec | None = None
    """None: `--on env` needs variables that are not set yet."""

    def line(self, argv: Sequence[str]) -> str:
        """Return the command of `argv`, as it has to be typed to train together."""
        module = os.path.basename(argv[0]) == "__main__.py"
        command = shlex.join([*argv[1:], "--on", "env"])
        if module and self.source == "torchrun":
            return f"torchrun ... -m manyhands {command}"
        program = "python -m manyhands" if module else "manyhands"
        line = f"{program} {command}"
        if self.variables:
            line = f"sh -c {shlex.quote(f'{self.variables} exec {line}')}"
        return STARTERS.get(self.source, "") + line


def one_of_several(environ: Mapping[str, str] | None = None) -> LauncherProcess | None:
    environ = os.environ if environ is None else environ
    if (found := _mpi(environ)) is not None:
        return found
    for reader in (torch_variables, tf_config, slurm, kubernetes):
        if not reader.applies(environ):
            continue
        try:
            spec = reader.read(environ, hostname=socket.gethostname())
        except ClusterError:
            continue
        if len(spec.entries) > 1:
            return LauncherProcess(spec.source, len(spec.entries), spec=spec)
    return None


def _mpi(environ: Mapping[str, str]) -> LauncherProcess | None:
    """mpirun, whose variables --on env does not read: they have to be passed on under other names."""
    if torch_variables.applies(environ) or slurm.applies(environ):
        return None
    for rank, size in MPI.items():
        number = environ.get(size, "")
        if rank in environ and number.isdecimal() and int(number) > 1:
            told = f"RANK=${rank} WORLD_SIZE=${size} MASTER_ADDR=HOST MASTER_PORT=29500"
            return LauncherProcess("mpirun", int(number), told)
    return None
