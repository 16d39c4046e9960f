"""One worker of a group that reduces in shared memory, round after round, each in a new group.

The host of each worker is a letter in the second argument; in fact all are this one.

The worker reads rounds from its standard input, one a line: the number of the round, what to do, and how
often. It writes a line when it is about to begin, and one with the result.

    sums       reduce tensors of many sizes in many ways, and compare all bits with sums in rank order, of
               each host and then of the hosts
    forever    reduce until an error comes, then leave; the result tells the error, and what is left behind
    mismatch   each worker gives another size
"""

from __future__ import annotations

import gc
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from manyhands.collectives.group import Group, GroupLimits, HostMemory, TorchGroup, peer_lost
from manyhands.collectives.sums import Reduction, reduce_in_order

LIMITS = GroupLimits(gather_s=60.0, connect_s=30.0, collective_s=60.0)
ALLOCATED = 300_001
"""Elements: no multiple of anything."""
MAPS_OF_A_GROUP = 1
"""Of shared memory, before `allocate`."""


def numbers(rank: int, seed: int, numel: int, dtype: torch.dtype) -> Tensor:
    """Numbers whose sum depends on the order in which they are added."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    floats = torch.randn(numel, generator=generator) * 10.0 ** (4 * (rank % 3))
    return floats.to(dtype)


def expected(hosts: str, seed: int, numel: int, dtype: torch.dtype, op: Reduction) -> Tensor:
    of_hosts = []
    for host in dict.fromkeys(hosts):
        ranks = [rank for rank, each in enumerate(hosts) if each == host]
        of_hosts.append(torch.empty(numel, dtype=dtype))
        tensors = [numbers(rank, seed, numel, dtype) for rank in ranks]
        reduce_in_order(tensors, into=of_hosts[-1], op=op)
    total = torch.empty(numel, dtype=dtype)
    reduce_in_order(of_hosts, into=total, op=op)
    return total


def compare_sums(group: Group, hosts: str, repeats: int) -> None:
    rank = group.rank
    too_small = group.allocate(2 * ALLOCATED)
    group.all_reduce(too_small)
    group.release(too_small)
    del too_small
    assert left_behind()["maps"] == MAPS_OF_A_GROUP
    memory = group.allocate(4 * ALLOCATED).view(torch.float32)
    assert not memory.any()
    halves = [memory[: ALLOCATED // 2], memory[ALLOCATED // 2 :]]
    kinds: Sequence[tuple[int, torch.dtype, Reduction]] = [
        (1, torch.float64, "sum"),
        (8_000, torch.float32, "sum"),
        (8_193, torch.float32, "sum"),  # just too large to be reduced by each worker alone
        (70_001, torch.bfloat16, "sum"),
        (500_000, torch.float64, "sum"),  # more than all slots have
        (1_500_000, torch.float32, "min"),
        (9_000, torch.int32, "max"),
    ]
    for seed in range(repeats):
        private = [numbers(rank, seed, numel, dtype) for numel, dtype, _ in kinds]
        for half, source in zip(halves, (seed, seed + 1), strict=True):
            half.copy_(numbers(rank, source, len(half), torch.float32))
        works = [group.all_reduce(halves[0], async_op=True)]
        for tensor, (_, _, op) in zip(private, kinds, strict=True):
            works.append(group.all_reduce(tensor, op=op, async_op=True))
        works.append(group.all_reduce(halves[1], async_op=True))
        if seed % 2:
            works.reverse()
        for work in works:
            work.wait()
        for half, source in zip(halves, (seed, seed + 1), strict=True):
            assert torch.equal(half, expected(hosts, source, len(half), torch.float32, "sum"))
        for tensor, (numel, dtype, op) in zip(private, kinds, strict=True):
            assert torch.equal(tensor, expected(hosts, seed, numel, dtype, op)), (numel, dtype)


def reduce_forever(group: Group) -> None:
    memory = group.allocate(4 * ALLOCATED).view(torch.float32)
    notes, private = torch.ones(3, dtype=torch.float64), torch.ones(200_000)
    while True:
        works = [group.all_reduce(each, async_op=True) for each in (memory, notes, private)]
        for work in works:
            work.wait()
        group.all_reduce(notes)


def left_behind() -> dict[str, int]:
    """Count what a group may leave: mappings and descriptors of shared memory, and sockets."""
    gc.collect()
    maps = Path("/proc/self/maps").read_text().count("memfd:manyhands")
    links = []
    for name in os.listdir("/proc/self/fd"):
        try:
            links.append(os.readlink(f"/proc/self/fd/{name}"))
        except FileNotFoundError:  # that of the listing
            continue
    found = {"maps": maps}
    for kind in ("memfd", "socket"):
        found[kind] = sum(kind in link for link in links)
    return found


def carry_out(group: Group, hosts: str, what: str, repeats: int) -> None:
    if what == "sums":
        compare_sums(group, hosts, repeats)
    elif what == "mismatch":
        group.all_reduce(torch.ones(10 + group.rank))
    else:
        reduce_forever(group)


def main() -> None:
    rank, hosts, folder = int(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
    size, memory = len(hosts), HostMemory(folder, tuple(hosts))
    torch.set_num_threads(1)
    for line in sys.stdin:
        number, what, repeats = json.loads(line)
        store = dist.FileStore(str(folder / f"store-{number}"), size)
        group: Group = TorchGroup(store, rank=rank, size=size, limits=LIMITS, memory=memory)
        found: dict[str, Any] = {"transport": group.describe(), "error": None}
        print(json.dumps(found), flush=True)
        try:
            carry_out(group, hosts, what, repeats)
        except RuntimeError as error:
            found.update(error=str(error), lost=peer_lost(error))
        if found["error"]:
            group.cut()
        found["bytes_sent"] = group.bytes_sent
        group.close()
        del group, store
        print(json.dumps({**found, "left": left_behind()}), flush=True)


if __name__ == "__main__":
    main()
