"""Gradients summed over real processes, and groups that are cut while workers wait in them."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

COMMON = """
import sys, threading, time, os
from pathlib import Path
import torch, torch.distributed as dist
from torch import nn
from manyhands.collectives.reducer import Reducer
from manyhands.collectives.group import GroupLimits, HostMemory, TorchGroup

rank, world, place = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
limits = GroupLimits(gather_s=60, connect_s=60, collective_s=100)
memory = HostMemory(Path(place).parent, ("here",) * world) if "memory" in sys.argv else None
group = TorchGroup(
    dist.FileStore(place, world), rank=rank, size=world, limits=limits, memory=memory)
assert (group.describe() == "shared memory") == ("memory" in sys.argv)
"""

SUMS = (
    COMMON
    + """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv2d(2, 4, 3).to(memory_format=torch.channels_last)
        self.first = nn.Linear(4, 5)
        self.small = nn.Linear(5, 5).to(torch.bfloat16)
        self.odd = nn.Linear(5, 1)       # used by odd ranks only
        self.never = nn.Linear(7, 7)     # used by nobody
        self.tied = self.first.weight
        self.frozen = nn.Linear(3, 3).requires_grad_(False)

    def forward(self, x, who):
        y = self.first(self.conv(x).mean(dim=(2, 3)))
        y = y + self.small(y.to(torch.bfloat16)).float()
        return (self.odd(y) if who % 2 else y).square().mean()

def gradients_of(who, model, alone, note=lambda weight, loss: None):
    for part in range(3):
        x = torch.randn(4, 2, 5, 5, generator=torch.Generator().manual_seed(10 * who + part))
        if part < 2:
            with alone():
                model(x, who).backward()
        else:
            note(2**24 + who, torch.tensor(2.0**-30, dtype=torch.float64) * who)
            model(x, who).backward()

from contextlib import nullcontext
model = Model()
parameters = [p for p in model.parameters() if p.requires_grad]
reducer = Reducer(group, parameters, bucket_bytes=200)
assert len(reducer.buckets) > 3
for repeat in range(3):
    reducer.begin()
    gradients_of(rank + repeat, model, reducer.alone, reducer.note)
    reducer.finish()
    for each in range(world):
        other = Model()
        gradients_of(each + repeat, other, nullcontext)
        theirs = [p.grad for p in other.parameters() if p.requires_grad]
        sums = theirs if not each else [
            b if a is None else a if b is None else a + b for a, b in zip(sums, theirs)]
    for p, expected in zip(parameters, sums):
        assert (p.grad is None) == (expected is None)
        if expected is not None:
            torch.testing.assert_close(p.grad, expected)
            assert p.grad.stride() == p.stride()
    assert model.never.weight.grad is None
    # More than float32 can tell, and the last bucket has another dtype.
    whos = [each + repeat for each in range(world)]
    sums = [sum(2**24 + who for who in whos), sum(2**-30 * who for who in whos)]
    assert reducer.sums.tolist() == sums, (reducer.sums, sums)
    for p in parameters:
        p.grad = None
reducer.close()
model(torch.ones(1, 2, 5, 5), 0).backward()
group.close()
print("same")
"""
)

CODED = (
    COMMON
    + """
from manyhands.codecs.int8 import Int8

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(100, 301), nn.Linear(301, 3))
unused = nn.Parameter(torch.ones(3))
parameters = [*model.parameters(), unused]
reducer = Reducer(group, parameters, bucket_bytes=2000, codec=Int8())
assert len(reducer.buckets) > 1
for repeat in range(3):
    for parameter in parameters:
        parameter.grad = None
    def loss(who):
        inputs = torch.randn(4, 100, generator=torch.Generator().manual_seed(10 * repeat + who))
        return model(inputs).square().mean()
    exact = [torch.zeros_like(p) for p in model.parameters()]
    for who in range(world):
        found = torch.autograd.grad(loss(who), list(model.parameters()))
        exact = [total + each for total, each in zip(exact, found)]
    reducer.begin()
    reducer.note(1.0, float(rank))
    loss(rank).backward()
    reducer.finish()
    assert unused.grad is None
    assert reducer.sums.tolist() == [world, sum(range(world))]
    mine = torch.cat([p.grad.flatten() for p in model.parameters()])
    everywhere = torch.empty(world * len(mine))
    group.all_gather(mine, into=everywhere)
    assert all(torch.equal(mine, other) for other in everywhere.chunk(world))
    expected = torch.cat([each.flatten() for each in exact])
    assert not torch.equal(mine, expected)
    assert (mine - expected).norm() < 0.02 * expected.norm()
reducer.close()
group.close()
print("alike")
"""
)

CUT = (
    COMMON
    + """
numbers = torch.ones(1_000_000)
group.all_reduce(numbers)
if rank == 1:
    time.sleep(1)
    os._exit(0) if sys.argv[4] == "dies" else time.sleep(4)
threading.Timer(0.5 if sys.argv[4] == "dies" else 1.0, group.cut).start()
began = time.monotonic()
try:
    works = [group.all_reduce(numbers, async_op=True) for _ in range(3)]
    for work in works:
        work.wait()
    print("waited for nothing")
except RuntimeError as error:
    print("heard")
del works, work
group.close()
assert time.monotonic() - began < 20
os._exit(0)
"""
)

COUNTS = (
    COMMON
    + """
def counted(operation):
    before, computed = group.bytes_sent, group._computed_bytes
    operation()
    group.barrier()
    time.sleep(0.2)  # what is in the kernel's queue
    return group.bytes_sent - before, group._computed_bytes - computed

def near(by_kernel, computed):  # but for headers
    return abs(by_kernel - computed) < 0.001 * computed + 2000

MANY = 300_000
numbers, all_numbers = torch.ones(MANY), torch.ones(world * MANY)
operations = {
    "all_reduce": lambda: group.all_reduce(all_numbers),
    "reduce_scatter": lambda: group.reduce_scatter(all_numbers, into=numbers),
    "all_gather": lambda: group.all_gather(numbers, into=all_numbers),
    "all_to_all": lambda: group.all_to_all(all_numbers, into=torch.empty(world * MANY)),
    "send": lambda: group.send(numbers, to=1) if rank == 0 else rank == 1 and group.recv(numbers, source=0),
}
for name, operation in operations.items():
    by_kernel, computed = counted(operation)
    if name == "reduce_scatter":
        computed *= 2  # gloo makes an all_reduce of it
    assert near(by_kernel, computed), (name, by_kernel, computed)
# A broadcast may pass through other workers: the sum over all counts.
total = torch.tensor(counted(lambda: group.broadcast(numbers, source=1)))
group.all_reduce(total)
assert near(*total.tolist()), total

split = group.split(list(range(world)))
by_kernel, _ = counted(lambda: split.all_reduce(numbers))
expected = 2 * (world - 1) * numbers.nbytes / world
assert near(by_kernel, expected), (by_kernel, expected)
before = group.bytes_sent
split.close()
again = group.split(list(range(world)))  # forgets splits that are closed
assert 0 <= group.bytes_sent - before < 1000
group.close()
assert 0 <= group.bytes_sent - before < 10_000
print("counted")
"""
)


def run(code: str, folder: Path, *arguments: str, world: int) -> list[str]:
    started = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(rank), str(world), str(folder / "store"), *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(world)
    ]
    said = [process.communicate(timeout=90) for process in started]
    for process, (_, err) in zip(started, said, strict=True):
        assert process.returncode == 0, err
    return [out.strip() for out, _ in said]


@pytest.mark.parametrize("through", ["gloo", "memory"])
@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.long)])
def test_every_worker_gets_the_sum_of_all_gradients(
    world: int, through: str, tmp_path: Path
) -> None:
    assert run(SUMS, tmp_path, through, world=world) == ["same"] * world


@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.long)])
def test_all_workers_decode_the_same_sums(world: int, tmp_path: Path) -> None:
    assert run(CODED, tmp_path, world=world) == ["alike"] * world


@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.long)])
def test_the_kernel_counts_what_operations_are_computed_to_send(world: int, tmp_path: Path) -> None:
    assert run(COUNTS, tmp_path, world=world) == ["counted"] * world


@pytest.mark.parametrize("how", ["dies", "sleeps"])
def test_cutting_a_group_ends_every_wait_in_it(how: str, tmp_path: Path) -> None:
    began = time.monotonic()
    said = run(CUT, tmp_path, how, world=3)
    assert [said[0], said[2]] == ["heard", "heard"]
    assert time.monotonic() - began < 60
