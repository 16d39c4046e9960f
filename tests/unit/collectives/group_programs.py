"""Programs for groups: lists of operations that any implementation can carry out, with the same results.

As a script it is one worker of a gloo group, which carries out the programs that it reads from its standard
input, one a line, and writes the results.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from manyhands.collectives.group import Group

DTYPES = ["float32", "float64", "float16", "bfloat16", "int8", "uint8", "int32", "int64"]
MOVED = [*DTYPES, "bool", "int16", "float8_e4m3fn", "complex64"]
"""What operations that only move data accept."""
MOVES = ["all_gather", "all_to_all", "uneven", "broadcast", "ring"]
REDUCES = ["all_reduce", "reduce_scatter"]


@dataclass(frozen=True)
class Operation:
    kind: str
    dtype: str = "float32"
    size: int = 1
    """Number of elements of one worker's part."""
    op: str = "sum"
    seed: int = 0
    on: tuple[int, ...] = ()
    """The ranks of the split that does it; empty: all."""
    together: bool = False
    """If true, started and waited for with the operation that follows."""


def execute(group: Group, program: Sequence[Operation]) -> list[list[Any]]:
    """Carry out a program and return, for each operation, what this worker has afterwards."""
    splits: dict[tuple[int, ...], Group] = {}
    results: list[Tensor] = []
    works = []
    for operation in program:
        here = group
        if operation.on:
            if group.rank not in operation.on:
                continue
            if operation.on not in splits:
                splits[operation.on] = group.split(operation.on)
            here = splits[operation.on]
        tensor, work = _begin(here, operation)
        results.append(tensor)
        works.append(work)
        if not operation.together:
            for each in works:
                each.wait()
            works = []
    for each in works:
        each.wait()
    for split in splits.values():
        split.close()
    return [_numbers(tensor) for tensor in results]


def _begin(group: Group, operation: Operation) -> tuple[Tensor, Any]:
    size, world, rank = operation.size, group.size, group.rank
    if operation.kind == "all_reduce":
        tensor = _input(operation, rank, size)
        return tensor, group.all_reduce(tensor, op=operation.op, async_op=True)  # type: ignore[arg-type]
    if operation.kind == "reduce_scatter":
        tensor = _input(operation, rank, size * world)
        into = tensor.new_zeros(size)
        work = group.reduce_scatter(tensor, into=into, op=operation.op, async_op=True)  # type: ignore[arg-type]
        return into, work
    if operation.kind == "all_gather":
        tensor = _input(operation, rank, size)
        into = _zeros(tensor, size * world)
        return into, group.all_gather(tensor, into=into, async_op=True)
    if operation.kind == "all_to_all":
        tensor = _input(operation, rank, size * world)
        into = _zeros(tensor, size * world)
        return into, group.all_to_all(tensor, into=into, async_op=True)
    if operation.kind == "uneven":
        send = [(rank + 2 * to) % (size + 1) for to in range(world)]
        receive = [(source + 2 * rank) % (size + 1) for source in range(world)]
        tensor = _input(operation, rank, sum(send))
        into = _zeros(tensor, sum(receive))
        work = group.all_to_all(tensor, into=into, send=send, receive=receive, async_op=True)
        return into, work
    if operation.kind == "broadcast":
        tensor = _input(operation, rank, size)
        source = operation.seed % world
        return tensor, group.broadcast(tensor, source=source, async_op=True)
    if operation.kind == "form":
        group.split(range(world)).close()
        tensor = torch.empty(0)
        return tensor, group.broadcast(tensor, source=0, async_op=True)
    assert operation.kind == "ring"
    tensor = _input(operation, rank, size)
    into = _zeros(tensor, size)
    if world == 1:
        return tensor, group.broadcast(tensor, source=0, async_op=True)
    sent = group.send(tensor, to=(rank + 1) % world, tag=operation.seed, async_op=True)
    heard = group.recv(into, source=(rank - 1) % world, tag=operation.seed, async_op=True)
    return into, _Both(sent, heard, tensor)


class _Both:
    def __init__(self, sent: Any, heard: Any, tensor: Tensor) -> None:
        self._works = (sent, heard)
        self._tensor = tensor  # must live until it is sent

    def wait(self) -> None:
        for work in self._works:
            work.wait()


def _input(operation: Operation, rank: int, size: int) -> Tensor:
    """Small integers: sums are exact in every dtype, in every order."""
    generator = torch.Generator().manual_seed(1000 * operation.seed + rank)
    low = 0 if operation.dtype in ("uint8", "bool") else -4
    high = 2 if operation.dtype == "bool" else 5
    numbers = torch.randint(low, high, (size,), generator=generator)
    return numbers.to(torch.float32).to(getattr(torch, operation.dtype))


def _zeros(like: Tensor, size: int) -> Tensor:
    return torch.zeros(size).to(like.dtype)


def _numbers(tensor: Tensor) -> list[Any]:
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor).reshape(-1)
    numbers: list[Any] = tensor.to(torch.float64).tolist()
    return numbers


# Real processes -------------------------------------------------------------------------------------


class Workers:
    """Processes that form gloo groups, with shared memory if wanted, and carry out programs."""

    def __init__(self, size: int, folder: Path, *, hosts: str = "") -> None:
        """`hosts`: a letter for each worker, for shared memory in hosts that are all this one."""
        self.size = size
        self._processes = [
            subprocess.Popen(
                [
                    *(sys.executable, __file__, str(rank), str(size), str(folder / "store")),
                    *([hosts] if hosts else []),
                ],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(size)
        ]

    def execute(self, program: Sequence[Operation]) -> list[list[list[Any]]]:
        """Return the results of all workers, in rank order."""
        line = json.dumps([asdict(operation) for operation in program])
        for process in self._processes:
            assert process.stdin is not None
            print(line, file=process.stdin, flush=True)
        return [json.loads(self._answer(process)) for process in self._processes]

    def _answer(self, process: subprocess.Popen[str]) -> str:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line, f"a worker ended with {process.wait(timeout=30)}"
        return line

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.communicate()


@contextmanager
def workers(size: int, folder: Path, *, hosts: str = "") -> Iterator[Workers]:
    started = Workers(size, folder, hosts=hosts)
    try:
        yield started
    finally:
        started.close()


def main() -> None:
    import torch.distributed as dist

    from manyhands.collectives.group import GroupLimits, HostMemory, TorchGroup

    rank, size, place = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    torch.set_num_threads(1)
    store = dist.FileStore(place, size)
    limits = GroupLimits(gather_s=60.0, connect_s=30.0, collective_s=60.0)
    memory = HostMemory(Path(place).parent, tuple(sys.argv[4])) if sys.argv[4:] else None
    group = TorchGroup(store, rank=rank, size=size, limits=limits, memory=memory)
    assert group.describe().startswith("shared memory" if memory else "gloo")
    assert not dist.is_initialized()
    for line in sys.stdin:
        program = [Operation(**{**each, "on": tuple(each["on"])}) for each in json.loads(line)]
        print(json.dumps(execute(group, program)), flush=True)


if __name__ == "__main__":
    main()
