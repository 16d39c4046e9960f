"""Forms the group of a view: all its workers meet at a store, and connect.

The store needs no fixed port: inside a host it is a file in the run's private folder, between hosts rank 0
opens it on a free port and announces it on the board. Where another launcher started the workers (torchrun),
it is the launcher's.
"""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from manyhands.collectives import gloo_tls
from manyhands.collectives.costs import Transport
from manyhands.collectives.group import CONNECT_S, Group, GroupLimits, HostMemory, TorchGroup
from manyhands.collectives.lone_worker import LoneWorker
from manyhands.collectives.reachability import check_connections, check_view, exchange
from manyhands.hosts.machine import identity
from manyhands.hosts.view import gpu_each, reduces_in_hosts

if TYPE_CHECKING:
    from manyhands.hosts.me import Me
from manyhands.hosts.view import View


def join_group(me: Me, view: View, *, transport: Transport = "auto") -> Group:
    """Connect to the other workers of a view. With `transport="tcp"` they share no memory.

    Raises ViewChanging if a newer view comes first. If a peer is lost, it raises an error of torch for which
    `peer_lost` is true.
    """
    if view.world == 1:
        return LoneWorker()
    if me.make_group is not None:
        made: Group = me.make_group(view)
        return made
    backend = backend_for(view)
    assert backend == "gloo" or not gloo_tls.in_use(), "NCCL has no TLS"
    if backend == "nccl":
        torch.cuda.set_device(me.device)
    store = _store(me, view)
    if me.board is not None:
        in_doubt = _gather_at(store, me, view)
        if in_doubt and not view.one_host:
            check_connections(store, me, view)
        me.in_doubt = False
    collective_s = me.timeouts.collective_s
    limits = GroupLimits(
        gather_s=me.timeouts.view_s,
        connect_s=CONNECT_S if me.board is not None else collective_s,
        collective_s=collective_s,
    )
    memory = None
    if reduces_in_hosts(view) and transport == "auto":
        hosts = [seat.host for seat in view.workers]
        if me.board is None:  # nobody has told this worker where the others are
            hosts = exchange(store, me, view, "machine", identity())
        memory = HostMemory(me.view_folder(view), tuple(hosts)).for_ranks(range(view.world))
    group = TorchGroup(
        store,
        rank=me.rank,
        size=view.world,
        backend=backend,
        device=me.device,
        limits=limits,
        check=lambda: check_view(me),
        memory=memory,
    )
    group.watch()
    return group


def backend_for(view: View) -> str:
    """Choose NCCL if every worker has a GPU of its own, otherwise gloo (which can also share a GPU)."""
    return "nccl" if gpu_each(view.workers) else "gloo"


def _gather_at(store: dist.Store, me: Me, view: View) -> bool:
    """Wait until all workers of the view have joined the store. Returns true if any of them has lost a
    connection without a death, so that not all may be able to reach each other."""
    told = exchange(store, me, view, "here", f"{me.address} {int(me.in_doubt)}")
    me.addresses = {}
    for seat, text in zip(view.workers, told, strict=True):
        if seat.name != me.name:
            me.addresses.setdefault(text.split()[0], []).append(seat.name)
    return any(text.endswith("1") for text in told)


def _store(me: Me, view: View) -> dist.Store:
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
