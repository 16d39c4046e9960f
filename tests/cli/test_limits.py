"""--max-steps and --max-time end a start early: exit 0, a checkpoint, and the same training afterwards."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from manyhands.testing import harness
from manyhands.testing.conformance import EQUAL, assert_same_bits

FIELDS: dict[str, Any] = {"strategy": "allreduce", "workers": 2, "eval_every": "4 steps"}


def summary(done: harness.Finished) -> dict[str, Any]:
    found = done.of("RunFinished")[-1]["summary"]
    assert isinstance(found, dict)
    return found


def test_a_training_in_slices_is_the_training_in_one_piece(
    members: ModuleType, tmp_path: Path
) -> None:
    whole = members.train("Dropout", tmp_path / "whole", EQUAL, **FIELDS)
    assert whole.code == 0, whole.err
    run = tmp_path / "run"
    first = members.train("Dropout", run, EQUAL, "--max-steps", "8", **FIELDS)
    assert first.code == 0, first.err
    assert (summary(first)["outcome"], summary(first)["limit"]) == ("limit", "--max-steps 8")
    assert summary(first)["steps"] == 8
    assert summary(first)["checkpoint"] == "checkpoints/step-8"
    assert "stopped by --max-steps 8 after" in first.out
    assert f"continue with:  manyhands resume {run}\n" in first.out
    assert [event["step"] for event in first.of("Evaluated")] == [4, 8]
    # A limit is one of this start: the next one has its own, or none.
    second = members.resume(run, "--max-steps", "9")
    assert second.code == 0, second.err
    assert (summary(second)["outcome"], summary(second)["steps"]) == ("limit", 17)
    third = members.resume(run)
    assert third.code == 0, third.err
    assert (summary(third)["outcome"], summary(third)["limit"]) == ("finished", None)
    assert third.losses == whole.losses
    assert_same_bits(third.state(), whole.state())
    assert [event["step"] for event in third.of("Evaluated")] == [4, 8, 12, 16, 20, 21]
    assert "is already finished" in members.resume(run).out


def test_a_limit_at_the_end_is_the_end(members: ModuleType, tmp_path: Path) -> None:
    done = members.train("Regression", tmp_path / "run", "--max-steps", "21")
    assert (done.code, summary(done)["outcome"]) == (0, "finished")


def test_a_limit_of_steps_holds_when_all_members_restart(
    members: ModuleType, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    flags = ("--max-steps", "12", "--checkpoint-every", "3")
    arguments = harness.train_arguments("Regression", run, *flags, pause_s=members.SLOW_S)
    with members.command(*arguments, run=run) as running:
        running.wait_for_step(6)
        running.kill("worker-0")
        done = running.wait(code=0)
    assert done.of("Resumed")
    assert (summary(done)["outcome"], summary(done)["steps"]) == ("limit", 12)


def test_a_limit_of_time_stops_and_saves(members: ModuleType, tmp_path: Path) -> None:
    run = tmp_path / "run"
    fields = {**FIELDS, "epochs": 100_000, "pause_s": 0.02}
    done = members.train("Regression", run, "--max-time", "500ms", **fields)
    assert done.code == 0, done.err
    found = summary(done)
    assert (found["outcome"], found["limit"]) == ("limit", "--max-time 500ms")
    assert "stopping: --max-time 500ms; saving a checkpoint" in done.out
    assert found["checkpoint"] == f"checkpoints/step-{found['steps']}"
    resumed = members.resume(run, "--max-steps", "3")
    assert summary(resumed)["steps"] == found["steps"] + 3


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (("--max-steps", "0"), "--max-steps 0: it must be at least 1."),
        (("--max-steps", "many"), "--max-steps many: it must be a whole number."),
        (
            ("--max-time", "10"),
            "--max-time 10: it must be a time with its unit, such as 90s, 10m or 1h30m.",
        ),
    ],
)
def test_wrong_limits(flags: tuple[str, ...], says: str, tmp_path: Path) -> None:
    done = harness.train("Regression", tmp_path / "run", *flags)
    assert done.code == 2
    assert says in done.err
    assert not (tmp_path / "run").exists()
