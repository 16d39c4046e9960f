"""Torch's default process group, for those of torch's own pieces that need it: FSDP2, DTensor, pipelining.

They take a DeviceMesh, and a DeviceMesh takes its ranks from the default group. So the group of a view makes
one when a strategy asks for a mesh, over the same store and among the same workers. It is cut with the group,
and closed with it. A process has one default group: only one group at a time can have meshes, and none in
`mh.join()` if the user has made a default group.

The process groups of a mesh have sockets of their own. Torch waits half an hour for a worker that dies while
they connect, and no other thread can end that. So gloo connects here (`_connect`), in a wait that a cut ends:
torch calls it where it makes a group, because it is registered as a backend. Otherwise its groups are as
those of the backend `gloo`.
"""

from __future__ import annotations

import gc
import itertools
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from manyhands.collectives.connections import Connections, open_sockets
from manyhands.collectives.store_gather import interruptible

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


BACKEND = "manyhands_gloo"
"""Name of the backend that connects with gloo."""
SPARE_S = 1.0
"""How much longer connecting may take than gloo says."""


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
        check: Callable[[], None],
    ) -> None:
        """`check`: called while this connects, and raises if the group was cut."""
        self._store, self._rank, self._size = store, rank, size
        self._over_nccl = backend == "nccl"
        self._backend = backend if self._over_nccl else BACKEND
        self._connect_s, self._collective_s = min(connect_s, collective_s), collective_s
        self._check = check
        self._is_cut = self._is_made = False
        self._groups: list[Any] = []
        self._connections: list[Connections] = []

    def form(self) -> None:
        """Make it: all workers connect. May be cut meanwhile."""
        if dist.is_initialized():
            raise RuntimeError(
                "a device mesh needs torch's default process group, and this process has one already: of "
                "another group, or made by the job or the script. Destroy it first."
            )
        if not self._over_nccl:
            dist.Backend.register_backend(BACKEND, self._connect, devices=["cpu", "cuda"])
        # Torch numbers its groups, and uses the numbers in keys of the store. One that failed to form counts,
        # but not in a worker that was started since.
        distributed_c10d._world.group_count = 0
        before = self._sockets()
        try:
            dist.init_process_group(
                self._backend,
                store=self._store,
                rank=self._rank,
                world_size=self._size,
                timeout=timedelta(seconds=self._connect_s),
            )
            self._is_made = True
            self._add(dist.group.WORLD, before)
        except BaseException:
            self.close()
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
        if self._over_nccl:
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
        if self._is_made:
            self._is_made = False
            dist.destroy_process_group(None)
        # With any such backend, torch gives a group of several backends ("cpu:gloo") no default one.
        plugins, name = dist.Backend._plugins, BACKEND.upper()
        if name in plugins and plugins[name].creator_fn == self._connect:
            del plugins[name]

    def _along(self, ranks: torch.Tensor, dimension: int) -> Any:
        """Make the groups of the workers that differ in one dimension only; return this worker's."""
        if ranks.shape[dimension] == self._size:
            return dist.group.WORLD
        mine = None
        for line in ranks.movedim(dimension, -1).reshape(-1, ranks.shape[dimension]).tolist():
            before = self._sockets()
            timeout = timedelta(seconds=self._connect_s)
            group = dist.new_group(line, timeout=timeout, backend=self._backend)
            if group is not dist.GroupMember.NON_GROUP_MEMBER:
                self._add(group, before)
                mine = group
        assert mine is not None, "each worker is in one line"
        return mine

    def _connect(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> Any:
        """Connect the workers of a group; called by torch."""

        def connect() -> Any:
            return dist.ProcessGroupGloo(store, rank, size, timeout=timeout)

        limit_s = timeout.total_seconds() + SPARE_S
        try:
            return interruptible(connect, timeout_s=limit_s, check=self._check)
        except TimeoutError as error:
            raise RuntimeError(f"timed out waiting for connections: {error}") from error

    def _add(self, group: Any, before: dict[int, str] | None) -> None:
        """Wait until all are connected, then allow as long as collectives may take."""
        self._groups.append(group)
        self._connections.append(Connections(before))
        if self._is_cut:  # while it was formed
            self.cut()
        # NCCL would use the current GPU anyway, and warn.
        dist.barrier(
            group=group, device_ids=[torch.cuda.current_device()] if self._over_nccl else None
        )
        distributed_c10d._set_pg_timeout(timedelta(seconds=self._collective_s), group)

    def _sockets(self) -> dict[int, str] | None:
        return None if self._over_nccl else open_sockets()
