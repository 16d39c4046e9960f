"""One worker of four, which waits in a group or one of its splits for rank 3, which never comes.

The worker reads cases from its standard input, one a line. For each, it forms a new group of all workers, a
split of it, and a split of the split:

    everyone   0 1 2 3
    trio         1 2 3
    pair           2 3

Rank 0 waits in the first, rank 1 in the second, rank 2 in the third, or while it makes a mesh of its workers.
A thread cuts the group of all, as the arrival of a new view does. The worker writes how its wait ended, and
how long after the cut.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from manyhands.collectives.group import Group, GroupLimits, HostMemory, TorchGroup, peer_lost

ABSENT = 3
CUT_AFTER_S = 0.1
LIMITS = GroupLimits(gather_s=60.0, connect_s=30.0, collective_s=60.0)
SIZE = 1000


def wait_in(kind: str, group: Group) -> None:
    """Do something that needs the last worker of the group."""
    size, absent = group.size, group.size - 1
    tensor, whole = torch.ones(SIZE), torch.ones(SIZE * size)
    operations: dict[str, Callable[[], Any]] = {
        "all_reduce": lambda: group.all_reduce(tensor),
        "reduce_scatter": lambda: group.reduce_scatter(whole, into=tensor),
        "all_gather": lambda: group.all_gather(tensor, into=whole),
        "all_to_all": lambda: group.all_to_all(whole, into=whole.clone()),
        "broadcast": lambda: group.broadcast(tensor, source=absent),
        "send": lambda: group.send(tensor, to=absent),
        "recv": lambda: group.recv(tensor, source=absent),
        "barrier": group.barrier,
        "several": lambda: [
            work.wait()
            for work in [group.all_reduce(tensor.clone(), async_op=True) for _ in range(3)]
        ],
        "gather": lambda: group.split(range(size)),
        "connect": lambda: group.split(range(size)),
        "mesh gather": lambda: group.device_mesh([size], ["all"]),
        "mesh connect": lambda: group.device_mesh([size], ["all"]),
    }
    operations[kind]()


def carry_out(
    kind: str, store: dist.Store, rank: int, memory: HostMemory | None = None
) -> dict[str, Any]:
    everyone: Group = TorchGroup(store, rank=rank, size=4, limits=LIMITS, memory=memory)
    trio = everyone.split([1, 2, 3]) if rank >= 1 else everyone
    pair = trio.split([1, 2]) if rank >= 2 else trio
    if rank == ABSENT:
        if kind in ("connect", "mesh connect"):  # it announced itself in each, and came no further
            for number, group in enumerate((everyone, trio, pair)):
                ranks = "-".join(map(str, range(group.size)))
                awaited = f"split-{ranks}-1" if kind == "connect" else "default"
                path = [*["split-1-2-3-1", "split-1-2-1"][:number], awaited, "here"]
                store.set("/".join([*path, str(group.size - 1)]), "")
        return {"group": everyone}  # kept open until the next case
    moments = {}

    def cut() -> None:
        time.sleep(CUT_AFTER_S)
        moments["cut"] = time.monotonic()
        everyone.cut()

    thread = threading.Thread(target=cut)
    thread.start()
    error: BaseException | None = None
    try:
        wait_in(kind, pair)
    except RuntimeError as caught:
        error = caught
    ended = time.monotonic()
    thread.join()
    everyone.close()
    closed_s = time.monotonic() - ended
    assert not dist.is_initialized()
    return {
        "error": str(error),
        "lost": error is not None and peer_lost(error),
        "after_cut_s": ended - moments["cut"],
        "closed_s": closed_s,
    }


def main() -> None:
    rank, place = int(sys.argv[1]), sys.argv[2]
    torch.set_num_threads(1)
    store = dist.FileStore(place, 4)
    memory = HostMemory(Path(place).parent, tuple(sys.argv[3])) if sys.argv[3:] else None
    kept: Any = None
    for number, line in enumerate(sys.stdin):
        prefixed = dist.PrefixStore(str(number), store)
        kept = carry_out(json.loads(line), prefixed, rank, memory)
        print(json.dumps({} if rank == ABSENT else kept), flush=True)
    del kept


def at_a_store_that_dies() -> None:
    """Rank 0 keeps the store, as between hosts, and is killed. Rank 1 tells how it notices: in the group, in
    the store, and where it forms a split."""
    rank, port = int(sys.argv[2]), int(sys.argv[3])
    timeout = timedelta(seconds=30)
    store = dist.TCPStore(
        *("127.0.0.1", port, 2), is_master=rank == 0, wait_for_workers=False, timeout=timeout
    )
    group = TorchGroup(store, rank=rank, size=2, limits=LIMITS)
    if rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    found = []
    for notice in (group.barrier, lambda: store.check(["key"]), lambda: group.split([0, 1])):
        try:
            notice()
        except RuntimeError as error:
            found.append({"error": str(error), "lost": peer_lost(error)})
    print(json.dumps(found), flush=True)
    os._exit(0)


if __name__ == "__main__":
    at_a_store_that_dies() if sys.argv[1] == "tcp" else main()
