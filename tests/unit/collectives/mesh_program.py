"""One worker of four in a 2 x 2 mesh. Writes what it has seen, as JSON.

Rank 3 leaves without a word while the others wait for it, in torch's own collectives along one dimension of
the mesh or in the default group; a thread cuts the group, as the arrival of a new view does. Then the other
three form another group and another mesh.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from typing import Any

import torch
import torch.distributed as dist

from manyhands.collectives.group import GroupLimits, TorchGroup, peer_lost

LIMITS = GroupLimits(gather_s=60.0, connect_s=30.0, collective_s=60.0)
ABSENT = 3


def form(path: str, rank: int, size: int) -> TorchGroup:
    return TorchGroup(dist.FileStore(path, size), rank=rank, size=size, limits=LIMITS)


def total(group: Any, value: float) -> float:
    tensor = torch.tensor([value])
    dist.all_reduce(tensor, group=group)
    return tensor.item()


def main(rank: int, path: str) -> None:
    group = form(path, rank, 4)
    mesh = group.device_mesh([2, 2], ["dp", "tp"])
    sent = group.bytes_sent
    found: dict[str, Any] = {
        "place": list(mesh.get_coordinate()),
        "dp": total(mesh.get_group("dp"), 10.0**rank),
        "tp": total(mesh.get_group("tp"), 10.0**rank),
        "whole": total(dist.group.WORLD, 10.0**rank),
    }
    dist.all_reduce(torch.zeros(100_000), group=mesh.get_group("tp"))
    found["sent"] = group.bytes_sent - sent
    try:
        form(f"{path}-alone", 0, 1).device_mesh([1], ["all"])
    except RuntimeError as error:
        found["second"] = str(error)
    if rank == ABSENT:
        print(json.dumps(found), flush=True)
        sys.stdin.readline()  # it is there, and does not take part
        os._exit(0)
    threading.Timer(0.2, group.cut).start()
    began = time.monotonic()
    # Rank 1 waits for rank 3 in dp, rank 2 in tp; rank 0 waits for it with all.
    waits = {0: dist.group.WORLD, 1: mesh.get_group("dp"), 2: mesh.get_group("tp")}
    try:
        total(waits[rank], 1.0)
    except RuntimeError as error:
        found["lost"], found["error"] = peer_lost(error), str(error)
    found["waited_s"] = time.monotonic() - began
    del mesh, waits
    group.close()
    found["left"] = not dist.is_initialized()
    again = form(f"{path}-again", rank, 3)
    found["again"] = total(again.device_mesh([3], ["shard"]).get_group(), 1.0)
    again.close()
    print(json.dumps(found), flush=True)
    sys.stdin.readline()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
