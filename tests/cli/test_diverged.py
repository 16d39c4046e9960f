"""Runs whose loss or weights are no longer finite."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest

from manyhands.runs import checkpoints

pytestmark = pytest.mark.slow

JOB = '''
from dataclasses import dataclass
import torch
from manyhands.testing.jobs import Regression

@dataclass
class Breaking(Regression):
    """A job whose loss is NaN from a given batch of a worker on; with one worker, from that step on."""
    bad_from: int = 15
    epochs: int = 20

    def loss(self, output, batch):
        loss = super().loss(output, batch)
        if torch.is_grad_enabled():
            self.calls = getattr(self, "calls", 0) + 1
            if self.calls >= self.bad_from:
                return loss * torch.nan
        return loss
'''


@pytest.fixture
def job(tmp_path: Path) -> Path:
    path = tmp_path / "breaking.py"
    path.write_text(JOB)
    return path


def test_a_run_without_a_finite_loss_ends_as_diverged_and_resumes_from_the_last_good_checkpoint(
    job: Path, members: ModuleType, tmp_path: Path
) -> None:
    done = members.train(job, tmp_path / "run", "--checkpoint-every", "5", "--max-bad-steps", "12")
    assert done.code == 65, done.err
    assert "no finite loss since step 15 (12 steps)" in done.err
    run, summary = done.run, done.of("RunFinished")[0]["summary"]
    assert summary["outcome"] == "diverged"
    # Step 14 is an epoch's end: the last one before the first bad step.
    assert checkpoints.steps(run)[-1] == 14
    assert summary["checkpoint"] == "checkpoints/step-14"
    assert summary["best_metrics"]["step"] in checkpoints.steps(run)
    notes = [e["message"] for e in done.of("Noticed") if "not finite" in e["message"]]
    assert len(notes) == 1
    assert "The weights of step 15 are not finite" in notes[0]
    assert f"manyhands resume {run} --set lr=0.005" in done.out

    again = members.resume(run, "--set", "bad_from=100000", "--set", "epochs=3")
    assert again.code == 0, again.err
    assert again.of("Resumed")[-1]["checkpoint"] == "checkpoints/step-14"
    assert checkpoints.steps(run)[-1] == 21
    options = (run / "config.json").read_text()
    assert '"max_bad_steps"' in options


@pytest.mark.parametrize("strategy", ["allreduce", "ps:async"])
def test_every_strategy_diverges(
    strategy: str, job: Path, members: ModuleType, tmp_path: Path
) -> None:
    done = members.train(
        job, tmp_path / "run", "--max-bad-steps", "4", strategy=strategy, workers=2
    )
    assert done.code == 65, done.err
    assert "no finite loss since step " in done.err
    state = done.state()["model"]
    assert all(tensor.isfinite().all() for tensor in state.values())


def test_a_run_that_ends_without_finite_weights_is_not_finished(
    job: Path, members: ModuleType, tmp_path: Path
) -> None:
    done = members.train(job, tmp_path / "run", "--max-bad-steps", "0", bad_from=3, epochs=4)
    assert done.code == 65, done.err
    assert "weights of step 28 are not finite: no finite loss since step 3 (26 steps)" in done.err
    assert len(done.steps) == 28
    assert checkpoints.steps(done.run) == []
    assert "Nothing good was saved" in done.out
    assert "manyhands resume" not in done.out
