"""A model that torch's FSDP2 shards over the workers: uniform work, whole checkpoints, restarts."""

from __future__ import annotations

from pathlib import Path

import pytest

from manyhands.testing import conformance, harness
from manyhands.testing.conformance import EQUAL, Case, Check, assert_once_an_epoch

SHARDED = Case("by-fsdp", workers=2)

pytestmark = pytest.mark.usefixtures("extra_strategies")


@pytest.mark.parametrize(
    "check",
    [
        conformance.equals_single,
        pytest.param(conformance.equals_single_with_own_weights, marks=pytest.mark.long),
        pytest.param(conformance.repeats_and_resumes_bit_equal, marks=pytest.mark.long),
        pytest.param(conformance.survives_a_kill, marks=pytest.mark.long),
        conformance.reports_the_bytes_it_sends,
    ],
    ids=lambda check: check.__name__,
)
def test_conformance(check: Check, tmp_path: Path) -> None:
    check(SHARDED, tmp_path)


@pytest.mark.long
def test_three_workers_with_micro_batches_make_equally_many_forwards(tmp_path: Path) -> None:
    """The last batch has two samples for three workers, and the evaluation 31. Unequal numbers of forwards
    would hang."""
    fields = {"accumulate": 3, "clip_norm": 0.1}
    sharded = Case("by-fsdp", workers=3)
    done = sharded.train("Regression", tmp_path / "run", **fields)
    alone = Case("single", workers=1).train("Regression", tmp_path / "alone", **fields)
    assert_once_an_epoch(done)
    assert done.losses == pytest.approx(alone.losses, rel=1e-5)
    import torch

    ours, theirs = done.state(), alone.state()
    for name, weight in theirs["model"].items():
        torch.testing.assert_close(ours["model"][name], weight, rtol=1e-5, atol=1e-6)
        momentum = theirs["optimizer"]["state"][name]["momentum_buffer"]
        found = ours["optimizer"]["state"][name]["momentum_buffer"]
        torch.testing.assert_close(found, momentum, rtol=1e-4, atol=1e-6)
    for first, second in zip(done.of("Evaluated"), alone.of("Evaluated"), strict=True):
        assert first["samples"] == second["samples"] == 31
        assert first["metrics"] == pytest.approx(second["metrics"], rel=1e-4)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        pytest.param(SHARDED, Case("single", workers=1), marks=pytest.mark.long),
        pytest.param(Case("single", workers=1), Case("by-fsdp", workers=3), marks=pytest.mark.long),
        (Case("by-fsdp", workers=3), Case("allreduce", workers=2)),
    ],
    ids=str,
)
def test_a_checkpoint_is_whole_whatever_the_layout(
    first: Case, second: Case, tmp_path: Path
) -> None:
    conformance.resumes_as(first, second, tmp_path)


DYING = """
import os, signal
from dataclasses import dataclass
from manyhands.testing.jobs import Regression

@dataclass
class Dying(Regression):
    marker: str = ""

    def metrics(self, output, batch):
        self.seen = getattr(self, "seen", 0) + 1
        if self.seen > 10:
            try:
                open(self.marker, "x").close()
            except FileExistsError:
                pass
            else:
                os.kill(os.getpid(), signal.SIGKILL)
        return super().metrics(output, batch)
"""


def test_a_death_in_an_evaluation_is_no_failure_of_the_others(tmp_path: Path) -> None:
    """They wait for it in a forward, outside of the learner."""
    run, job = tmp_path / "run", tmp_path / "job.py"
    job.write_text(DYING)
    fields = {"accumulate": 4, "marker": tmp_path / "died"}
    done = SHARDED.train(str(job), run, EQUAL, **fields)
    assert (tmp_path / "died").exists()
    (resumed,) = done.of("Resumed")
    assert resumed["step"] >= 7
    assert not done.of("MemberFailed")
    assert_once_an_epoch(done)
    alone = Case("single", workers=1).train("Regression", tmp_path / "alone", accumulate=4)
    assert done.losses == pytest.approx(alone.losses, rel=1e-5)


def test_the_costs_and_the_plan_are_checked_before_training(tmp_path: Path) -> None:
    done = harness.train("Regression", tmp_path / "run", "--check", strategy="by-fsdp", workers=2)
    assert done.code == 0, f"{done.out}\n{done.err}"
    assert "SGD" in done.out


def test_tables_are_refused(tmp_path: Path) -> None:
    done = harness.train("Sparse", tmp_path / "run", strategy="by-fsdp", workers=2)
    assert done.code == 2
    assert "samples of weight 0" in done.err
