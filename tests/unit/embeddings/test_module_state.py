"""Rows as part of a model: state dicts, untrained models, plain torch loops."""

from __future__ import annotations

import copy
import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from manyhands.compute.train_state import TrainState
from manyhands.embeddings.local_tables import LocalTables
from manyhands.embeddings.modules import RowModel, SparseEmbedding, SparseEmbeddingBag
from manyhands.embeddings.spec import Table
from manyhands.errors import CheckpointError, JobError
from manyhands.runs.dense import dense_state, load_dense_state
from manyhands.runs.saver import gather_state, put_state
from manyhands.runs.table_files import SavedTable

IDS = torch.tensor([[3, 1, 3], [-(2**62), 7, 1]])
UNSEEN = torch.tensor([[5, 2**40]])


def model(**options: Any) -> nn.Sequential:
    return nn.Sequential(
        SparseEmbedding(None, 4, init="normal(1)", **options), nn.Flatten(), nn.Linear(12, 1)
    )


def train(trained: nn.Module, ids: Tensor = IDS, steps: int = 3) -> None:
    """Train as with any module, without special calls for tables."""
    parameters = list(trained.parameters())
    optimizer = torch.optim.SGD(parameters, lr=0.1) if parameters else None
    for _ in range(steps):
        trained(ids).square().sum().backward()
        if optimizer is not None:
            optimizer.step()
            optimizer.zero_grad()


def look(trained: nn.Module, ids: Tensor) -> Tensor:
    with torch.no_grad():
        found: Tensor = trained(ids)
    return found


def through_a_file(state: Mapping[str, Any]) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def test_rows_learn_in_a_plain_loop_and_state_dict_restores_them() -> None:
    torch.manual_seed(1)
    ours = model(lr=0.1)
    before = ours[0](IDS).detach().clone()
    train(ours)
    assert not torch.equal(look(ours[0], IDS), before)
    state = through_a_file(ours.state_dict())
    assert state["0.ids"].tolist() == [-(2**62), 1, 3, 7]
    assert state["0.rows"].shape == (4, 4)
    torch.manual_seed(2)
    other = model(lr=0.1)
    assert not other.load_state_dict(state).missing_keys
    for ids in (IDS, torch.cat([UNSEEN, UNSEEN], dim=1)[:, :3]):
        assert torch.equal(look(other, ids), look(ours, ids))
    train(other)  # it goes on
    assert not torch.equal(look(other, IDS), look(ours, IDS))


def test_rows_are_updated_by_the_optimizer_of_the_table() -> None:
    ours = SparseEmbedding(10, 4, optimizer="sgd", lr=0.5, init="normal(1)")
    every = torch.arange(10)
    theirs = nn.Embedding(10, 4, _weight=ours(every).detach().clone())
    optimizer = torch.optim.SGD(theirs.parameters(), lr=0.5)
    for _ in range(3):
        optimizer.zero_grad()
        for module in (ours, theirs):
            module(torch.tensor([3, 1, 3])).pow(3).sum().backward()
        optimizer.step()
    torch.testing.assert_close(look(ours, every), theirs.weight.detach())


def test_rows_without_a_learning_rate_do_not_learn_and_warn() -> None:
    ours = model()
    with pytest.warns(UserWarning, match=r"does not learn.*lr=0\.05"):
        train(ours, steps=1)
    assert look(ours, IDS).shape == (2, 1)


def test_a_state_dict_without_rows_has_missing_keys() -> None:
    ours = model(lr=0.1)
    train(ours)
    state = ours.state_dict()
    for key in ("0.ids", "0.rows"):
        fewer = {name: value for name, value in state.items() if name != key}
        with pytest.raises(RuntimeError, match=rf'Missing key.*"{key}"'):
            model().load_state_dict(fewer)
    dense = dense_state(ours)
    assert list(dense) == ["2.weight", "2.bias"]
    other = model()
    assert other.load_state_dict(dense, strict=False).missing_keys == ["0.ids", "0.rows"]
    with pytest.raises(JobError, match=r"mh\.load"):
        look(other, IDS)  # not one number of it was trained
    with pytest.raises(RuntimeError, match=r'Unexpected key.*"0\.more"'):
        other.load_state_dict({**state, "0.more": state["0.ids"]})


def test_the_dense_state_has_no_rows() -> None:
    ours, other = model(lr=0.1), model(lr=0.1)
    train(ours)
    train(other, IDS + 1)
    rows = other.state_dict()["0.rows"]
    load_dense_state(other, dense_state(ours))
    assert torch.equal(other[2].weight, ours[2].weight)
    assert torch.equal(other.state_dict()["0.rows"], rows)


@pytest.mark.parametrize("make", [SparseEmbedding, SparseEmbeddingBag])
def test_an_untrained_module_refuses_to_return_rows(make: Any) -> None:
    with pytest.raises(JobError, match=r'never trained, loaded.*mh\.load\("runs/NAME"\)'):
        look(make(None, 4), IDS)
    with pytest.raises(JobError, match=r"mh\.load"):
        make(None, 4).eval()(IDS)  # a prediction too, by someone who forgot no_grad
    fresh = make(None, 4)
    fresh.load_state_dict(make(None, 4).state_dict())
    assert look(fresh, IDS).shape[-1] == 4


def test_modules_that_share_a_table_have_the_same_rows_in_the_same_tensors() -> None:
    def two() -> nn.ModuleDict:
        table = Table(dim=2, optimizer="sgd", lr=1.0, init="zeros")
        return nn.ModuleDict(
            {"a": SparseEmbedding(table=table), "b": SparseEmbeddingBag(table=table, mode="sum")}
        )

    ours, one = two(), torch.tensor([[4]])
    (ours["a"](one).sum() + 2 * ours["b"](one).sum()).backward()
    assert look(ours["a"], one).tolist() == [[[-3.0, -3.0]]]
    state = ours.state_dict()
    assert state["a.rows"] is state["b.rows"]
    assert ours.state_dict()["a.rows"] is not state["a.rows"]
    assert ours["b"].state_dict()["rows"].tolist() == [[-3.0, -3.0]]
    other = two()
    other.load_state_dict(through_a_file(state))
    for module in (other, copy.deepcopy(other)):
        assert look(module["b"], one).tolist() == [[-3.0, -3.0]]
        module["a"](one).sum().backward()
        assert look(module["b"], one).tolist() == [[-4.0, -4.0]]
    assert look(other["a"], one).tolist() == [[[-4.0, -4.0]]]  # the copy's rows are its own


def test_the_shared_row_of_a_full_table_is_saved() -> None:
    ours = SparseEmbedding(None, 4, lr=0.1, init="normal(1)", max_bytes="1MiB")
    train(ours, torch.arange(20_000), steps=2)
    state = ours.state_dict()
    assert state["shared"].shape == (1, 4)
    other = SparseEmbedding(None, 4, init="normal(1)", max_bytes="1MiB")
    other.load_state_dict(state)
    last = torch.tensor([10**9])
    assert torch.equal(look(other, last), look(ours, last))
    assert torch.equal(look(ours, last), state["shared"])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"rows": torch.zeros(2, 3)}, r"\[2, 4\], and are torch.float32 of \[2, 3\]"),
        ({"ids": torch.tensor([1, 1])}, "more than once"),
        ({"ids": torch.tensor([1, 99])}, "0 to 9, and are 1 to 99"),
        ({"ids": torch.tensor([0.5, 1])}, "whole numbers"),
        ({"shared": torch.zeros(2, 4)}, r"\[1, 4\]"),
    ],
)
def test_rows_that_do_not_fit_are_refused_by_name(change: dict[str, Tensor], words: str) -> None:
    state = {"ids": torch.tensor([1, 2]), "rows": torch.zeros(2, 4), **change}
    with pytest.raises(RuntimeError, match=words):
        SparseEmbedding(10, 4).load_state_dict(state)


class Counting(RowModel):
    def __init__(self) -> None:
        super().__init__()
        self.tables = {"seen": Table(dim=2, init="zeros"), "twice": Table(dim=1, init="zeros")}

    def ids(self, batch: Any, *, seed: int) -> Mapping[str, Any]:
        return dict.fromkeys(self.tables, batch.numpy())

    def touch(self, batch: Any, rows: Any, *, lr: float, seed: int) -> tuple[float, float]:
        for factor, each in enumerate((rows["seen"], rows["twice"]), start=1):
            np.add.at(each.matrix, each.find(batch.numpy()), factor)
        return 0.0, 1.0


def test_a_model_that_changes_rows_itself_has_them_in_its_state() -> None:
    ours = nn.ModuleDict({"words": Counting()})
    tables = LocalTables.of(ours, seed=1)
    own = {name.removeprefix("words."): rows for name, rows in tables.rows().items()}
    ours["words"].touch(torch.tensor([5, 8, 5]), own, lr=0.1, seed=0)
    state = through_a_file(ours.state_dict())
    assert state["words.seen.ids"].tolist() == [5, 8]
    assert state["words.twice.rows"].tolist() == [[4.0], [2.0]]
    other = nn.ModuleDict({"words": Counting()})
    other.load_state_dict(state)
    again = LocalTables.of(other, seed=7)  # what a training begins with
    assert again is not None
    assert again.look("words.seen", torch.tensor([5, 6])).tolist() == [[2.0, 2.0], [0.0, 0.0]]


def test_training_starts_from_loaded_or_trained_rows() -> None:
    ours = model(lr=0.1)
    train(ours)
    expected = look(ours, IDS), look(ours[0], UNSEEN)
    tables = LocalTables.of(ours, seed=9)
    assert torch.equal(look(ours, IDS), expected[0])
    assert torch.equal(look(ours[0], UNSEEN), expected[1])
    state = tables.state_dict()["0"]["state"]
    assert (state > 0).all()  # adagrad remembers
    tables.stores.share()
    with pytest.raises(JobError, match=r"before  hands\.prepare"):
        ours.load_state_dict(ours.state_dict())


def test_equal_rows_have_equal_fingerprints() -> None:
    first, second = (LocalTables.of(model(lr=0.1), seed=3) for _ in range(2))
    assert first.stores.fingerprint() == second.stores.fingerprint()
    first.pull("0", torch.tensor([1]), torch.tensor([1]))
    assert first.stores.fingerprint() != second.stores.fingerprint()
    second.pull("0", torch.tensor([1]), torch.tensor([1]))
    assert first.stores.fingerprint() == second.stores.fingerprint()


def test_a_checkpoint_stores_rows_once() -> None:
    """In the files of the tables; the state of the model has no second copy."""
    ours = model(lr=0.1)
    tables = LocalTables.of(ours, seed=3)
    train(ours)
    train_state = TrainState(ours, torch.optim.SGD(ours.parameters(), lr=0.1), loss=lambda *_: IDS)
    train_state.tables = tables
    state = gather_state(train_state, {})
    assert list(state["model"]) == ["2.weight", "2.bias"]
    put_state({**state, "tables": {}}, train_state, None, tables=False)


def test_a_process_that_attaches_a_table_does_not_read_its_checkpoint(tmp_path: Path) -> None:
    first, second = (LocalTables.of(model(lr=0.1), seed=3) for _ in range(2))
    second.load_state_dict({"0": SavedTable((tmp_path / "gone.npz",))})
    second.stores.attach(first.stores.share())
    assert second.look("0", torch.tensor([1])).shape == (1, 4)
    first.load_state_dict({"0": SavedTable((tmp_path / "gone.npz",))})
    with pytest.raises(CheckpointError, match=r"does not read: .*gone\.npz"):
        first.look("0", torch.tensor([1]))
