"""A TableStore compared with a plain dict, under the same operations."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from row_reads import initial, read

from manyhands.embeddings.chunk import RowChunk
from manyhands.embeddings.layout import NEXT, READY
from manyhands.embeddings.row_transfer import drop, evict, export, load
from manyhands.embeddings.shards import FIRST, SECOND, STEP, hash_ids, shard_of
from manyhands.embeddings.spec import Table
from manyhands.embeddings.store import TableStore, merge, unique
from manyhands.errors import JobError

DIM = 3
LR = 0.5


@contextmanager
def table(spec: Table, *, seed: int = 1) -> Iterator[TableStore]:
    store = TableStore.create("t", spec, seed=seed, shared=False)
    try:
        yield store
    finally:
        store.close()


@dataclass
class Model:
    """A plain implementation of a table with the optimizer sgd."""

    spec: Table
    rows: dict[int, np.ndarray] = field(default_factory=dict)
    counts: dict[int, int] = field(default_factory=dict)
    last: dict[int, int] = field(default_factory=dict)
    waiting: dict[int, int] = field(default_factory=dict)

    def see(self, ids: Sequence[int], now: int, store: TableStore) -> list[bool]:
        has = []
        for one in ids:
            if one not in self.rows:
                self.waiting[one] = self.waiting.get(one, 0) + 1
                if self.waiting[one] >= self.spec.admit_after:
                    self.rows[one] = initial(store, [one])[0]
                    self.counts[one] = self.waiting.pop(one)
                    self.last[one] = now
            else:
                self.counts[one] += 1
                self.last[one] = max(self.last[one], now)
            has.append(one in self.rows)
        return has

    def update(self, ids: Sequence[int], grads: np.ndarray, now: int) -> None:
        for one, grad in zip(ids, grads, strict=True):
            if one in self.rows:
                self.rows[one] = self.rows[one] - np.float32(LR) * grad
                self.last[one] = max(self.last[one], now)

    def drop(self, ids: Sequence[int]) -> int:
        gone = [one for one in dict.fromkeys(ids) if one in self.rows]
        for one in gone:
            del self.rows[one], self.counts[one], self.last[one]
        for one in ids:
            self.waiting.pop(one, None)
        return len(gone)

    def evict(self, now: int) -> int:
        unused, below = self.spec.evict_unused, self.spec.evict_below
        gone = [
            one
            for one in self.rows
            if (unused is not None and now - self.last[one] >= unused)
            or (below is not None and self.counts[one] < below)
        ]
        self.drop(gone)
        self.waiting.clear()
        return len(gone)


def check(store: TableStore, model: Model, asked: Sequence[int]) -> None:
    assert store.ids().tolist() == sorted(model.rows)
    assert len(store.ids()) == len(model.rows)
    got = read(store, asked)
    wanted = [model.rows[one] if one in model.rows else initial(store, [one])[0] for one in asked]
    np.testing.assert_allclose(got, np.array(wanted).reshape(-1, DIM), rtol=0, atol=1e-5)
    check_chunk(export(store), model)


def check_chunk(chunk: RowChunk, model: Model) -> None:
    assert chunk.ids.tolist() == sorted(model.rows)
    assert chunk.counts.tolist() == [model.counts[one] for one in sorted(model.rows)]
    assert chunk.last_used.tolist() == [model.last[one] for one in sorted(model.rows)]
    assert dict(zip(chunk.waiting_ids.tolist(), chunk.waiting_counts.tolist(), strict=True)) == (
        model.waiting
    )


def moved(store: TableStore, of: int) -> TableStore:
    """The same rows in a new store, having travelled in shards."""
    new = TableStore.create("t", store.spec, seed=1, shared=False)
    for shard in range(of):
        load(new, export(store, shards=[shard], of=of))
    store.close()
    return new


FAR = [-(1 << 63), -1, (1 << 63) - 1, 1 << 40, -77]
batches = st.lists(st.integers(0, 12) | st.sampled_from(FAR), max_size=12)
steps = st.lists(
    st.tuples(
        st.sampled_from(["see", "see", "see", "update", "drop", "evict", "move", "look"]),
        batches,
        st.integers(0, 3),
    ),
    max_size=25,
)
any_spec = st.builds(
    Table,
    st.just(DIM),
    optimizer=st.just("sgd"),
    init=st.sampled_from(["uniform", "normal(0.1)", "zeros"]),
    rows=st.sampled_from([None, None, 13]),
    admit_after=st.sampled_from([1, 1, 2, 3]),
    evict_unused=st.sampled_from([None, 1, 4]),
    evict_below=st.sampled_from([None, 2]),
)


@settings(max_examples=150)
@given(any_spec, steps)
def test_a_table_is_a_dict_of_rows(spec: Table, actions: list[tuple[str, list[int], int]]) -> None:
    store, model = TableStore.create("t", spec, seed=1, shared=False), Model(spec)
    chance = np.random.default_rng(0)
    now = 0
    try:
        for action, batch, passed in actions:
            now += passed
            ids = [one % 13 for one in batch] if spec.rows else batch
            if action == "see":
                slots = store.find(ids, create=True, now=now)
                assert (slots >= 0).tolist() == model.see(ids, now, store)
                again = dict(zip(ids, slots, strict=True))
                assert all(s in (-1, again[one]) for one, s in zip(ids, slots, strict=True))
            elif action == "update":
                grads = chance.normal(size=(len(ids), DIM)).astype(np.float32)
                fresh, sums = merge(ids, grads)
                store.update(store.find(fresh, create=False), sums, lr=LR, now=now)
                model.update(ids, grads, now)
            elif action == "drop":
                assert drop(store, ids) == model.drop(ids)
            elif action == "evict":
                assert evict(store, now) == model.evict(now)
            elif action == "move":
                store = moved(store, passed + 1)
            else:
                found = store.find(ids, create=False)
                assert (found >= 0).tolist() == [one in model.rows for one in ids]
            check(store, model, ids)
    finally:
        store.close()


def test_each_id_has_its_own_row_over_many_levels() -> None:
    chance = np.random.default_rng(3)
    ids = chance.integers(-(1 << 63), (1 << 63) - 1, 150_000)
    with table(Table(2, init="zeros", optimizer="sgd")) as store:
        for part in np.array_split(ids, 37):
            slots = store.find(part, create=True, now=1)
            assert len(np.unique(slots)) == len(np.unique(part))
            store.rows[slots, 0] = part.astype(np.float32)
        assert len(store.ids()) == len(np.unique(ids))
        assert (read(store, ids)[:, 0] == ids.astype(np.float32)).all()
        others = chance.integers(-(1 << 63), (1 << 63) - 1, 10_000)
        assert (store.find(others, create=False) == -1).all()
        gone = ids[::3]
        assert drop(store, gone) == len(np.unique(gone))
        left = np.setdiff1d(ids, gone)
        assert (store.ids() == left).all()
        assert (read(store, left)[:, 0] == left.astype(np.float32)).all()
        # New ids take the places that became free.
        before = int(store.arrays.head[NEXT])
        store.find(others, create=True, now=2)
        assert int(store.arrays.head[NEXT]) == before


def ids_of_hashes(hashes: np.ndarray) -> np.ndarray:
    """The ids that have these hashes: hash_ids backwards."""
    x = hashes.copy()
    for shift, factor in ((31, SECOND), (27, FIRST), (30, 1)):
        undone = x.copy()
        for _ in range(3):  # each time, twice as many upper bits are right
            undone = x ^ (undone >> np.uint64(shift))
        x = undone * np.uint64(pow(factor, -1, 1 << 64))
    return (x - np.uint64(STEP)).view(np.int64)


@pytest.mark.parametrize("admit_after", [1, 2])
def test_ids_with_colliding_hashes_have_rows_of_their_own(admit_after: int) -> None:
    """The same half in the entry and the same windows in the first levels: only the id tells."""
    many = (np.arange(1 << 21, dtype=np.uint64) << np.uint64(32)) | np.uint64(0x12345678)
    spread, alike = many.copy(), np.ones(many.size, dtype=np.bool_)
    for level in range(2):
        spread *= np.uint64(0xD6E8_FEB8_6659_FD93)
        alike &= spread >> np.uint64(64 - 7 - level) == np.uint64(5)
    ids = ids_of_hashes(many[alike])
    assert (hash_ids(ids) == many[alike]).all()
    assert ids.size > 40
    with table(Table(DIM, optimizer="sgd", admit_after=admit_after)) as store:
        for step in range(admit_after):
            assert (store.find(ids[::2], create=True, now=step) > 0).all() == (
                step == admit_after - 1
            )
        assert (store.find(ids[1::2], create=False) == -1).all()
        assert store.ids().tolist() == sorted(ids[::2].tolist())
        slots = store.find(ids[::2], create=True, now=9)
        assert len(np.unique(slots)) == len(slots)
        assert (export(store).counts == admit_after + 1).all()


def test_a_slot_stays_the_same_until_eviction() -> None:
    with table(Table(DIM)) as store:
        ids = np.arange(5_000)
        slots = store.find(ids, create=True, now=1)
        for begin in range(5_000, 60_000, 5_000):
            store.find(np.arange(begin, begin + 5_000), create=True, now=1)
        assert (store.find(ids, create=False) == slots).all()


@pytest.mark.parametrize("rows", [10_000, 12_000, 24_000, 49_000, 98_000, 130_000])
def test_index_and_counters_take_under_40_bytes_a_row(rows: int) -> None:
    spec = Table(16, optimizer="sgd")
    with table(spec) as store:
        for begin in range(0, rows, 500):
            store.find(np.arange(begin, begin + 500) * 7919, create=True, now=1)
        ready = int(store.arrays.head[READY])
        assert store.nbytes - ready * 64 < 40 * rows
        assert store.nbytes >= rows * (64 + 16 + 8)
        assert store.nbytes <= rows * spec.bytes_per_row() * 1.08 + 65_536


def test_chunks_of_any_number_of_shards_make_the_whole_table() -> None:
    with table(Table(DIM, optimizer="adam")) as store, table(Table(DIM, optimizer="adam")) as other:
        ids = np.random.default_rng(1).integers(-(1 << 62), 1 << 62, 500)
        for step in range(3):
            slots = store.find(ids, create=True, now=step)
            store.update(slots, np.full((500, DIM), 0.1 * step, np.float32), lr=0.1, now=step)
        parts = [export(store, shards=[shard], of=7) for shard in range(7)]
        assert sum(len(part.ids) for part in parts) == 500
        for shard, part in enumerate(parts):
            assert (shard_of(part.ids, 7) == shard).all()
            load(other, part)
        whole, again = export(store), export(other, shards=[0, 1, 2], of=3)
        for name, value in vars(whole).items():
            assert (value == vars(again)[name]).all(), name
        assert whole.state.shape == (500, 2 * DIM + 1)
        # What was loaded trains on as if it had always been there.
        for one in (store, other):
            slots = one.find(ids, create=True, now=9)
            one.update(slots, np.full((500, DIM), 0.3, np.float32), lr=0.1, now=9)
        assert (read(store, ids) == read(other, ids)).all()


def test_an_incremental_export_has_only_touched_rows() -> None:
    with table(Table(DIM, optimizer="adagrad")) as store, table(Table(DIM)) as other:
        store.find(range(100), create=True, now=1)
        load(other, export(store))
        slots = store.find(range(90, 110), create=True, now=5)
        store.update(slots, np.ones((20, DIM), np.float32), lr=0.1, now=5)
        store.update(store.find([3], create=False), np.ones((1, DIM), np.float32), lr=0.1, now=6)
        fresh = export(store, since=1)
        assert fresh.ids.tolist() == [3, *range(90, 110)]
        assert export(store, since=5).ids.tolist() == [3]
        load(other, fresh)
        everything = range(120)
        assert (read(other, everything) == read(store, everything)).all()
        assert (export(other).last_used == export(store).last_used).all()


def test_ids_out_of_range_are_refused() -> None:
    with table(Table(DIM, rows=10)) as store:
        for wrong in (10, -1, 1 << 50):
            with pytest.raises(
                JobError, match=rf"'t' has no id {wrong}: Table\(rows=10\) has 0 to 9"
            ):
                store.find([3, wrong, 4], create=True, now=1)
        assert len(store.ids()) == 0


def test_an_empty_batch_changes_nothing() -> None:
    for rows in (None, 5):
        with table(Table(DIM, rows=rows)) as store:
            assert store.find([], create=True, now=1).size == 0
            assert read(store, []).shape == (0, DIM)
            store.update(np.empty(0, np.int64), np.empty((0, DIM), np.float32), lr=1.0, now=1)
            ids, sums = merge([], np.empty((0, DIM), np.float32))
            assert (
                ids.size == sums.size == len(store.ids()) == drop(store, []) == evict(store, 3) == 0
            )


@given(st.lists(st.integers(-3, 3), max_size=40))
def test_merge_keeps_the_order_of_first_occurrence(ids: list[int]) -> None:
    grads = np.random.default_rng(0).normal(size=(len(ids), DIM)).astype(np.float32)
    fresh, sums = merge(ids, grads)
    assert fresh.tolist() == list(dict.fromkeys(ids))
    again, inverse = unique(ids)
    assert again[inverse].tolist() == ids
    for one, total in zip(fresh, sums, strict=True):
        wanted = np.zeros(DIM, np.float32)
        for number, (other, grad) in enumerate(zip(ids, grads, strict=True)):
            if other == one:
                wanted = grad if number == ids.index(one) else wanted + grad
        assert (total == wanted).all()
