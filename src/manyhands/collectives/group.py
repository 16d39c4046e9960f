"""Process groups of torch.distributed, a new one for each view.

The rendezvous needs no fixed port: inside a host it is a file in the run's private folder, between hosts a
store that rank 0 opens on a free port and announces on the board.

When a worker dies, gloo raises only in those that are receiving from it; the others keep waiting for each
other. So a group can be cut from another thread: its connections are shut down, and every wait in it, here
and at the other end, fails at once.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator, Mapping
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING

from manyhands.collectives import gloo_tls
from manyhands.collectives.reachability import check_connections, exchange
from manyhands.errors import SpecError
from manyhands.transport.keepalive import ask_now_and_then, look_after

if TYPE_CHECKING:
    import torch.distributed as dist

    from manyhands.hosts.me import Me
    from manyhands.hosts.view import View

CONNECT_S = 5.0
"""Timeout of connecting. All workers of a view connect at the same moment, so it usually takes much less;
after a timeout they try again."""

_LOST = (
    "connection closed by peer",
    "connection reset by peer",
    "connection refused",
    "broken pipe",
    "socket closed",
    "timed out waiting",
    "wait timeout",
    "operation timed out",
    "connection timed out",
    "no route to host",
    "connectfullmesh failed",
    "nccl communicator was aborted",
    "remote process exited",
    "client socket has timed out",
)


class Group:
    """The default process group of torch.distributed, from `join_group` to `leave`."""

    def __init__(self, backend: str, sockets: Mapping[int, str]) -> None:
        self.backend = backend
        self._sockets = dict(sockets)
        """Connections of a gloo group: file descriptor to socket."""
        self._over = threading.Event()
        if sockets:
            for connection in self._connections():
                ask_now_and_then(connection)
            # Gloo would wait forever for a peer that is alive and unreachable.
            look_after(self._connections, until=self._over.is_set)

    def cut(self) -> None:
        """Make every wait in this group fail. May be called from any thread."""
        import torch.distributed as dist

        if self.backend == "nccl" and dist.is_initialized():
            with suppress(RuntimeError):
                dist.distributed_c10d._abort_process_group()
        for connection in self._connections():
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def leave(self) -> None:
        self._over.set()
        leave_group()

    def _connections(self) -> Iterator[socket.socket]:
        now = _open_sockets()
        for number, link in self._sockets.items():
            if now.get(number) != link:
                continue  # closed; the number may belong to another file by now
            with suppress(OSError), socket.socket(fileno=os.dup(number)) as connection:
                if not connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    yield connection  # not a listening one: gloo aborts if that is shut down


def join_group(me: Me, view: View) -> Group:
    """Make the default process group of torch.distributed the one of this view."""
    import torch
    import torch.distributed as dist

    backend = backend_for(view)
    if backend == "nccl" and gloo_tls.in_use():
        raise SpecError(
            f"allreduce(tls=true): these workers have GPUs, and NCCL has no TLS. {gloo_tls.INSTEAD}"
        )
    if backend == "nccl":
        torch.cuda.set_device(me.device)
    before = _open_sockets()
    limit = timedelta(seconds=me.timeouts.collective_s)
    # Gloo can't be cut while it connects: a short timeout, in case a peer dies at that moment.
    first = timedelta(seconds=CONNECT_S) if me.board is not None and backend == "gloo" else limit
    store = _store(me, view)
    if me.board is not None:
        in_doubt = _gather_at(store, me, view)
        if in_doubt and not view.one_host:
            check_connections(store, me, view)
        me.in_doubt = False
    # torch counts groups, failed ones too, and uses the count in keys: all workers must have the same.
    dist.distributed_c10d._world.group_count = 0
    dist.init_process_group(
        backend, store=store, rank=me.rank, world_size=view.world, timeout=first
    )
    if first != limit:
        dist.distributed_c10d._set_pg_timeout(limit, dist.distributed_c10d._get_default_group())
    made = {fd: link for fd, link in _open_sockets().items() if before.get(fd) != link}
    return Group(backend, made if backend == "gloo" else {})


def _gather_at(store: dist.Store, me: Me, view: View) -> bool:
    """Wait until all workers of the view have joined the store. Returns true if any of them has lost a
    connection without a death, so that not all may be able to reach each other."""
    told = exchange(store, me, view, "here", f"{me.address} {int(me.in_doubt)}")
    me.addresses = {}
    for seat, text in zip(view.workers, told, strict=True):
        if seat.name != me.name:
            me.addresses.setdefault(text.split()[0], []).append(seat.name)
    return any(text.endswith("1") for text in told)


def _open_sockets() -> dict[int, str]:
    """Return the sockets of this process: file descriptor to identity. Empty without /proc."""
    found = {}
    with suppress(OSError):
        for name in os.listdir("/proc/self/fd"):
            with suppress(OSError):
                link = os.readlink(f"/proc/self/fd/{name}")
                if link.startswith("socket:"):
                    found[int(name)] = link
    return found


def leave_group() -> None:
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()


def backend_for(view: View) -> str:
    """Choose NCCL if every worker has a GPU of its own, otherwise gloo (which can also share a GPU)."""
    gpus = [seat.device_id for seat in view.workers if seat.device.startswith("cuda")]
    return "nccl" if len(set(gpus)) == view.world else "gloo"


def describe_transport() -> str:
    import torch.distributed as dist

    backend = str(dist.get_backend())
    interface = os.environ.get("GLOO_SOCKET_IFNAME")
    if backend == "gloo" and gloo_tls.in_use():
        backend += " with TLS"
    return f"{backend} on {interface}" if backend.startswith("gloo") and interface else backend


def peer_lost(error: BaseException) -> bool:
    """Return true if an error of a collective means that another member is gone or frozen."""
    text = str(error).lower()
    return any(phrase in text for phrase in _LOST)


def _store(me: Me, view: View) -> dist.Store:
    import torch.distributed as dist
    from torch.distributed.rendezvous import rendezvous

    limit = timedelta(seconds=me.timeouts.view_s)
    if me.rendezvous is not None:
        # Every worker was given this address; torch decides who opens the store, which outlives a view.
        address = f"tcp://{me.rendezvous}?rank={me.rank}&world_size={view.world}"
        store, _, _ = next(iter(rendezvous(address, timeout=limit)))
        return dist.PrefixStore(f"view-{view.number}", store)
    if view.one_host:
        file = dist.FileStore(str(me.view_folder(view) / "store"), view.world)
        file.set_timeout(timedelta(seconds=CONNECT_S))
        return file
    assert me.board is not None, "between hosts the address is on the coordinator's board"
    key = f"store/{view.number}"
    if me.rank == 0:
        store = dist.TCPStore(
            me.address, 0, view.world, is_master=True, wait_for_workers=False, timeout=limit
        )
        me.board.post(key, f"{me.address}:{store.port}")
        return store
    host, _, port = me.board.fetch(key, timeout_s=me.timeouts.view_s).rpartition(":")
    me.addresses = {host: [view.workers[0].name]}
    first = timedelta(seconds=CONNECT_S)  # it listens already
    found = dist.TCPStore(host, int(port), view.world, is_master=False, timeout=first)
    found.set_timeout(limit)
    return found
