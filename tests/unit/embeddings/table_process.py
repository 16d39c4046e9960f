"""A process that works on a shared table.

python table_process.py WHAT SPEC_JSON ADDRESS NUMBER ROUNDS
"""

from __future__ import annotations

import hashlib
import json
import sys
import threading
import time

import numpy as np
from row_reads import read

from manyhands.embeddings.row_transfer import evict
from manyhands.embeddings.spec import RowOptimizer, Table
from manyhands.embeddings.store import TableStore

NAME = "t"
SAME = 240_000
"""Ids that all processes bring at once."""
ROUND_S = 0.012
OWN = 2_000
"""Ids of one process alone: OWN * (number + 1) below zero."""


def own(number: int) -> np.ndarray:
    return -1 - (number * OWN + np.arange(OWN))


def hammer(store: TableStore, number: int, rounds: int, begin: float) -> None:
    """Bring new ids at the same moment and in the same order as all others, part by part; add one
    to each of one's own rows a round."""
    ones = np.full((OWN, store.spec.dim), -1.0, np.float32)
    part = SAME // rounds
    for step in range(rounds):
        common = np.arange(step * part, (step + 1) * part)
        # Who has slept is let in at once when the moment comes, also on a busy machine.
        time.sleep(max(0.0, begin + step * ROUND_S - time.time()))
        store.find(common, create=True, now=step)
        mine = own(number)
        store.update(store.find(mine, create=True, now=step), ones, lr=1.0, now=step)


def told() -> float:
    """When all begin: everybody's kernels are there by now."""
    print("ready", flush=True)
    return float(sys.stdin.readline())


def alone(store: TableStore, number: int, rounds: int) -> None:
    hammer(store, number, rounds, told())


def threads(store: TableStore, number: int, rounds: int) -> None:
    """Two threads of one process do it."""
    begin = told()
    membership = [
        threading.Thread(target=hammer, args=(store, 2 * number + one, rounds, begin))
        for one in (0, 1)
    ]
    for one in membership:
        one.start()
    for one in membership:
        one.join()


def insert(store: TableStore, number: int, rounds: int) -> None:
    """Bring ids, some of them everybody's, until somebody ends this process."""
    chance = np.random.default_rng()
    told()
    for step in range(rounds):
        ids = np.concatenate([chance.integers(0, 1 << 40, 500), chance.integers(0, SAME, 500)])
        slots = store.find(ids, create=True, now=step)
        # A row carries its id, so that a wrong one would be seen.
        store.rows[slots, 0] = ids.astype(np.float32)


def tidy(store: TableStore, number: int, rounds: int) -> None:
    """Make the index anew again and again, until somebody ends this process."""
    evict(store, 0)  # a first time, for the kernels to be there
    print("ready", flush=True)
    for step in range(rounds):
        evict(store, step)


def digest(store: TableStore, number: int, rounds: int) -> None:
    print(hashlib.sha256(read(store, np.arange(-500, 500)).tobytes()).hexdigest())


if __name__ == "__main__":
    what, spec, address, number, rounds = sys.argv[1:]
    record = json.loads(spec)
    table = Table(**{**record, "optimizer": RowOptimizer(**record["optimizer"])})
    new = address == "new"
    opened = (
        TableStore.create(NAME, table, seed=11) if new else TableStore.attach(NAME, table, address)
    )
    work = {"alone": alone, "threads": threads, "insert": insert, "digest": digest, "tidy": tidy}
    # Kernels come from the disk on first use, and take their time.
    opened.update(opened.find([], create=True), np.empty((0, table.dim), np.float32), lr=1.0, now=0)
    work[what](opened, int(number), int(rounds))
    opened.close()
