"""Rows: their initial values, and their optimizers compared with those of torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from row_reads import initial, read

from manyhands.embeddings import memory
from manyhands.embeddings.kernels import changes
from manyhands.embeddings.row_transfer import drop, export, load
from manyhands.embeddings.spec import OPTIMIZERS, Table
from manyhands.embeddings.store import TableStore
from manyhands.errors import JobError, LinkError, UsageError
from manyhands.transport.shm import Segment

LR = 0.05


@contextmanager
def table(spec: Table, *, seed: int = 1, name: str = "t") -> Iterator[TableStore]:
    store = TableStore.create(name, spec, seed=seed, shared=True)
    try:
        yield store
    finally:
        store.close()


AS_TORCH: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=LR),
    "momentum(beta=0.8)": lambda p: torch.optim.SGD(p, lr=LR, momentum=0.8),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=LR),
    "adagrad(eps=1e-6,initial=0.1)": lambda p: torch.optim.Adagrad(
        p, lr=LR, eps=1e-6, initial_accumulator_value=0.1
    ),
    "adam": lambda p: torch.optim.Adam(p, lr=LR),
    "adam(betas=0.5:0.9,eps=1e-4)": lambda p: torch.optim.Adam(
        p, lr=LR, betas=(0.5, 0.9), eps=1e-4
    ),
    "adam(weight_decay=0.1)": lambda p: torch.optim.AdamW(p, lr=LR, weight_decay=0.1),
}


@pytest.mark.parametrize("rows", [None, 40])
@pytest.mark.parametrize("dim", [1, 7, 64])
@pytest.mark.parametrize("optimizer", AS_TORCH)
def test_optimizers_match_torch_on_rows_of_every_step(
    optimizer: str, dim: int, rows: int | None
) -> None:
    ids = np.random.default_rng(2).permutation(40)
    with table(Table(dim, rows=rows, optimizer=optimizer, init="normal(0.5)")) as store:
        dense = torch.nn.Parameter(torch.from_numpy(read(store, ids)))
        theirs = AS_TORCH[optimizer]([dense])
        chance = torch.Generator().manual_seed(0)
        for step in range(50):
            dense.grad = torch.randn(dense.shape, generator=chance)
            store.update(
                store.find(ids, create=True, now=step), dense.grad.numpy(), lr=LR, now=step
            )
            theirs.step()
        np.testing.assert_allclose(read(store, ids), dense.detach().numpy(), rtol=1e-6, atol=1e-6)


def test_adam_beyond_the_table_of_corrections() -> None:
    with table(Table(2, optimizer="adam")) as store:
        dense = torch.nn.Parameter(torch.from_numpy(read(store, [5])))
        theirs = torch.optim.Adam([dense], lr=1e-4)
        slot = store.find([5], create=True, now=0)
        chance = torch.Generator().manual_seed(0)
        for step in range(4_200):
            dense.grad = torch.randn(1, 2, generator=chance)
            store.update(slot, dense.grad.numpy(), lr=1e-4, now=step)
            theirs.step()
        np.testing.assert_allclose(read(store, [5]), dense.detach().numpy(), rtol=0, atol=2e-6)


def test_bias_is_corrected_by_the_rows_own_number_of_updates() -> None:
    """A row that is first used late learns like one that was used from the start."""
    with table(Table(4, optimizer="adam", init="zeros")) as store:
        grads = np.random.default_rng(0).normal(size=(20, 1, 4)).astype(np.float32)
        for step, grad in enumerate(grads):
            store.update(store.find([1], create=True, now=step), grad, lr=LR, now=step)
        for step, grad in enumerate(grads):
            store.update(store.find([2], create=True, now=step), grad, lr=LR, now=20 + step)
        assert (read(store, [1]) == read(store, [2])).all()


def test_rowwise_adagrad_keeps_one_number_a_row() -> None:
    spec = Table(8, optimizer="rowwise_adagrad(eps=1e-6,initial=0.5)")
    assert spec.bytes_per_row() == 8 * 4 + 4 + 16 + 24
    with table(spec) as store:
        row = read(store, [3])[0].astype(np.float64)
        squares = 0.5
        for step in range(10):
            grad = np.random.default_rng(step).normal(size=8)
            squares += float((grad**2).mean())
            row -= LR * grad / (squares**0.5 + 1e-6)
            slots = store.find([3], create=True, now=step)
            store.update(slots, grad[None].astype(np.float32), lr=LR, now=step)
        np.testing.assert_allclose(read(store, [3])[0], row, rtol=0, atol=1e-6)
        assert export(store).state[0, -1] == pytest.approx(squares, rel=1e-6)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_weight_decay_shrinks_the_rows_touched_and_no_others(name: str) -> None:
    spec = Table(8, optimizer=f"{name}(weight_decay=0.2)", init="normal(1)")
    with table(spec) as store:
        slots = store.find([1, 2], create=True, now=0)
        before = read(store, [1, 2])
        store.update(slots[:1], np.zeros((1, 8), np.float32), lr=0.5, now=0)
        np.testing.assert_allclose(read(store, [1])[0], 0.9 * before[0], rtol=1e-6)
        assert (read(store, [2])[0] == before[1]).all()


def test_gradients_of_ids_without_a_row_are_dropped() -> None:
    with table(Table(4, admit_after=2, optimizer="sgd")) as store:
        slots = store.find([1, 2, 2], create=True, now=0)
        assert (slots >= 0).tolist() == [False, False, True]
        ids = np.array([1, 2])
        store.update(store.find(ids, create=False), np.ones((2, 4), np.float32), lr=1.0, now=0)
        first = initial(store, ids)
        assert (read(store, [1]) == first[:1]).all()
        np.testing.assert_allclose(read(store, [2]), first[1:] - 1.0, atol=1e-6)


def test_a_nan_gradient_stays_in_its_row() -> None:
    for name in OPTIMIZERS:
        with table(Table(5, optimizer=name)) as store:
            slots = store.find([1, 2, 3], create=True, now=0)
            grads = np.ones((3, 5), np.float32)
            grads[1, 2] = np.nan
            store.update(slots, grads, lr=LR, now=0)
            rows = read(store, [1, 2, 3])
            assert np.isnan(rows[1]).any(), name
            assert np.isfinite(rows[[0, 2]]).all(), name


def as_hex(rows: np.ndarray) -> list[list[str]]:
    return [[float(number).hex() for number in row] for row in rows]


def test_initial_rows_never_change() -> None:
    """Checkpoints have no untouched rows: a change here would change the meaning of old checkpoints."""
    with table(Table(4), seed=7, name="users") as store:
        assert as_hex(initial(store, [0, -1])) == GOLDEN["uniform"]
    with table(Table(4, init="normal(1)"), seed=7, name="users") as store:
        assert as_hex(initial(store, [0, -1])) == GOLDEN["normal"]


GOLDEN = {
    "uniform": [
        [
            "-0x1.bdddf80000000p-4",
            "0x1.0979900000000p-6",
            "0x1.a171200000000p-7",
            "0x1.ebcff40000000p-4",
        ],
        [
            "0x1.8a9dc80000000p-5",
            "0x1.0848900000000p-6",
            "0x1.d9f7480000000p-5",
            "-0x1.147ab00000000p-5",
        ],
    ],
    "normal": [
        [
            "0x1.3e26000000000p-1",
            "0x1.896c000000000p-2",
            "-0x1.97e0000000000p-4",
            "0x1.c554000000000p-1",
        ],
        [
            "0x1.0e1c000000000p-1",
            "0x1.1c8a000000000p-1",
            "-0x1.58dc000000000p-2",
            "0x1.b074000000000p+0",
        ],
    ],
}


def test_initial_rows_have_the_distribution_of_the_spec() -> None:
    ids = np.arange(-2_000, 2_000)
    with table(Table(32)) as store:
        rows = initial(store, ids)
        assert np.abs(rows).max() <= 1 / 64
        assert rows.std() == pytest.approx(1 / 64 / 3**0.5, rel=0.01)
        assert abs(rows.mean()) < 1e-4
        assert len(np.unique(rows[:, 0])) > 3_990
    with table(Table(32, init="normal(0.3)")) as store:
        rows = initial(store, ids)
        assert rows.std() == pytest.approx(0.3, rel=0.01)
        inside = (np.abs(rows) < 0.3).mean()
        assert inside == pytest.approx(0.6827, abs=0.01)
        # No column, row or neighbour is like another.
        assert np.abs(np.corrcoef(rows.T) - np.eye(32)).max() < 0.1
        assert np.abs(np.corrcoef(rows[:60]) - np.eye(60)).max() < 0.75


def test_another_seed_or_name_gives_other_rows() -> None:
    seen = []
    for seed, name in ((1, "a"), (2, "a"), (1, "b")):
        with table(Table(8), seed=seed, name=name) as store:
            seen.append(initial(store, [1, 2]))
            store.find([1, 2], create=True, now=0)
            assert (read(store, [1, 2]) == seen[-1]).all()
    assert not any((a == b).any() for a, b in ((seen[0], seen[1]), (seen[0], seen[2])))


def test_views_for_kernels_are_not_copies() -> None:
    with table(Table(16, optimizer="adagrad(initial=3.0)")) as store:
        slots = store.find([5, 6], create=True, now=0)
        store.rows[slots[0]] = 2.0
        assert (read(store, [5]) == 2.0).all()
        assert (store.records[slots, 16:32] == 3.0).all()
        assert store.records.ctypes.data % 64 == 0
        assert (store.records.strides[0], store.records.flags.c_contiguous) == (128, True)


def test_an_attached_table_is_the_same_table() -> None:
    spec = Table(4, optimizer="sgd")
    with table(spec) as store:
        other = TableStore.attach("t", spec, store.address)
        slots = other.find([1, 2], create=True, now=4)
        assert (store.find([1, 2], create=False) == slots).all()
        store.update(slots, np.ones((2, 4), np.float32), lr=1.0, now=5)
        assert (read(other, [1, 2]) == read(store, [1, 2])).all()
        assert (initial(other, [9]) == initial(store, [9])).all()
        # Growth, and an index made anew, by one are seen by the other.
        store.find(range(30_000), create=True, now=6)
        drop(store, range(100, 200))
        assert (other.find(range(30_000), create=False) == -1).sum() == 100
        other.close()
        with pytest.raises(UsageError, match="must have the same job"):
            TableStore.attach("t", Table(5), store.address)
        with pytest.raises(UsageError, match="must have the same job"):
            TableStore.attach("u", spec, store.address)
    private = TableStore.create("t", spec, seed=1, shared=False)
    with pytest.raises(UsageError, match="shared=True"):
        _ = private.address
    private.close()


def test_shared_memory_that_is_no_table_is_refused() -> None:
    segment = Segment.create(8192)
    with pytest.raises(LinkError, match="no table"):
        TableStore.attach("t", Table(4), segment.address)
    segment.close()


def test_a_table_larger_than_the_memory_is_refused() -> None:
    with pytest.raises(JobError, match=r"1,000,000,000 rows of 2064 bytes are 1.9 TiB.*can spare"):
        TableStore.create("big", Table(256, rows=10**9), seed=0)
    with pytest.raises(JobError, match=r"not one row of .* bytes"):
        TableStore.create("small", Table(256, max_bytes=1000), seed=0)


def test_a_table_that_outgrows_the_memory_raises_and_stays_usable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with table(Table(64)) as store:
        store.find(range(100), create=True, now=0)
        monkeypatch.setattr(memory, "available_bytes", lambda: 100_000)
        with pytest.raises(JobError, match=r"needs .* KiB more; this host can spare 97.7 KiB"):
            store.find(range(100_000), create=True, now=1)
        monkeypatch.undo()
        assert len(store.ids()) >= 100
        store.find(range(100_000), create=True, now=1)
        assert len(store.ids()) == 100_000


def test_a_closed_table_raises_when_it_must_grow() -> None:
    store = TableStore.create("t", Table(64), seed=0)
    store.close()
    with pytest.raises(JobError, match="was closed here"):
        store.find(range(100_000), create=True, now=0)


def test_only_rows_in_use_take_memory() -> None:
    with table(Table(64)) as store:
        assert store.layout.at.end > 1 << 30
        assert store.nbytes < 1 << 20


def test_a_part_of_a_large_table_takes_memory_for_its_own_rows() -> None:
    spec = Table(16, rows=2_000_000, optimizer="adagrad")
    ids = np.arange(0, 2_000_000, 1_000)
    part = TableStore.create("t", spec, seed=1, shared=False, spread=True)
    whole = TableStore.create("t", spec, seed=1, shared=False)
    try:
        for store in (part, whole):
            store.update(
                store.find(ids, create=True), np.ones((2_000, 16), np.float32), lr=LR, now=1
            )
        assert part.nbytes < whole.nbytes / 20
        assert (read(part, ids) == read(whole, ids)).all()
        with pytest.raises(JobError, match="no id 2000000"):
            part.find([5, 2_000_000], create=True)
        # What one has saved, the other can read.
        other = export(part)
        load(whole, other)
        load(part, export(whole))
        assert (part.ids() == ids).all()
        assert (whole.ids() == ids).all()
    finally:
        part.close()
        whole.close()


def test_differences_count_less_if_others_changed_the_row_first() -> None:
    draw = np.random.default_rng(3)
    with table(Table(5, optimizer="adam", init="normal(1)")) as store:
        slots = store.find(range(20), create=True)
        slots[4] = -1
        turns = draw.integers(0, 8, 64).astype(np.float32)
        read_at = (turns[slots] - draw.integers(0, 4, 20)) % 8
        given = np.column_stack([draw.normal(size=(20, 5)), read_at]).astype(np.float32)
        before, was = read(store, range(20)), turns.copy()
        store.add_differences(slots, given, turns, modulo=8, now=7)
        behind = (was[slots] - read_at) % 8
        expected = before + given[:, :5] / (1 + behind)[:, None]
        expected[4] = before[4]
        np.testing.assert_allclose(read(store, range(20)), expected, rtol=1e-6)
        made = slots[slots >= 0]
        assert (turns[made] == (was[made] + 1) % 8).all()
        assert np.delete(turns, made).tolist() == np.delete(was, made).tolist()
        assert export(store, since=6).ids.tolist() == [n for n in range(20) if n != 4]


@pytest.mark.parametrize("changed", [[], [0], [1, 5, 9], list(range(10))])
def test_only_changed_rows_are_returned(changed: list[int]) -> None:
    draw = np.random.default_rng(4)
    before = draw.normal(size=(10, 4)).astype(np.float32)
    after = before[:, :3].copy()
    after[changed, 2] += 1
    ids, out = np.empty(11, np.int64), np.empty((11, 4), np.float32)
    count = changes(np.arange(10) * 7, before, after, ids, out)
    assert ids[:count].tolist() == [7 * n for n in changed]
    assert (out[:count, :3] == after[changed] - before[changed, :3]).all()
    assert (out[:count, 3] == before[changed, 3]).all()
