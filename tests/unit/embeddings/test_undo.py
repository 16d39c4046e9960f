"""Sparse gradients, and undoing an update of rows."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from manyhands.embeddings.sparse_grads import (
    SharedGrads,
    SparseGrads,
    from_bfloat16,
    num_bytes,
    pack_into,
    to_bfloat16,
    unpack,
    weighted_sum,
)
from manyhands.embeddings.spec import Table
from manyhands.embeddings.table_stores import TableStores
from manyhands.embeddings.undo import UndoLog
from manyhands.ps.remote_tables import RowCache

SPECS = {
    "small": Table(dim=3, optimizer="adam", init="normal(1)"),
    "large": Table(dim=5, optimizer="momentum", init="normal(1)"),
}


def grads(seed: int) -> dict[str, SparseGrads]:
    draw = np.random.default_rng(seed)
    made = {}
    for name, table in SPECS.items():
        ids = draw.choice(40, size=draw.integers(0, 9), replace=False).astype(np.int64) - 20
        made[name] = SparseGrads(ids, draw.standard_normal((len(ids), table.dim), np.float32))
    return made


@pytest.mark.parametrize("seed", range(8))
def test_gradients_are_packed_and_unpacked(seed: int) -> None:
    given = grads(seed)
    memory = memoryview(bytearray(num_bytes(given, SPECS)))
    assert pack_into(memory, given, SPECS) == memory.nbytes
    shared = SharedGrads.create(SPECS)
    shared.put(given)
    attached = SharedGrads.attach(shared.address, SPECS)
    for got in (unpack(memory, SPECS), attached.get()):
        for name, sparse in given.items():
            assert np.array_equal(got[name].ids, sparse.ids)
            assert np.array_equal(got[name].grads, sparse.grads)


def test_bfloat16_rounds_to_the_nearest() -> None:
    numbers = np.concatenate(
        [np.float32([0, -0.0, 1, -1, 1e-38, 3e38]), grads(3)["large"].grads.ravel()]
    )
    expected = torch.from_numpy(numbers).bfloat16()
    assert np.array_equal(to_bfloat16(numbers), expected.view(torch.int16).numpy().view(np.uint16))
    assert np.array_equal(from_bfloat16(to_bfloat16(numbers)), expected.float().numpy())
    given = grads(5)
    memory = memoryview(bytearray(num_bytes(given, SPECS, bits=16)))
    assert pack_into(memory, given, SPECS, bits=16) == memory.nbytes
    for name, sparse in unpack(memory, SPECS, bits=16).items():
        assert np.array_equal(sparse.ids, given[name].ids)
        np.testing.assert_allclose(sparse.grads, given[name].grads, rtol=4e-3)


def test_rows_are_cached_for_a_number_of_steps() -> None:
    kept = RowCache(1, 2)
    ids = np.array([3, 5, 9])
    rows, missing = kept.get(ids, 0)
    assert missing.all()
    kept.put(ids, np.float32([[3], [5], [9]]), 0)
    rows, missing = kept.get(np.array([5, 7, 9]), 2)
    assert missing.tolist() == [False, True, False]
    assert rows[~missing].ravel().tolist() == [5, 9]
    kept.put(np.array([7]), np.float32([[7]]), 2)
    _, missing = kept.get(np.array([3, 5, 7, 9]), 3)
    assert missing.tolist() == [True, True, False, True]


@pytest.mark.parametrize("cut", [0, 7, 8, 100])
def test_malformed_gradients_are_refused(cut: int) -> None:
    given = {
        name: SparseGrads(np.arange(9), np.ones((9, t.dim), np.float32))
        for name, t in SPECS.items()
    }
    memory = bytearray(num_bytes(given, SPECS))
    pack_into(memoryview(memory), given, SPECS)
    with pytest.raises(ValueError, match=r"gradients end|do not fit"):
        unpack(memoryview(memory)[:cut], SPECS)


def test_gradients_are_summed_in_order_each_id_once() -> None:
    first, second = grads(1), grads(2)
    summed = weighted_sum([first, second], [1.0, 0.5], SPECS)
    for name, sparse in summed.items():
        assert len(set(sparse.ids.tolist())) == len(sparse.ids)
        expected: dict[int, np.ndarray] = {}  # type: ignore[type-arg]
        for part, factor in ((first[name], 1.0), (second[name], 0.5)):
            for number, grad in zip(part.ids.tolist(), part.grads, strict=True):
                expected[number] = expected.get(number, 0) + grad * np.float32(factor)
        for number, grad in zip(sparse.ids.tolist(), sparse.grads, strict=True):
            np.testing.assert_allclose(grad, expected[number], rtol=1e-6)
        assert set(sparse.ids.tolist()) == set(expected)


def test_any_process_can_undo_an_update() -> None:
    tables = TableStores(SPECS, seed=0)
    tables.share()
    ids = np.arange(-20, 20, dtype=np.int64)
    for name in SPECS:
        tables.store(name).find(ids, create=True, now=0)
    log = UndoLog.create()
    log.reset(4)
    tables.apply([grads(3)], [1.0], lr=0.1, base_lr=0.1, now=5, undo=(log, 5))
    before = tables.state_dict()
    tables.apply([grads(4)], [1.0], lr=0.1, base_lr=0.1, now=6, undo=(log, 6))
    assert (log.begun, log.done) == (6, 6)
    changed = tables.state_dict()
    assert not np.array_equal(changed["large"]["rows"], before["large"]["rows"])
    other = TableStores(SPECS, seed=0)
    other.attach(tables.addresses())
    other.restore(UndoLog.attach(log.address))
    assert (log.begun, log.done) == (5, 5)
    for name, table in tables.state_dict().items():
        for key in ("ids", "rows", "state"):
            assert np.array_equal(table[key], before[name][key]), (name, key)


def test_the_log_shows_an_interrupted_update() -> None:
    tables = TableStores(SPECS, seed=0)
    log = UndoLog.create()
    log.reset(1)
    stores = {name: tables.store(name) for name in SPECS}
    slots = {name: store.find(np.arange(4), create=True, now=0) for name, store in stores.items()}
    before = tables.state_dict()
    log.begin(2, slots, stores)
    stores["small"].update(slots["small"], np.ones((4, 3), np.float32), lr=1.0, now=2)
    assert log.begun > log.done
    tables.restore(log)
    for key in ("rows", "state"):
        assert np.array_equal(tables.state_dict()["small"][key], before["small"][key])


def test_a_server_changes_only_its_own_ids() -> None:
    ids = np.arange(100, dtype=np.int64)
    given = {"small": SparseGrads(ids, np.ones((100, 3), np.float32))}
    whole, parts = TableStores(SPECS, seed=0), TableStores(SPECS, seed=0)
    for tables in (whole, parts):
        tables.store("small").find(ids, create=True, now=0)
    whole.apply([given], [1.0], lr=0.1, base_lr=0.1, now=1)
    for number in range(3):
        parts.apply([given], [1.0], lr=0.1, base_lr=0.1, now=1, part=(number, 3))
    assert np.array_equal(whole.state_dict()["small"]["rows"], parts.state_dict()["small"]["rows"])
