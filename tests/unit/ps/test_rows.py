"""What a server makes of what workers say about rows: nothing that could stop it later."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from manyhands.embeddings.sparse_grads import SparseGrads, TableGrads, num_bytes, pack_into
from manyhands.embeddings.spec import Table
from manyhands.embeddings.table_stores import TableStores
from manyhands.ps.protocol import Nonsense
from manyhands.ps.rows import RowServerState

SPECS = {"few": Table(3, rows=10), "any": Table(2)}


@dataclass
class Word:
    kind: str
    head: Mapping[str, Any]
    payload: memoryview | None = None


def server_state() -> RowServerState:
    rows = RowServerState("server-0", TableStores(SPECS, seed=1), shared=False, adds=False)
    rows.enter("worker-0", [], slots=2)
    return rows


def basket(**ids: list[int]) -> TableGrads:
    return {
        name: SparseGrads(np.array(each), np.ones((len(each), SPECS[name].dim), np.float32))
        for name, each in ids.items()
    }


def pushed(given: TableGrads, *, slot: int = 0, seq: int = 1) -> Word:
    payload = memoryview(bytearray(num_bytes(given, SPECS)))
    pack_into(payload, given, SPECS)
    return Word("basket", {"seq": seq, "slot": slot}, payload)


def hear(rows: RowServerState, word: Word, *, done: int = 0) -> list[Any]:
    return list(rows.hear("worker-0", word, done=done))


def test_a_basket_is_kept_in_its_slot() -> None:
    rows = server_state()
    hear(rows, pushed(basket(few=[9, 0], any=[-5]), slot=1))
    kept = rows.baskets["worker-0"][1].get()
    assert kept["few"].ids.tolist() == [9, 0]
    assert kept["any"].ids.tolist() == [-5]


def test_a_basket_that_is_in_the_weights_is_not_kept() -> None:
    rows = server_state()
    hear(rows, pushed(basket(few=[1]), seq=4), done=4)
    assert rows.baskets["worker-0"][0].get() == {}


@pytest.mark.parametrize(
    ("word", "why"),
    [
        (pushed(basket(few=[3, 10])), "10"),
        (pushed(basket(few=[-1])), "-1"),
        (pushed(basket(few=[1]), slot=2), "slot 2"),
        (pushed(basket(few=[1]), slot=-1), "slot -1"),
        (Word("basket", {"seq": 1, "slot": 0}, memoryview(b"garbage")), "basket"),
        (Word("rows", {"table": "few", "tag": 1}, memoryview(np.array([10]).data).cast("B")), "10"),
        (Word("rows", {"table": "none", "tag": 1}, memoryview(bytes(8))), "'none'"),
        (Word("rows", {"table": "few", "tag": 1}, memoryview(bytes(7))), "7 bytes"),
    ],
)
def test_nonsense_is_refused_when_it_comes(word: Word, why: str) -> None:
    rows = server_state()
    with pytest.raises(Nonsense, match=why):
        hear(rows, word)
    assert all(place.get() == {} for place in rows.baskets["worker-0"])
