"""Torch's default process group, for those of torch's own pieces that need it: FSDP2, DTensor, pipelining.

They take a DeviceMesh, and a DeviceMesh takes its ranks from the default group. So the group of a view makes
one when a strategy asks for a mesh, over the same store and among the same workers. It is cut with the group,
and closed with it. A process has one default group: only one group at a time can have meshes, and none in
`mh.join()` if the user has made a default group.

The process groups of a mesh have sockets of their own. Torch waits half an hour for a worker that dies while
they connect; here it is `connect_s`.
"""

from __future__ import annotations

import gc
import itertools
import socket
from collections.abc import Iterator, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from manyhands.collectives.connections import Connections, open_sockets

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class DefaultGroup:
    """The default group, made from a store that all its workers have, and the meshes made from it."""

    def __init__(
        self,
        store: dist.Store,
        *,
        rank: int,
        size: int,
        backend: str,
        connect_s: float,
        collective_s: float,
    ) -> None:
        if dist.is_initialized():
            raise RuntimeError(
                "a device mesh needs torch's default process group, and this process has one already: of "
                "another group, or made by the job or the script. Destroy it first."
            )
        self._size, self._backend = size, backend
        self._connect_s, self._collective_s = connect_s, collective_s
        self._is_cut = False
        self._groups: list[Any] = []
        self._connections: list[Connections] = []
        timeout = timedelta(seconds=min(connect_s, collective_s))
        # Torch numbers its groups, and uses the numbers in keys of the store. One that failed to form counts,
        # but not in a worker that was started since.
        distributed_c10d._world.group_count = 0
        before = self._sockets()
        try:
            dist.init_process_group(
                backend,
                store=dist.PrefixStore("default", store),
                rank=rank,
                world_size=size,
                timeout=timeout,
            )
            self._add(dist.group.WORLD, before)
        except BaseException:
            if dist.is_initialized():
                dist.destroy_process_group(None)
            raise

    def mesh(self, sizes: Sequence[int], names: Sequence[str], *, device: str) -> DeviceMesh:
        """Make a mesh of all workers. All of them call it, in the same order of meshes."""
        from torch.distributed.device_mesh import DeviceMesh

        ranks = torch.arange(self._size).view(*sizes)
        along = [self._along(ranks, dimension) for dimension in range(ranks.dim())]
        return DeviceMesh.from_group(
            along, torch.device(device).type, mesh=ranks, mesh_dim_names=tuple(names)
        )

    @property
    def bytes_sent(self) -> int:
        """Bytes that this worker has sent, as the kernel counted them; 0 where it does not (NCCL)."""
        return sum(connections.bytes_sent() or 0 for connections in self._connections)

    def connections(self) -> Iterator[socket.socket]:
        return itertools.chain.from_iterable(list(self._connections))

    def cut(self) -> None:
        """Make every wait in it and its meshes fail. May be called from any thread."""
        self._is_cut = True
        if self._backend == "nccl":
            for group in self._groups:
                with suppress(RuntimeError):
                    group.abort()
        for connections in list(self._connections):
            connections.shut_down()

    def close(self) -> None:
        # Modules that nobody uses any more go first. One that is freed later ends gloo's threads while it has
        # the interpreter's lock, which they may be waiting for.
        gc.collect()
        self._groups.clear()
        dist.destroy_process_group(None)

    def _along(self, ranks: torch.Tensor, dimension: int) -> Any:
        """Make the groups of the workers that differ in one dimension only; return this worker's."""
        if ranks.shape[dimension] == self._size:
            return dist.group.WORLD
        mine = None
        for line in ranks.movedim(dimension, -1).reshape(-1, ranks.shape[dimension]).tolist():
            before = self._sockets()
            timeout = timedelta(seconds=min(self._connect_s, self._collective_s))
            group = dist.new_group(line, timeout=timeout, backend=self._backend)
            if group is not dist.GroupMember.NON_GROUP_MEMBER:
                self._add(group, before)
                mine = group
        assert mine is not None, "each worker is in one line"
        return mine

    def _add(self, group: Any, before: dict[int, str] | None) -> None:
        """Wait until all are connected, then allow as long as collectives may take."""
        dist.barrier(group=group)
        distributed_c10d._set_pg_timeout(timedelta(seconds=self._collective_s), group)
        self._groups.append(group)
        self._connections.append(Connections(before))
        if self._is_cut:  # while it was formed
            self.cut()

    def _sockets(self) -> dict[int, str] | None:
        return open_sockets() if self._backend == "gloo" else None
