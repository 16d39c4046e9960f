"""Full tables, and ids that wait for admission."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise

import numpy as np
import pytest
from row_reads import initial, read

from manyhands.embeddings.row_transfer import drop, evict, export, load
from manyhands.embeddings.spec import Table
from manyhands.embeddings.store import TableStore
from manyhands.errors import JobError


@contextmanager
def table(spec: Table) -> Iterator[TableStore]:
    store = TableStore.create("t", spec, seed=1, shared=False)
    try:
        yield store
    finally:
        store.close()


@pytest.mark.parametrize("max_bytes", [300_000, 2_000_000, 20_000_000])
@pytest.mark.parametrize("optimizer", ["adagrad", "adam", "rowwise_adagrad"])
def test_a_table_stays_within_max_bytes_and_uses_most_of_it(optimizer: str, max_bytes: int) -> None:
    chance = np.random.default_rng(0)
    for admit_after in (1, 2):
        spec = Table(8, optimizer=optimizer, max_bytes=max_bytes, admit_after=admit_after)
        with table(spec) as store:
            while not store.full:
                ids = chance.integers(-(1 << 62), 1 << 62, 500)
                for _ in range(admit_after):
                    store.find(ids, create=True, now=1)
            assert 0.7 * max_bytes < store.nbytes <= max_bytes
            assert len(store.ids()) == store.layout.capacity - 1


def small(when_full: str, **more: object) -> Table:
    return Table(16, optimizer="sgd", max_bytes=200_000, when_full=when_full, **more)  # type: ignore[arg-type]


def filled(store: TableStore) -> np.ndarray:
    """Ids as many as fit."""
    ids = np.arange(store.layout.capacity - 1)
    assert (store.find(ids, create=True, now=1) > 0).all()
    assert not store.full
    return ids


def test_new_ids_of_a_full_table_share_a_row_and_learn_in_it() -> None:
    with table(small("share")) as store:
        ids = filled(store)
        new = np.array([10**9, 10**9 + 1])
        assert (store.find(new, create=False) == -1).all()
        assert (store.find(new, create=True, now=2) == 0).all()
        assert store.full
        assert len(store.ids()) == ids.size
        store.update(store.find(new, create=False), np.ones((2, 16), np.float32), lr=1.0, now=2)
        first, second = read(store, new)
        assert (first == second).all()
        assert (first < -1.5).all()
        assert (read(store, ids) == initial(store, ids)).all()
        assert store.nbytes <= 200_000
        chunk = export(store)
        with table(small("share")) as other:
            load(other, chunk)
            assert (read(other, new) == read(store, new)).all()
        # With more room, they get rows of their own.
        with table(Table(16, optimizer="sgd")) as larger:
            load(larger, chunk)
            assert (larger.find(new, create=True, now=3) > 0).all()
        drop(store, ids[:1])
        assert not store.full
        assert (store.find(new, create=True, now=3) > 0).tolist() == [True, False]


def test_a_full_table_that_evicts_drops_the_least_recently_used() -> None:
    with table(small("evict")) as store:
        ids = filled(store)
        store.find(ids[100:], create=True, now=5)
        new = np.arange(10**6, 10**6 + 50)
        assert (store.find(new, create=True, now=6) == 0).all()
        gone = evict(store, 6)
        assert gone == ids.size - int(ids.size * 7 / 8) >= 100
        assert not np.isin(ids[:100], store.ids()).any()
        assert store.ids().tolist() == ids[gone:].tolist()
        assert (store.find(new, create=True, now=7) > 0).all()
        assert evict(store, 7) == 0


def test_a_full_table_with_when_full_error_raises() -> None:
    with table(small("error")) as store:
        ids = filled(store)
        with pytest.raises(JobError, match=r"is full: it has [\d,]+ rows.*more max_bytes"):
            store.find([10**9], create=True, now=1)
        assert (store.find(ids, create=True, now=1) > 0).all()


def test_loading_more_rows_than_fit_raises() -> None:
    with table(Table(16, optimizer="sgd")) as large, table(small("share")) as store:
        large.find(range(5_000), create=True, now=1)
        with pytest.raises(JobError, match=r"of those to load don't fit"):
            load(store, export(large))


def test_waiting_ids_take_little_memory_and_no_row() -> None:
    with table(Table(256, admit_after=2)) as store:
        before = store.nbytes
        store.find(np.arange(50_000), create=True, now=1)
        assert len(store.ids()) == 0
        assert store.nbytes - before < 50 * 50_000
        assert (store.find([7, 7, 8], create=True, now=2) > 0).all()
        assert export(store).waiting_ids.size == 50_000 - 2
        assert (read(store, [9]) == initial(store, [9])).all()
        evict(store, 3)
        assert store.find([9], create=True, now=3).tolist() == [-1]


def test_the_memory_of_waiting_ids_is_bounded() -> None:
    with table(small("share", admit_after=3)) as store:
        for begin in range(0, 100_000, 10_000):
            store.find(np.arange(begin, begin + 10_000), create=True, now=1)
        assert store.nbytes <= 200_000
        assert export(store).waiting_ids.size > 1_000
        # It is full of ids that came once; one that comes often gets its row all the same.
        assert (store.find([-5, -5, -5], create=True, now=2) > 0).tolist() == [False, False, True]
        assert store.ids().tolist() == [-5]


def test_growth_is_steady_and_stops_at_the_capacity() -> None:
    with table(small("share")) as store:
        ready = [0]
        while ready[-1] < store.layout.capacity:
            ready.append(store.layout.ready_after(ready[-1]))
        assert all(before < after for before, after in pairwise(ready))
