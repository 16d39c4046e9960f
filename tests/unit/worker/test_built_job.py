"""Which states of a checkpoint go to which worker, and which fit another strategy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest

from manyhands.contract import Context, Joined, Learner, State, StepReport, Strategy, Traits
from manyhands.control.messages import Assignment
from manyhands.errors import CheckpointError
from manyhands.runs.checkpoints import commit, partial
from manyhands.runs.saver import gather_state, write_state
from manyhands.strategies.registry import STRATEGIES
from manyhands.testing import jobs
from manyhands.worker.built_job import BuiltJob

JOB = f"{jobs.__file__}:Regression"


@dataclass(frozen=True)
class Shared(Strategy):
    name: ClassVar[str] = "shared"

    def build(self, context: Context) -> Learner:
        raise NotImplementedError


@dataclass(frozen=True)
class Held(Shared):
    name: ClassVar[str] = "held"

    @property
    def traits(self) -> Traits:
        return Traits(holds_state=True)


class Restored(Learner):
    def __init__(self) -> None:
        self.states: list[State] = []

    def on_view(self, view: Any) -> Joined:
        raise NotImplementedError

    def step(self, share: Any) -> StepReport:
        raise NotImplementedError

    def restore(self, states: Sequence[State]) -> None:
        assert states, "there is nothing to take over"
        self.states += [state["name"] for state in states]


@pytest.fixture(autouse=True)
def strategies(monkeypatch: pytest.MonkeyPatch) -> None:
    for strategy in (Shared, Held):
        monkeypatch.setitem(STRATEGIES, strategy.name, strategy)


def saved(run: Path, *states: State, spec: str, holds_state: bool) -> str:
    """A checkpoint to which as many workers have written as there are states."""
    writers = [f"worker-{rank}" for rank in range(len(states))]
    built = BuiltJob(Assignment(JOB, {}, spec, "cpu", str(run)), device="cpu")
    built.build()
    files = [
        write_state(
            partial(run, 3, writer), gather_state(None if rank else built.train_state, state)
        )
        for rank, (writer, state) in enumerate(zip(writers, states, strict=True))
    ]
    folder = commit(
        *(run, 3),
        files=files,
        training_plan={},
        strategy=spec,
        workers=len(writers),
        writers=writers,
        holds_state=holds_state,
    )
    return str(folder)


def restored(folder: str, spec: str, takes: tuple[int, int]) -> tuple[list[State], list[str]]:
    """What a worker takes over, and its notes."""
    assignment = Assignment(JOB, {}, spec, "cpu", "", checkpoint=folder, takes=takes)
    built, learner = BuiltJob(assignment, device="cpu"), Restored()
    built.build(learner)
    built.build(learner)  # as in a second view: the learner has its states
    assert built.facts is not None
    return learner.states, built.facts.notes


@pytest.mark.parametrize(
    ("workers", "expected"),
    [
        (1, [["a", "b", "c"]]),
        (2, [["a", "c"], ["b"]]),
        (3, [["a"], ["b"], ["c"]]),
        (4, [["a"], ["b"], ["c"], []]),
    ],
)
def test_each_held_state_goes_to_one_worker(
    tmp_path: Path, workers: int, expected: list[list[str]]
) -> None:
    states = ({"name": name} for name in "abc")
    folder = saved(tmp_path, *states, spec="held", holds_state=True)
    found = [restored(folder, "held", (rank, workers)) for rank in range(workers)]
    assert found == [(states, []) for states in expected]


def test_workers_without_a_state_leave_none(tmp_path: Path) -> None:
    folder = saved(tmp_path, {}, {"name": "b"}, spec="held", holds_state=True)
    assert restored(folder, "held", (0, 1)) == (["b"], [])


def test_a_shared_state_goes_to_every_worker(tmp_path: Path) -> None:
    folder = saved(tmp_path, {"name": "a"}, spec="shared", holds_state=False)
    for rank in range(2):
        assert restored(folder, "shared", (rank, 2)) == (["a"], [])


@pytest.mark.parametrize(
    ("before", "states", "after"),
    [
        ("held", [{}, {"name": "b"}], "shared"),
        ("held", [{"name": "a"}], "allreduce(bucket_mb=3)"),
        ("shared", [{"name": "a"}], "held"),
    ],
)
def test_states_of_another_strategy_are_left_with_a_note(
    tmp_path: Path, before: str, states: list[State], after: str
) -> None:
    folder = saved(tmp_path, *states, spec=before, holds_state=before == "held")
    note = f"{after} does not use what the workers of {before} kept besides the weights"
    assert restored(folder, after, (0, 1)) == ([], [note])


def test_where_nothing_was_kept_another_strategy_takes_over_in_silence(tmp_path: Path) -> None:
    folder = saved(tmp_path, {}, spec="shared", holds_state=False)
    assert restored(folder, "held", (0, 1)) == ([], [])


def test_a_state_that_does_not_fit_is_named(tmp_path: Path) -> None:
    folder = saved(tmp_path, {"other": 1}, spec="held", holds_state=True)
    with pytest.raises(CheckpointError, match=r"was saved by held and does not fit held: 'name'"):
        restored(folder, "held", (0, 1))
