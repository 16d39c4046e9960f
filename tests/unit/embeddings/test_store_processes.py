"""One table in many processes: each id has one row, even if processes are killed at any moment."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
from row_reads import initial, read
from table_process import NAME, SAME, own

from manyhands.embeddings.layout import NEXT
from manyhands.embeddings.row_transfer import evict, export
from manyhands.embeddings.spec import Table
from manyhands.embeddings.store import TableStore

PROCESS = Path(__file__).with_name("table_process.py")
DEADLINE_S = 120


def start(what: str, spec: Table, address: str, number: int, rounds: int) -> subprocess.Popen[str]:
    said = [what, json.dumps(asdict(spec)), address, str(number), str(rounds)]
    return subprocess.Popen(
        [sys.executable, str(PROCESS), *said],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


@contextmanager
def table(spec: Table) -> Iterator[TableStore]:
    store = TableStore.create(NAME, spec, seed=11)
    try:
        yield store
    finally:
        store.close()


def ready(process: subprocess.Popen[str]) -> None:
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"


def at_once(*processes: subprocess.Popen[str]) -> None:
    """Let all begin at the same moment, and end well."""
    for process in processes:
        ready(process)
    moment = time.time() + 0.1
    for process in processes:
        process.communicate(f"{moment}\n", timeout=DEADLINE_S)
        assert process.returncode == 0


def one_row_each(store: TableStore) -> np.ndarray:
    """Check that no id and no slot occurs twice, and that the index finds every id."""
    ids = store.ids()
    assert len(np.unique(ids)) == len(ids)
    slots = store.find(ids, create=False)
    assert len(np.unique(slots)) == len(slots)
    assert (slots >= 0).all()
    assert (export(store).ids == ids).all()
    return ids


@pytest.mark.parametrize(
    ("what", "spec"),
    [
        ("alone", Table(4, optimizer="sgd", init="zeros")),
        ("threads", Table(4, optimizer="sgd", init="zeros")),
        ("alone", Table(4, optimizer="sgd", init="zeros", admit_after=2)),
    ],
)
def test_many_processes_insert_the_same_ids(what: str, spec: Table) -> None:
    rounds, membership = 60, 2
    with table(spec) as store:
        at_once(*[start(what, spec, store.address, number, rounds) for number in range(membership)])
        parties = range(membership * (2 if what == "threads" else 1))
        ids = one_row_each(store)
        wanted = np.concatenate([*[own(number) for number in parties], np.arange(SAME)])
        assert (ids == np.sort(wanted)).all()
        # Nobody's update of a row of their own is lost, and no sight of a common one either.
        learned = rounds - (spec.admit_after - 1)
        for number in parties:
            assert (read(store, own(number)) == learned).all()
        chunk = export(store)
        common = chunk.ids >= 0
        assert (chunk.counts[common] == len(parties)).all()
        # Whoever lost a race gave the slot back, or left it for the next evict.
        assert int(store.arrays.head[NEXT]) - 1 <= len(ids) + 64 * len(parties)


def test_no_row_is_missing_from_an_export_while_others_make_rows() -> None:
    """As in a checkpoint, while the next step looks up ids that are new."""
    known, fresh = np.arange(20_000), np.arange(20_000, 600_000)
    with table(Table(1, optimizer="sgd", init="zeros")) as store:
        store.find(known, create=True, now=1)
        maker = threading.Thread(
            target=lambda: [store.find(ids, create=True, now=2) for ids in np.split(fresh, 580)]
        )
        maker.start()
        num_exports = 0
        try:
            while maker.is_alive() or not num_exports:
                missing = np.setdiff1d(known, export(store).ids)
                assert not missing.size, f"{missing.size} rows are missing"
                num_exports += 1
        finally:
            maker.join()
        assert export(store).ids.tolist() == [*range(600_000)]


@pytest.mark.long
@pytest.mark.slow
def test_processes_killed_in_the_middle_of_inserts() -> None:
    spec = Table(8, optimizer="adagrad")
    kills = 8
    chance = np.random.default_rng(5)
    with table(spec) as store:
        mine = np.arange(SAME)
        for _ in range(kills):
            membership = [start("insert", spec, store.address, n, 10**9) for n in range(2)]
            for one in membership:
                ready(one)
            for one in membership:
                assert one.stdin is not None
                one.stdin.write("0\n")
                one.stdin.flush()
            ends = time.monotonic() + float(chance.uniform(0.0, 0.15))
            while time.monotonic() < ends:
                slots = store.find(chance.permutation(mine)[:2_000], create=True, now=1)
                assert (slots > 0).all()
            for one in membership:
                one.send_signal(signal.SIGKILL)
            for one in membership:
                one.communicate(timeout=DEADLINE_S)
                assert one.returncode == -signal.SIGKILL
        ids = one_row_each(store)
        assert len(ids) > 1_000
        rows = read(store, ids)
        fresh = (rows == initial(store, ids)).all(axis=1)
        assert (fresh | (rows[:, 0] == ids.astype(np.float32))).all()
        # A lost slot is lost until the next evict, and there are few.
        lost = int(store.arrays.head[NEXT]) - 1 - len(ids)
        assert lost <= 2 * kills + 64
        before = int(store.arrays.head[NEXT])
        assert evict(store, 9) == 0
        assert (read(store, ids) == rows).all()
        if lost:
            store.find(np.arange(-lost, 0), create=True, now=9)
            assert int(store.arrays.head[NEXT]) == before
        one_row_each(store)


@pytest.mark.long
@pytest.mark.slow
def test_a_process_killed_during_eviction_loses_no_row() -> None:
    spec = Table(8, optimizer="sgd")
    chance = np.random.default_rng(6)
    with table(spec) as store:
        ids = chance.integers(-(1 << 62), 1 << 62, 60_000)
        slots = store.find(ids, create=True, now=1)
        store.rows[slots] = ids[:, None].astype(np.float32)
        for _ in range(8):
            tidier = start("tidy", spec, store.address, 0, 10**9)
            ready(tidier)
            time.sleep(float(chance.uniform(0.0, 0.03)))
            tidier.kill()
            tidier.communicate(timeout=DEADLINE_S)
            assert (store.find(ids, create=False) == slots).all()
            assert (read(store, ids) == ids[:, None].astype(np.float32)).all()
            # Whatever the last one left half done, new ids find room.
            more = chance.integers(0, 1 << 62, 100)
            assert (store.find(more, create=True, now=2) > 0).all()
        one_row_each(store)


def test_another_process_makes_the_same_initial_rows() -> None:
    spec = Table(32, init="normal(0.1)")
    with table(spec) as store:
        store.find(np.arange(0, 500, 2), create=True, now=1)
        membership = [
            start("digest", spec, address, 0, 0) for address in ("new", store.address, "new")
        ]
        said = {one.communicate(timeout=DEADLINE_S)[0] for one in membership}
        assert len(said) == 1
        assert len(said.pop().strip()) == 64
