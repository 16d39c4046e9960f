"""Process groups of torch.distributed, formed anew for each view.

The meeting place needs no fixed port: inside a host a file in the run's private folder, between hosts
a store that rank 0 opens on a free port and announces on the board.
"""

from __future__ import annotations

import os
from datetime import timedelta
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch.distributed as dist

    from manyhands.cluster.view import Me, View

_LOST = (
    "connection closed by peer",
    "connection reset by peer",
    "connection refused",
    "broken pipe",
    "socket closed",
    "timed out waiting",
    "operation timed out",
    "connectfullmesh failed",
    "nccl communicator was aborted",
    "remote process exited",
)


def join_group(me: Me, view: View) -> None:
    """Make the default process group of torch.distributed the one of this view."""
    import torch
    import torch.distributed as dist

    backend = backend_for(view)
    if backend == "nccl":
        torch.cuda.set_device(me.device)
    dist.init_process_group(
        backend,
        store=_store(me, view),
        rank=me.rank,
        world_size=view.world,
        timeout=timedelta(seconds=me.timeouts.collective_s),
    )


def leave_group() -> None:
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()


def backend_for(view: View) -> str:
    """NCCL where every worker has a GPU of its own, gloo otherwise (it also takes a shared GPU)."""
    gpus = [seat.device_id for seat in view.workers if seat.device.startswith("cuda")]
    return "nccl" if len(set(gpus)) == view.world else "gloo"


def describe_transport() -> str:
    import torch.distributed as dist

    backend = str(dist.get_backend())
    interface = os.environ.get("GLOO_SOCKET_IFNAME")
    return f"{backend} on {interface}" if backend == "gloo" and interface else backend


def peer_lost(error: BaseException) -> bool:
    """Whether an error of a collective means that another member is gone or frozen."""
    text = str(error).lower()
    return any(phrase in text for phrase in _LOST)


def _store(me: Me, view: View) -> dist.Store:
    import torch.distributed as dist

    limit = timedelta(seconds=me.timeouts.view_s)
    if me.rendezvous is not None:
        return _given_store(me, view, limit)
    if view.one_host:
        file = dist.FileStore(str(me.scratch / f"view-{view.number}"), view.world)
        file.set_timeout(limit)
        return file
    assert me.board is not None, "members on several hosts meet by way of a coordinator"
    key = f"store/{view.number}"
    if me.rank == 0:
        store = dist.TCPStore(
            me.host, 0, view.world, is_master=True, wait_for_workers=False, timeout=limit
        )
        me.board.post(key, f"{me.host}:{store.port}")
        return store
    host, _, port = me.board.fetch(key, timeout_s=me.timeouts.view_s).rpartition(":")
    return dist.TCPStore(host, int(port), view.world, is_master=False, timeout=limit)


def _given_store(me: Me, view: View, limit: timedelta) -> dist.Store:
    """The store at the address that every worker was given; who opens it is for torch to know."""
    from torch.distributed.rendezvous import rendezvous

    address = f"env://?rank={me.rank}&world_size={view.world}"
    store, _, _ = next(iter(rendezvous(address, timeout=limit)))
    return store
