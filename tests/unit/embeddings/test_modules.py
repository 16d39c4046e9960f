"""SparseEmbedding and SparseEmbeddingBag, compared with those of torch."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import nn

from manyhands.embeddings.local_tables import LocalTables
from manyhands.embeddings.modules import SparseEmbedding, SparseEmbeddingBag, TableModule, tables_of
from manyhands.embeddings.spec import Table
from manyhands.errors import JobError

IDS = torch.tensor([[3, 1, 3], [0, 7, 1]])


def twin(module: TableModule, rows: int = 10) -> tuple[LocalTables, torch.Tensor]:
    """The module's tables, and its first rows as a dense matrix."""
    tables = LocalTables.of(module, seed=5)
    every = torch.arange(rows)
    return tables, tables.pull("table", every, every).clone()


def test_forward_and_step_match_torch() -> None:
    ours = SparseEmbedding(10, 4, optimizer="sgd", init="normal(1)")
    tables, rows = twin(ours)
    theirs = nn.Embedding(10, 4, _weight=rows.clone())
    optimizer = torch.optim.SGD(theirs.parameters(), lr=0.5)
    for _ in range(3):
        optimizer.zero_grad()
        mine, other = ours(IDS), theirs(IDS)
        assert mine.shape == (2, 3, 4)
        torch.testing.assert_close(mine, other)
        mine.pow(3).sum().backward()
        other.pow(3).sum().backward()
        optimizer.step()
        tables.step(0.5, 0.5, 0)
    torch.testing.assert_close(tables.look("table", torch.arange(10)), theirs.weight.detach())


@pytest.mark.parametrize("mode", ["sum", "mean"])
@pytest.mark.parametrize("flat", [False, True], ids=["rows", "offsets"])
def test_bags(mode: str, flat: bool) -> None:
    ours = SparseEmbeddingBag(10, 4, mode=mode, init="normal(1)")
    _, rows = twin(ours)
    theirs = nn.EmbeddingBag(10, 4, mode=mode, _weight=rows)
    arguments = (IDS.reshape(-1), torch.tensor([0, 2, 2])) if flat else (IDS,)
    torch.testing.assert_close(ours(*arguments), theirs(*arguments))


def test_per_sample_weights_of_a_bag() -> None:
    ours = SparseEmbeddingBag(10, 4, mode="sum", init="normal(1)")
    _, rows = twin(ours)
    theirs = nn.EmbeddingBag(10, 4, mode="sum", _weight=rows)
    weights = torch.rand(2, 3)
    torch.testing.assert_close(
        ours(IDS, per_sample_weights=weights), theirs(IDS, per_sample_weights=weights)
    )


def test_padding_gives_zeros_and_learns_nothing() -> None:
    ours = SparseEmbedding(10, 4, padding_idx=3, init="normal(1)")
    tables, rows = twin(ours)
    looked_up = ours(IDS)
    assert (looked_up[IDS == 3] == 0).all()
    looked_up.sum().backward()
    tables.step(0.1, 0.1, 0)
    assert torch.equal(tables.look("table", torch.tensor([3])), rows[3:4])
    bag = SparseEmbeddingBag(10, 4, mode="mean", padding_idx=3, init="normal(1)")
    _, rows = twin(bag)
    torch.testing.assert_close(bag(IDS)[0], rows[1])


def test_without_a_gradient_no_row_is_made() -> None:
    ours = SparseEmbedding(None, 4, init="normal(1)")
    tables = LocalTables.of(ours, seed=5)
    with torch.no_grad():
        before = ours(IDS)
    assert len(tables.stores.store("table").ids()) == 0
    torch.testing.assert_close(ours(IDS), before)
    assert sorted(tables.stores.store("table").ids().tolist()) == [0, 1, 3, 7]


def test_modules_that_share_a_table_sum_their_gradients() -> None:
    table = Table(dim=2, optimizer="sgd", init="zeros")
    model = nn.ModuleDict({"a": SparseEmbedding(table=table), "b": SparseEmbedding(table=table)})
    assert list(tables_of(model)) == ["a"]
    tables = LocalTables.of(model, seed=0)
    one = torch.tensor([4])
    (model["a"](one).sum() + 2 * model["b"](one).sum()).backward()
    tables.step(1.0, 1.0, 0)
    assert tables.look("a", one).tolist() == [[-3.0, -3.0]]


def test_an_unbound_module_works_like_any_module() -> None:
    torch.manual_seed(3)
    assert SparseEmbedding(None, 4)(IDS).shape == (2, 3, 4)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: SparseEmbedding(10), "needs embedding_dim"),
        (lambda: SparseEmbedding(10, 4, table=Table(dim=4)), "give either a table"),
        (lambda: SparseEmbeddingBag(10, 4, mode="max"), "none of sum, mean"),
        (lambda: SparseEmbedding(10, 4)(torch.rand(3)), "whole numbers, and got torch.float32"),
        (lambda: SparseEmbedding(10, 4)(torch.tensor([11])), "11"),
        (lambda: SparseEmbeddingBag(10, 4)(torch.tensor([1, 2])), "flat with offsets"),
    ],
)
def test_invalid_calls_are_refused(make: object, words: str) -> None:
    with pytest.raises(JobError, match=words):
        make()  # type: ignore[operator]


WITHOUT_TABLES = """
import sys
import manyhands.ps.learner, manyhands.worker.loop
from manyhands.compute.train_state import TrainState
from manyhands.testing.jobs import Regression

tables = TrainState.of(Regression(), device="cpu", num_steps=3).tables
tables.step(0.1, 0.1, 100)
tables.stores.evict(100)
assert not tables.specs and not tables.state_dict() and not tables.take()
sys.exit("numba" in sys.modules)
"""


def test_a_run_without_tables_does_not_import_numba() -> None:
    subprocess.run([sys.executable, "-c", WITHOUT_TABLES], check=True, timeout=120)
