"""--init-from: which checkpoint it selects, and when it applies."""

from __future__ import annotations

from pathlib import Path

import pytest

from manyhands.api.init_from import find_weights, note, noted
from manyhands.coordinator.options import RunOptions
from manyhands.errors import UsageError
from manyhands.runs.checkpoints import commit, final, partial
from manyhands.runs.folder import RunFolder
from manyhands.strategies.single import Single


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    """A run with the checkpoints of steps 3, 6 (the best) and 9."""
    run = RunFolder.create("first", path=tmp_path / "a:b")
    run.write_config({})
    for step in (3, 6, 9):
        partial(run.path, step).mkdir()
        best = {"metrics": {"loss": 0.5}, "step": min(step, 6)}
        commit(
            run.path, step, files=[{}], training_plan={"best": best}, strategy="single", workers=1
        )
    return run


@pytest.mark.parametrize(("which", "step"), [("", 6), (":best", 6), (":last", 9), (":3", 3)])
def test_a_run_and_a_step(run: RunFolder, which: str, step: int) -> None:
    assert find_weights(f"{run.path}{which}").step == step


@pytest.mark.parametrize(
    ("which", "words"),
    [(":4", "steps 3, 6, 9"), (":newest", "There is no run"), ("/x", "--init-from .*/x:last")],
)
def test_missing_runs_and_steps_are_refused(run: RunFolder, which: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        find_weights(f"{run.path}{which}")


def test_a_resumed_run_prefers_its_own_weights(run: RunFolder) -> None:
    weights = find_weights(str(run.path))
    config = {"init_from": note(weights)}
    assert noted({}) is None
    options = RunOptions("job.py", "single", 1, Single(), init_from=noted(config))
    assert options.assignment(run.path, None).init_from == str(weights.path)
    assert options.assignment(run.path, final(run.path, 3)).init_from is None
    (weights.path / "manifest.json").unlink()
    with pytest.raises(UsageError, match="no checkpoint yet, and the weights that it started with"):
        noted(config)
