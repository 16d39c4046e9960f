"""Row messages of workers: a server accepts nothing that could stop it later."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from manyhands.embeddings.sparse_grads import SparseGrads, TableGrads, num_bytes, pack_into
from manyhands.embeddings.spec import Table
from manyhands.embeddings.table_stores import TableStores
from manyhands.errors import ProtocolError
from manyhands.ps.policies import AsyncPolicy, Contribution, Decider, Ledger
from manyhands.ps.protocol import RowGradients, RowsRequest
from manyhands.ps.rows import RowServerState

SPECS = {"few": Table(3, rows=10), "any": Table(2)}


Sent = tuple[RowGradients | RowsRequest, memoryview]
"""A message and its payload."""


def server_state() -> RowServerState:
    rows = RowServerState("server-0", TableStores(SPECS, seed=1), adds=False)
    rows.enter("worker-0", [], slots=2)
    return rows


def grads_of(**ids: list[int]) -> TableGrads:
    return {
        name: SparseGrads(np.array(each), np.ones((len(each), SPECS[name].dim), np.float32))
        for name, each in ids.items()
    }


def pushed(given: TableGrads, *, slot: int = 0, seq: int = 1) -> Sent:
    payload = memoryview(bytearray(num_bytes(given, SPECS)))
    pack_into(payload, given, SPECS)
    return RowGradients(seq, slot, payload.nbytes), payload


def handle(rows: RowServerState, sent: Sent, *, done: int = 0) -> list[Any]:
    return list(rows.handle("worker-0", *sent, done=done))


def test_gradients_are_kept_in_their_slot() -> None:
    rows = server_state()
    handle(rows, pushed(grads_of(few=[9, 0], any=[-5]), slot=1))
    kept = rows.grads["worker-0"][1].get()
    assert kept["few"].ids.tolist() == [9, 0]
    assert kept["any"].ids.tolist() == [-5]


def test_gradients_that_are_in_the_weights_are_dropped() -> None:
    rows = server_state()
    handle(rows, pushed(grads_of(few=[1]), seq=4), done=4)
    assert rows.grads["worker-0"][0].get() == {}


@pytest.mark.parametrize(
    ("sent", "why"),
    [
        (pushed(grads_of(few=[3, 10])), "10"),
        (pushed(grads_of(few=[-1])), "-1"),
        (pushed(grads_of(few=[1]), slot=2), "slot 2"),
        (pushed(grads_of(few=[1]), slot=-1), "slot -1"),
        ((RowGradients(1, 0, 7), memoryview(b"garbage")), "gradients end"),
        ((RowsRequest(1, "few", 8), memoryview(np.array([10]).data).cast("B")), "10"),
        ((RowsRequest(1, "none", 8), memoryview(bytes(8))), "'none'"),
        ((RowsRequest(1, "few", 7), memoryview(bytes(7))), "7 bytes"),
    ],
)
def test_a_wrong_message_is_refused_when_it_arrives(sent: Sent, why: str) -> None:
    rows = server_state()
    with pytest.raises(ProtocolError, match=why):
        handle(rows, sent)
    assert all(place.get() == {} for place in rows.grads["worker-0"])


@pytest.mark.parametrize("optimizer", ["sgd", "adagrad"])
def test_a_row_in_one_part_of_a_batch_moves_as_with_the_whole_batch(optimizer: str) -> None:
    """As a server of ps:async gets it: a gradient that is divided by the batch, and a part of the rate."""
    specs = {"any": Table(2, optimizer=optimizer, init="zeros")}
    ids, moved = np.array([7]), []
    for part, whole in [(1, 1), (16, 64)]:
        tables = TableStores(specs, seed=1)
        rows = RowServerState("s", tables, adds=False, by_part=True)
        rows.enter("w", [], slots=1)
        decider = Decider(AsyncPolicy(["w"]), Ledger(), servers=["s"], by_part=True)
        for seq in (1, 2):
            rows.put("w", 0, {"any": SparseGrads(ids, np.array([[0.5, -3.0]], np.float32))})
            samples, total = float(part), float(whole)
            push = Contribution("w", seq, 0, seq, 0, samples, total, share=(part, whole))
            decider.received("s", push, began=seq - 1, after=seq - 1)
            (decision,) = decider.decisions()
            rows.apply(decision, ["s"], lr=0.1, base_lr=0.1)
        moved.append(rows.look_up("any", ids))
    assert np.abs(moved[0]).min() > 0
    np.testing.assert_allclose(moved[1], moved[0], rtol=1e-6)
