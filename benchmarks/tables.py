"""The cost of a sparse table: rows per second on one core, and bytes per row.

A batch is 4,096 lookups of ids drawn by Zipf's law; a step finds, gathers, merges and updates rows, as in
training. Compared, with the same ids and gradients, also on one core: torch's EmbeddingBag(sparse=True) with
its sparse optimizers, on a table that has all rows from the start and knows only ids 0..rows-1; and a dict
of numpy rows. Contenders take turns, so that other load on the machine affects all.

    python benchmarks/tables.py [--rows 10000000] [--dim 64] [--repeats 5] [--optimizers adagrad,adam]
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch

from manyhands.embeddings.memory import available_bytes
from manyhands.embeddings.shards import hash_ids
from manyhands.embeddings.spec import Table
from manyhands.embeddings.store import TableStore, merge

BATCH = 4096
BATCHES = 100
LR = 0.05
DICT_ROWS = 500_000
"""A dict of more rows takes minutes to make; it is not faster with more."""

Step = Callable[[np.ndarray, np.ndarray, int], None]


@dataclass(frozen=True)
class Contender:
    name: str
    step: Step
    """By the ranks of the ids asked for, their gradients and the number of the step."""


def zipf(chance: np.random.Generator, rows: int, exponent: float, size: int) -> np.ndarray:
    """Ranks 0..rows-1, the k-th of them about k**-exponent as often as the first; 0: all alike."""
    if exponent == 0:
        return chance.integers(0, rows, size)
    u, power = chance.random(size), 1.0 - exponent
    ranks = (((rows + 1.0) ** power - 1.0) * u + 1.0) ** (1.0 / power)
    return np.minimum(ranks.astype(np.int64) - 1, rows - 1)


def far(ranks: np.ndarray) -> np.ndarray:
    """64-bit ids that look like chance, as hashes of words do."""
    return hash_ids(ranks).view(np.int64)


class Ours:
    def __init__(self, args: argparse.Namespace, optimizer: str) -> None:
        spec = Table(args.dim, optimizer=optimizer)
        self.store = TableStore.create("bench", spec, seed=1)
        began = time.perf_counter()
        for begin in range(0, args.rows, BATCH):
            ranks = np.arange(begin, min(begin + BATCH, args.rows))
            self.store.find(far(ranks), create=True, now=0)
        self.made_per_s = args.rows / (time.perf_counter() - began)
        self._out = np.empty((BATCH, args.dim), dtype=np.float32)
        self.seconds = dict.fromkeys(("find", "gather", "merge", "find again", "update"), 0.0)

    def step(self, ranks: np.ndarray, grads: np.ndarray, now: int) -> None:
        clock, store, ids = time.perf_counter, self.store, far(ranks)
        times = [clock()]
        slots = store.find(ids, create=True, now=now)
        times.append(clock())
        store.gather(slots, self._out, ids)
        times.append(clock())
        fresh, sums = merge(ids, grads)
        times.append(clock())
        slots = store.find(fresh, create=False)
        times.append(clock())
        store.update(slots, sums, lr=LR, now=now)
        times.append(clock())
        for name, began, ended in zip(self.seconds, times, times[1:], strict=False):
            self.seconds[name] += ended - began


def torch_step(args: argparse.Namespace, optimizer: str) -> Step:
    """All rows there from the start, found by their rank itself."""
    bag = torch.nn.EmbeddingBag(args.rows, args.dim, sparse=True, mode="sum")
    if optimizer == "adam":
        learner: torch.optim.Optimizer = torch.optim.SparseAdam(bag.parameters(), lr=LR)
    else:
        learner = torch.optim.Adagrad(bag.parameters(), lr=LR)
    offsets = torch.arange(BATCH)

    def step(ranks: np.ndarray, grads: np.ndarray, now: int) -> None:
        learner.zero_grad()
        bag(torch.from_numpy(ranks), offsets).backward(torch.from_numpy(grads))
        learner.step()

    return step


def dict_step(args: argparse.Namespace) -> Step:
    """What one writes in an afternoon: adagrad, a row at a time."""
    rows: dict[int, np.ndarray] = {}
    squares: dict[int, np.ndarray] = {}
    for rank in range(min(args.rows, DICT_ROWS)):
        rows[rank] = np.zeros(args.dim, dtype=np.float32)
        squares[rank] = np.zeros(args.dim, dtype=np.float32)

    def step(ranks: np.ndarray, grads: np.ndarray, now: int) -> None:
        asked = (ranks % DICT_ROWS).tolist()
        np.stack([rows[rank] for rank in asked])
        sums: dict[int, np.ndarray] = {}
        for rank, grad in zip(asked, grads, strict=True):
            sums[rank] = sums[rank] + grad if rank in sums else grad
        for rank, grad in sums.items():
            squares[rank] += grad * grad
            rows[rank] -= LR * grad / (np.sqrt(squares[rank]) + 1e-10)

    return step


def measure(
    contenders: list[Contender], args: argparse.Namespace, exponent: float
) -> dict[str, list[float]]:
    """Rows a second of each, a figure a repeat."""
    chance = np.random.default_rng(0)
    grads = chance.normal(size=(BATCH, args.dim)).astype(np.float32)
    rates: dict[str, list[float]] = {one.name: [] for one in contenders}
    now = 1
    for repeat in range(args.repeats + 1):
        batches = [zipf(chance, args.rows, exponent, BATCH) for _ in range(BATCHES)]
        for one in contenders:
            part = batches[: BATCHES // 10] if "dict" in one.name else batches
            began = time.perf_counter()
            for ranks in part:
                one.step(ranks, grads, now)
                now += 1
            if repeat:  # the first is for warming up
                rates[one.name].append(len(part) * BATCH / (time.perf_counter() - began))
    return rates


def show(rates: dict[str, list[float]], first: str) -> None:
    for name, figures in rates.items():
        line = f"  {name:<34}{statistics.median(figures) / 1e6:8.3f} M rows/s"
        line += f"  ({min(figures) / 1e6:.3f} to {max(figures) / 1e6:.3f})"
        if name != first:
            ratios = [a / b for a, b in zip(rates[first], figures, strict=True)]
            line += f"   ours is {statistics.median(ratios):.2f} times as fast"
            line += f" ({min(ratios):.2f} to {max(ratios):.2f})"
        print(line, flush=True)


def memory_lines(store: TableStore, rows: int) -> Iterator[str]:
    spec = store.spec
    row, state = 4 * spec.dim, 4 * (spec.width - spec.dim) + 4 * spec.row_optimizer.scalar
    rest = store.nbytes / rows - row - state
    yield f"  measured: {store.nbytes / rows:.1f} bytes a row"
    yield f"    {row} row, {state} optimizer, {rest:.1f} index, counters and rows taken ahead"
    yield f"  computed: {spec.bytes_per_row()} bytes a row at most"


def bench(args: argparse.Namespace, optimizer: str) -> None:
    print(f"\n{optimizer}, {args.rows:,} rows of {args.dim}", flush=True)
    ours = Ours(args, optimizer)
    print(f"  rows made: {ours.made_per_s / 1e6:.2f} M/s")
    for line in memory_lines(ours.store, args.rows):
        print(line)
    contenders = [Contender("manyhands", ours.step)]
    needed = 4 * args.dim * args.rows * (1 + ours.store.spec.row_optimizer.slots)
    if not args.alone and needed < available_bytes():
        name = "SparseAdam" if optimizer == "adam" else "Adagrad"
        contenders.append(Contender(f"torch EmbeddingBag, {name}", torch_step(args, optimizer)))
    elif not args.alone:
        print(f"  no torch: {needed / 1e9:.1f} GB of memory are not there")
    if not args.alone and optimizer == "adagrad":
        held = min(args.rows, DICT_ROWS)
        contenders.append(Contender(f"dict of numpy rows ({held:,})", dict_step(args)))
    for exponent in args.zipf:
        ours.seconds = dict.fromkeys(ours.seconds, 0.0)
        print(f"ids by Zipf's law, exponent {exponent:g}" if exponent else "all ids alike")
        show(measure(contenders, args, exponent), "manyhands")
        steps = (args.repeats + 1) * BATCHES
        parts = (f"{name} {1e6 * s / steps:.0f}" for name, s in ours.seconds.items())
        print(f"  microseconds a batch: {', '.join(parts)}")
    ours.store.close()


def processor() -> str:
    with open("/proc/cpuinfo") as lines:
        named = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return f"{named[0] if named else platform.machine()}, {os.cpu_count()} cores"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=10_000_000)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--optimizers", default="adagrad,adam")
    parser.add_argument("--zipf", type=float, nargs="+", default=[1.05, 0.0], help="exponents")
    parser.add_argument("--alone", action="store_true", help="without torch and the dict")
    args = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{processor()}; torch {torch.__version__}; one thread, batches of {BATCH:,}")
    for optimizer in args.optimizers.split(","):
        bench(args, optimizer)


if __name__ == "__main__":
    main()
