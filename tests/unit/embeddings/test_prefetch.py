"""Prefetching: which rows are requested ahead, and that they are the right ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from manyhands.embeddings.local_tables import LocalTables
from manyhands.embeddings.modules import SparseEmbedding, SparseEmbeddingBag, bind, tables_of
from manyhands.embeddings.prefetch import Prefetcher
from manyhands.embeddings.row_placement import RowPlacement
from manyhands.embeddings.table_stores import TableStores
from manyhands.ps.protocol import RowsAnswer, RowsRequest
from manyhands.ps.remote_tables import RemoteTables
from manyhands.ps.rows import RowServerState


def batch(seed: int, samples: int = 8) -> dict[str, Any]:
    draw = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 1_000, (samples, 5), generator=draw)
    return {"x": torch.rand(samples, 3, generator=draw), "parts": (ids, ids[:, 0] * 2 + 1)}


@pytest.mark.parametrize(
    "look_up",
    [
        lambda b: b["parts"][0],
        lambda b: b["parts"][0][:, 2],
        lambda b: b["parts"][0][:, 1:4],
        lambda b: b["parts"][0][:, ::2],
        lambda b: b["parts"][0].unsqueeze(1),
        lambda b: b["parts"][1],
    ],
)
def test_a_slice_of_the_batch_is_predicted_for_the_next(look_up: Any) -> None:
    foresight = Prefetcher()
    foresight.learn("t", look_up(batch(1)), batch(1))  # another object: nothing to learn from
    assert foresight.ids_in(batch(2)) == {}
    first = batch(1)
    foresight.learn("t", look_up(first), first)
    for later in (batch(2), batch(3, samples=3)):
        assert torch.equal(foresight.ids_in(later)["t"], torch.unique(look_up(later)))


@pytest.mark.parametrize(
    "look_up",
    [
        lambda b: b["parts"][0] + 1,
        lambda b: b["parts"][0][:4],
        lambda b: b["parts"][0][::2],
        lambda b: b["parts"][0].T,
        lambda b: b["parts"][0].to(torch.int32),
        lambda b: torch.tensor(3),
    ],
)
def test_other_ids_are_not_predicted(look_up: Any) -> None:
    foresight, first = Prefetcher(), batch(1)
    foresight.learn("t", look_up(first), first)
    assert foresight.ids_in(batch(2)) == {}


def test_a_batch_of_another_structure_is_not_predicted() -> None:
    foresight, first = Prefetcher(), batch(1)
    foresight.learn("t", first["parts"][0], first)
    assert foresight.ids_in({"x": torch.zeros(2)}) == {}
    assert foresight.ids_in([torch.zeros(2), torch.zeros(2, 6, dtype=torch.int64)]) == {}
    assert foresight.ids_in("words") == {}


class Looking(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one = SparseEmbedding(None, 4)
        self.bag = SparseEmbeddingBag(None, 2, mode="sum")

    def forward(self, ids: Tensor) -> Tensor:
        return self.one(ids[:, 0]).sum() + self.bag(ids[:, 1:]).sum()


class Servers:
    """Two servers in this process, each with its rows. Records what is requested."""

    def __init__(self, model: nn.Module) -> None:
        self.row_placement: RowPlacement | None = RowPlacement.fresh(["a", "b"], replicas=0)
        self.server_states = {
            name: RowServerState(name, TableStores(tables_of(model), seed=1), adds=False)
            for name in "ab"
        }
        self.asked: list[tuple[str, set[int]]] = []
        self._answers: dict[tuple[str, int], memoryview] = {}

    def rows(self, table: str, tag: int, ids: Mapping[str, memoryview]) -> None:
        for server, payload in ids.items():
            self.asked.append((table, set(np.frombuffer(payload, np.int64).tolist())))
            request = RowsRequest(tag, table, payload.nbytes)
            for answer, rows in self.server_states[server].handle("w", request, payload, done=0):
                assert isinstance(answer, RowsAnswer)
                assert rows is not None
                self._answers[server, answer.tag] = rows

    def wait_for_rows(self, tag: int, servers: Sequence[str]) -> list[memoryview]:
        return [self._answers.pop((name, tag)) for name in servers]

    def table_states(self, since: int | None = None) -> None:
        raise AssertionError("no checkpoint here")

    def taken(self) -> dict[str, set[int]]:
        """Return the ids requested since the last call, by table."""
        asked, self.asked = self.asked, []
        names = {name for name, _ in asked}
        return {name: set().union(*(ids for n, ids in asked if n == name)) for name in names}


def step(model: nn.Module, tables: RemoteTables, ids: Tensor, number: int) -> float:
    tables.now, tables.batch = number, [ids]
    loss: float = model(ids).item()
    return loss


@pytest.mark.parametrize("age", [0, 2])
def test_predicted_rows_are_not_requested_again(age: int) -> None:
    model = Looking()
    tables = RemoteTables(LocalTables(tables_of(model), seed=1), adds=False, age=age)
    servers = Servers(model)
    tables.connect(servers, None)
    bind(model, tables)
    plain = Looking()
    bind(plain, LocalTables(tables_of(plain), seed=1))
    batches = [torch.randint(0, 50, (6, 4)) + 100 * n for n in range(3)]
    step(model, tables, batches[0], 1)
    assert servers.taken() == {
        "one": set(batches[0][:, 0].tolist()),
        "bag": set(batches[0][:, 1:].reshape(-1).tolist()),
    }
    tables.expect([batches[1]], 2)
    tables.expect([batches[2]], 3)
    assert servers.taken()["one"] == {*batches[1][:, 0].tolist(), *batches[2][:, 0].tolist()}
    for number in (2, 3):
        ids = batches[number - 1]
        assert step(model, tables, ids, number) == pytest.approx(plain(ids).item())
    assert servers.taken() == {}
    # Once more in the step after: kept if that is allowed.
    step(model, tables, batches[2], 4)
    assert bool(servers.taken()) == (age == 0)


def test_requests_of_another_view_are_dropped() -> None:
    model = Looking()
    tables = RemoteTables(LocalTables(tables_of(model), seed=1), adds=False, age=0)
    tables.connect(Servers(model), None)
    bind(model, tables)
    ids = torch.arange(8).view(2, 4)
    step(model, tables, ids, 1)
    tables.expect([ids], 2)
    after = Servers(model)
    tables.connect(after, None)
    step(model, tables, ids, 2)
    assert after.taken()["one"] == {0, 4}


def test_synchronous_modes_do_not_prefetch() -> None:
    model = Looking()
    tables = RemoteTables(LocalTables(tables_of(model), seed=1), adds=False, age=None)
    assert not tables.foresees
