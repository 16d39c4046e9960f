"""Row messages of workers: a server accepts nothing that could stop it later."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from manyhands.embeddings.sparse_grads import SparseGrads, TableGrads, num_bytes, pack_into
from manyhands.embeddings.spec import Table
from manyhands.embeddings.table_stores import TableStores
from manyhands.errors import ProtocolError
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
