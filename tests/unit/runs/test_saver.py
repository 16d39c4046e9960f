"""Saving and loading: going on from a checkpoint is bit-equal to never having stopped."""

from __future__ import annotations

import copy
import threading
import zlib
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from manyhands.embeddings.local_tables import LocalTables
from manyhands.embeddings.spec import Table
from manyhands.errors import CheckpointError
from manyhands.runs import saver
from manyhands.runs.checkpoints import partial
from manyhands.runs.saver import (
    Saver,
    gather_state,
    learner_states,
    load_state,
    read_state,
    write_state,
)
from manyhands.runs.table_files import INDEX
from manyhands.testing.conformance import assert_same_bits


class Net(nn.Module):
    """With buffers, a tied weight, and a parameter that never gets a gradient."""

    def __init__(self, width: int = 5) -> None:
        super().__init__()
        self.first = nn.Linear(4, width)
        self.norm = nn.BatchNorm1d(width)
        self.last = nn.Linear(width, 4)
        self.twin = self.last
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.twin(torch.tanh(self.norm(self.first(x))))


@dataclass
class Trained:
    model: nn.Module
    optimizer: torch.optim.Optimizer
    scheduler: Any = None
    tables: LocalTables = field(default_factory=lambda: LocalTables({}, seed=0))
    schedule_state: dict[str, Any] = field(default_factory=dict)

    def train(self, first: int, last: int) -> None:
        for step in range(first, last):
            x = torch.randn(6, 4, generator=torch.Generator().manual_seed(step))
            nn.functional.mse_loss(self.model(x), torch.sin(x)).backward()
            self.optimizer.step()
            if self.scheduler is not None:
                self.scheduler.step()
            self.optimizer.zero_grad(set_to_none=True)

    def bits(self) -> list[torch.Tensor]:
        return [value.clone() for value in self.model.state_dict().values()]


class Learner:
    """What a strategy keeps besides."""

    def __init__(self) -> None:
        self.kept: dict[str, Any] = {}

    def restore(self, states: Sequence[dict[str, Any]]) -> None:
        (self.kept,) = states


def groups(net: nn.Module) -> list[dict[str, Any]]:
    biases = [p for name, p in net.named_parameters() if name.endswith("bias")]
    others = [p for name, p in net.named_parameters() if not name.endswith("bias")]
    return [{"params": others, "weight_decay": 0.01}, {"params": biases, "lr": 0.02}]


OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "sgd": lambda net: torch.optim.SGD(net.parameters(), lr=0.05),
    "momentum": lambda net: torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9, nesterov=True),
    "adamw": lambda net: torch.optim.AdamW(net.parameters(), lr=0.01, amsgrad=True),
    "groups": lambda net: torch.optim.AdamW(groups(net), lr=0.01),
    "groups-momentum": lambda net: torch.optim.SGD(groups(net), lr=0.05, momentum=0.9),
}


def sequential(o: torch.optim.Optimizer) -> Any:
    warmup = lr_scheduler.LinearLR(o, 0.1, total_iters=5)
    rest = lr_scheduler.CosineAnnealingLR(o, 20)
    return lr_scheduler.SequentialLR(o, [warmup, rest], milestones=[5])


SCHEDULES: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "none": lambda o: None,
    "multistep": lambda o: lr_scheduler.MultiStepLR(o, [2, 5, 6, 6], gamma=0.5),
    "onecycle": lambda o: lr_scheduler.OneCycleLR(o, max_lr=0.1, total_steps=20),
    "sequential": sequential,
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda step: 1 / (1 + step)),
    "cosine-restarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3, 2),
    "exponential": lambda o: lr_scheduler.ExponentialLR(o, 0.9),
}


def build(optimizer: str = "momentum", schedule: str = "none", *, seed: int = 0) -> Trained:
    torch.manual_seed(seed)
    net = Net()
    chosen = OPTIMIZERS[optimizer](net)
    return Trained(net, chosen, SCHEDULES[schedule](chosen))


CASES = [("groups", name) for name in SCHEDULES]
CASES += [(name, "multistep") for name in OPTIMIZERS if name != "groups"]


@pytest.mark.parametrize(("optimizer", "schedule"), CASES, ids=map("-".join, CASES))
@pytest.mark.parametrize("before", [0, 4])
def test_resuming_is_bit_equal(tmp_path: Path, optimizer: str, schedule: str, before: int) -> None:
    """Saved after no step or some; loaded into what was built from another seed."""
    trained, learner = build(optimizer, schedule), Learner()
    learner.kept = {"residual": torch.arange(3.0), "round": 7}
    trained.train(0, before)
    write_state(tmp_path / "saved", gather_state(trained, learner.kept))
    other, fresh = build(optimizer, schedule, seed=1), Learner()
    state = load_state(tmp_path / "saved", other)
    fresh.restore(learner_states(tmp_path / "saved", state, [0]))
    assert torch.equal(fresh.kept["residual"], torch.arange(3.0))
    assert fresh.kept["round"] == 7
    for step in range(before, before + 5):
        trained.train(step, step + 1)
        other.train(step, step + 1)
        for one, same in zip(trained.bits(), other.bits(), strict=True):
            assert torch.equal(one, same)
        for ours, theirs in zip(
            trained.optimizer.param_groups, other.optimizer.param_groups, strict=True
        ):
            assert ours["lr"] == theirs["lr"]


def test_sizes_and_checksums_match_the_files(tmp_path: Path) -> None:
    folder = tmp_path / "saved"
    files = write_state(folder, gather_state(build(), {}))
    assert set(files) == {path.name for path in folder.iterdir()}
    for name, facts in files.items():
        content = (folder / name).read_bytes()
        assert facts == {"bytes": len(content), "crc32": f"{zlib.crc32(content):08x}"}


@pytest.mark.parametrize("num_changes", [1, 50])
def test_training_continues_while_it_is_written(tmp_path: Path, num_changes: int) -> None:
    """The copy is a copy: of parameters, buffers, and what the optimizer and schedule hold."""
    trained = build("adamw", "sequential")
    trained.train(0, 3)
    expected = copy.deepcopy(gather_state(trained, {}))
    outcomes: list[dict[str, Any]] = []
    saving = Saver(tmp_path, on_done=outcomes.append)
    saving.start(3, trained, {})
    with torch.no_grad():
        for _ in range(num_changes):
            for parameter in [*trained.model.parameters(), *trained.model.buffers()]:
                parameter.fill_(-1)
            for state in trained.optimizer.state.values():
                for value in state.values():
                    value.fill_(9)
    trained.train(3, 5)
    saving.finish()
    assert "error" not in outcomes[0]
    assert_same_bits(read_state(partial(tmp_path, 3)), expected)


def test_any_state_of_a_learner_comes_back_as_it_was(tmp_path: Path) -> None:
    """Numbers as keys, mappings of nothing, lists in lists: also where a tensor is among them."""
    kept = {
        "by_number": {0: torch.arange(2), 7: {"a": torch.ones(1)}, -1: {}},
        "counts": Counter({3: 2}),
        "nothing": {},
        "no_list": [],
        "lists": [[1, [torch.zeros(2), None]], (2, "x")],
        "dotted.name": {"dotted": {"name": 1.5}},
    }
    write_state(tmp_path / "saved", gather_state(build(), kept))
    found = read_state(tmp_path / "saved")["learner"]
    assert_same_bits(found, kept)
    assert type(found["counts"]) is Counter


def test_a_schedule_changed_in_place_afterwards_is_not_what_is_saved() -> None:
    trained = build("momentum", "multistep")
    state = gather_state(trained, {})
    trained.scheduler.milestones.clear()
    assert state["scheduler"]["milestones"] == Counter({6: 2, 2: 1, 5: 1})


def test_one_checkpoint_at_a_time_is_reported_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outcomes: list[dict[str, Any]] = []
    saving = Saver(tmp_path, on_done=outcomes.append)
    saving.finish()
    begin = threading.Event()
    monkeypatch.setattr(saver, "not_finite", lambda *_: begin.wait() and [])
    saving.start(8, build(), {})
    with pytest.raises(AssertionError, match="one checkpoint at a time"):
        saving.start(9, build(), {})
    begin.set()
    saving.finish()
    (outcome,) = outcomes
    assert outcome["step"] == 8
    assert outcome["bytes"] == sum(p.stat().st_size for p in partial(tmp_path, 8).iterdir())
    assert not [t for t in threading.enumerate() if t.name == "saver"]


def test_a_failed_write_is_reported_and_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    for run, says in ((tmp_path / "file", "NotADirectoryError"), (tmp_path, "no space left")):
        if run == tmp_path:  # as on a full disk
            monkeypatch.setattr(saver, "SPARE_BYTES", 1 << 60)
        assert says in saved(run, build())["error"]
        assert not partial(run, 8).exists()


def saved(run: Path, trained: Trained, *, infinite: Collection[str] = ()) -> dict[str, Any]:
    outcomes: list[dict[str, Any]] = []
    saving = Saver(run, on_done=outcomes.append)
    saving.infinite = set(infinite)
    saving.start(8, trained, {})
    saving.finish()
    (outcome,) = outcomes
    return outcome


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_weights_that_are_not_finite_are_not_written(tmp_path: Path, bad: float) -> None:
    trained = build()
    with torch.no_grad():
        trained.model.get_parameter("first.weight")[2, 1] = bad
    assert saved(tmp_path, trained)["not_finite"] == ["first.weight"]
    assert not partial(tmp_path, 8).exists()


def test_deliberate_infinities_are_saved(tmp_path: Path) -> None:
    """As masks are: buffers, parameters that are not trained, and those that had them from the start."""
    trained = build()
    trained.model.register_buffer("mask", torch.full((2,), -torch.inf))
    frozen = nn.Parameter(torch.full((2,), torch.inf), requires_grad=False)
    trained.model.register_parameter("frozen", frozen)
    with torch.no_grad():
        trained.model.get_parameter("unused").fill_(-torch.inf)
    parameters = dict(trained.model.named_parameters())
    given = saver.not_finite(parameters)
    assert given == ["unused", "frozen"]
    assert "error" not in saved(tmp_path, trained, infinite=given)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64, torch.complex64])
def test_every_dtype_is_checked(dtype: torch.dtype) -> None:
    weights = {"empty": torch.zeros(0, dtype=dtype), "good": torch.ones(3, dtype=dtype)}
    assert saver.not_finite({**weights, "whole": torch.ones(3, dtype=torch.int64)}) == []
    weights["bad"] = weights["good"] / 0
    assert saver.not_finite(weights) == ["bad"]


def wider(net: Trained) -> Trained:
    model = Net(width=6)
    return Trained(model, OPTIMIZERS["momentum"](model))


def renamed(net: Trained) -> Trained:
    model = nn.Sequential(Net())
    return Trained(model, OPTIMIZERS["momentum"](model))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (wider, "size mismatch for first.weight"),
        (renamed, "0.first.weight"),
        (lambda _: build("adamw"), "state of SGD, and the job's optimizer is AdamW"),
        (lambda _: build("groups-momentum"), "different number of parameter groups"),
    ],
)
def test_a_state_that_does_not_fit_is_refused(tmp_path: Path, change: Any, says: str) -> None:
    trained = build("momentum")
    trained.train(0, 2)
    write_state(tmp_path / "saved", gather_state(trained, {}))
    with pytest.raises(CheckpointError, match=says) as caught:
        load_state(tmp_path / "saved", change(trained))
    assert str(caught.value).startswith(f"{tmp_path / 'saved'} does not fit this job")
    assert "start a new run" in str(caught.value)


def test_tables_that_the_job_does_not_have_are_refused(tmp_path: Path) -> None:
    with_table = build("momentum")
    with_table.tables = LocalTables({"rows": Table(2)}, seed=0)
    outcome = saved(tmp_path, with_table)
    assert INDEX in outcome["files"]
    with pytest.raises(CheckpointError, match="it has the tables rows, and the job has none"):
        load_state(partial(tmp_path, 8), build("momentum"))


@pytest.mark.parametrize(("saved", "now"), [("none", "multistep"), ("multistep", "none")])
def test_a_schedule_may_be_added_or_removed(tmp_path: Path, saved: str, now: str) -> None:
    trained = build("momentum", saved)
    trained.train(0, 2)
    write_state(tmp_path / "saved", gather_state(trained, {}))
    other = build("momentum", now, seed=1)
    load_state(tmp_path / "saved", other)
    other.train(2, 3)


def test_a_folder_without_checkpoint_does_not_read(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=f"{tmp_path} does not read"):
        read_state(tmp_path)
    (tmp_path / ".metadata").write_bytes(b"garbage")
    with pytest.raises(CheckpointError, match=f"{tmp_path}/.metadata is not what torch writes"):
        read_state(tmp_path)
