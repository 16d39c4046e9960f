"""Which description of the cluster applies to this process."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping

from manyhands.cluster.spec import COORDINATOR, ClusterSpec, Entry
from manyhands.cluster.specs import torch_variables
from manyhands.errors import ClusterError


def detect(environ: Mapping[str, str] | None = None, *, hostname: str | None = None) -> ClusterSpec:
    """The cluster that this process is a part of, as its environment says; an error if it says nothing."""
    found = look(environ, hostname=hostname)
    if found is None:
        raise ClusterError(
            "Nothing in the environment says which cluster this process is a part of. Start it with "
            "torchrun, or set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT."
        )
    return found


def look(
    environ: Mapping[str, str] | None = None, *, hostname: str | None = None
) -> ClusterSpec | None:
    """The same, or None if the environment says nothing of a cluster."""
    environ = os.environ if environ is None else environ
    hostname = socket.gethostname() if hostname is None else hostname
    if torch_variables.applies(environ):
        return torch_variables.read(environ, hostname=hostname)
    return None


def alone(hostname: str | None = None) -> ClusterSpec:
    """The cluster of a process that nobody has told anything."""
    name = socket.gethostname() if hostname is None else hostname
    me = Entry(name="rank-0", role=COORDINATOR, rank=0, host=name, local_rank=0)
    return ClusterSpec((me,), host=name, port=None, source="nobody: one worker", mine=me)
