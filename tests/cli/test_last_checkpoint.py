"""A failure while a checkpoint is being written: it is finished, and the summary names what is on disk."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from manyhands.runs import checkpoints
from manyhands.testing.harness import command, gone, train, train_arguments

pytestmark = pytest.mark.slow

JOB = '''
import os
from dataclasses import dataclass
import torch
from torch import nn
from manyhands.testing.jobs import Regression

@dataclass
class Failing(Regression):
    """A job with 160 MB to save, which raises in the first step after saving began."""
    who: str = "worker-0"
    epochs: int = 5

    def model(self):
        model = super().model()
        model.register_parameter("frozen", nn.Parameter(torch.ones(40_000_000), requires_grad=False))
        return model

    def loss(self, output, batch):
        if torch.is_grad_enabled():
            self.calls = getattr(self, "calls", 0) + 1
            log = os.path.basename(os.readlink("/proc/self/fd/1"))
            if self.calls == 8 and log == f"{self.who}.log":
                raise ValueError("the eighth batch")
        return super().loss(output, batch)
'''


@pytest.mark.parametrize(
    ("strategy", "workers", "who"), [("single", 1, "worker-0"), ("allreduce", 2, "worker-1")]
)
def test_a_checkpoint_in_progress_is_finished(
    strategy: str, workers: int, who: str, tmp_path: Path
) -> None:
    job = tmp_path / "failing.py"
    job.write_text(JOB)
    done = train(job, tmp_path / "run", strategy=strategy, workers=workers, who=who)
    assert done.code == 1, done.err
    assert "ValueError: the eighth batch" in done.err
    assert checkpoints.steps(done.run) == [7]
    summary = done.of("RunFinished")[0]["summary"]
    assert summary["best_metrics"]["step"] == 7
    assert summary["checkpoint"] == "checkpoints/step-7"
    assert not list((done.run / "checkpoints").glob(".*"))
    assert f"manyhands resume {done.run}" in done.out


def test_resume_is_not_offered_after_a_failure_that_would_repeat(tmp_path: Path) -> None:
    job = tmp_path / "failing.py"
    job.write_text(JOB.replace("self.calls == 8", "self.calls == 1").replace("40_000_000", "4"))
    done = train(job, tmp_path / "run")
    assert done.code == 1, done.err
    assert "ValueError: the eighth batch" in done.err
    assert f"it would fail again. Correct {job}, then train again." in done.out
    assert "manyhands resume" not in done.out
    assert done.of("RunFinished")[0]["resume_command"] is None


def test_a_deleted_run_folder_ends_the_run(tmp_path: Path) -> None:
    run = tmp_path / "run"
    given = train_arguments("Regression", run, epochs=100_000, pause_s=0.01)
    with command(*given, run=run) as running:
        running.wait_for_step(3)
        pids = list(running.pids().values())
        run.rename(tmp_path / "moved")
        shutil.rmtree(tmp_path / "moved", ignore_errors=True)
        done = running.wait(60)
    assert done.code == 1
    assert f"error: The run folder {run} was deleted or moved" in done.err
    assert gone(pids)
    assert not run.exists()
