"""--target ends a start at the first evaluation that reaches it, and measures what that took."""

from __future__ import annotations

import signal
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from manyhands.testing import harness, in_process

FIELDS: dict[str, Any] = {"eval_every": "4 steps", "anneal": False, "lr": 0.005}
SERVED = ("sync", "backup", "ssp", "async", "async(transport=tcp)")
DUE = [4, 8, 12, 16, 20, 21]


def summary(done: harness.Finished) -> dict[str, Any]:
    found = done.of("RunFinished")[-1]["summary"]
    assert isinstance(found, dict)
    return found


@pytest.fixture(scope="module")
def losses(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The loss of each evaluation of a whole training."""
    done = in_process.train("Regression", tmp_path_factory.mktemp("whole") / "run", **FIELDS)
    assert done.code == 0, done.err
    assert summary(done)["steps_to_target"] is None
    found = [event["metrics"]["loss"] for event in done.of("Evaluated")]
    assert [event["step"] for event in done.of("Evaluated")] == DUE
    assert found == sorted(found, reverse=True), "each evaluation has a target of its own"
    return found


def between(losses: list[float], number: int) -> float:
    """A target that the evaluation of this number reaches, and none before."""
    return round((losses[number - 1] + losses[number]) / 2, 5)


# The conformance suite does the same with threads, for every strategy.
@pytest.mark.parametrize(
    "strategy",
    ["single", "allreduce", *(pytest.param(f"ps:{n}", marks=pytest.mark.long) for n in SERVED)],
)
def test_a_target_is_reached_at_the_same_step(
    strategy: str, losses: list[float], members: ModuleType, tmp_path: Path
) -> None:
    target = between(losses, 2)
    workers = 1 if strategy == "single" else 2
    # Longer than the reference: with stale gradients it may take more steps.
    how = {"strategy": strategy, "workers": workers, "epochs": 12, **FIELDS}
    done = members.train("Regression", tmp_path / "run", "--target", f"loss={target}", **how)
    assert done.code == 0, done.err
    (reached,) = done.of("TargetReached")
    evaluated = done.of("Evaluated")
    step = reached["step"]
    if strategy in ("single", "allreduce", "ps:sync"):
        assert step == 12
    assert step == evaluated[-1]["step"] == done.steps[-1]["step"]
    assert [event["metrics"]["loss"] <= target for event in evaluated].index(True) == (
        len(evaluated) - 1
    )
    assert reached["value"] == evaluated[-1]["metrics"]["loss"]
    assert reached["samples"] == sum(event["samples"] for event in done.steps)
    found = summary(done)
    assert (found["outcome"], found["limit"]) == ("target", f"--target loss={target}")
    assert (found["steps_to_target"], found["samples_to_target"]) == (step, reached["samples"])
    assert found["time_to_target_s"] == reached["time_to_target_s"]
    assert found["checkpoint"] == f"checkpoints/step-{step}"
    assert 0 < reached["time_to_target_s"] < found["wall_s"] - reached["startup_s"]
    assert (
        f"target: loss {reached['value']:.4f} reaches {target:g} at step {step}, after" in done.out
    )
    assert f"stopped by --target loss={target} after" in done.out
    assert f"continue with:  manyhands resume {tmp_path / 'run'}\n" in done.out


def test_what_it_takes_adds_up_over_starts(losses: list[float], tmp_path: Path) -> None:
    """A start with a limit, one that is killed, and one that reaches the target."""
    run, target = tmp_path / "run", f"loss={between(losses, 4)}"
    fields = {**FIELDS, "pause_s": 0.05}
    first = harness.train("Regression", run, "--target", target, "--max-steps", "6", **fields)
    assert summary(first)["outcome"] == "limit"
    assert summary(first)["time_to_target_s"] is None
    flags = ("--target", target, "--checkpoint-every", "5", "--device", "cpu")
    with harness.command("resume", str(run), *flags, run=run) as running:
        running.wait_for(lambda events: any(e.get("path") == "checkpoints/step-10" for e in events))
        running.signal(signal.SIGKILL)
        running.wait()
    third = harness.resume(run, "--target", target)
    assert third.code == 0, third.err
    (reached,) = third.of("TargetReached")
    assert (reached["step"], summary(third)["steps_to_target"]) == (20, 20)
    assert reached["samples"] == sum(event["samples"] for event in third.steps)
    assert reached["time_to_target_s"] > 20 * 0.05
    begins = [event["time"] for event in third.of("ViewChanged")]
    assert len(begins) == 3
    counted_s = 0.0
    for begin, step in zip(begins, (6, 10, 20), strict=True):
        after = [e["time"] for e in third.of("StepCommitted") if e["time"] > begin]
        assert after
        counted_s += max(
            e["time"]
            for e in third.of("CheckpointSaved" if step < 20 else "Evaluated")
            if e["time"] > begin and e["step"] == step
        ) - (begin)
    # A checkpoint has the time at which it was copied, which is before it was written.
    assert 0.6 * counted_s < reached["time_to_target_s"] < counted_s
    again = harness.resume(run, "--target", target)
    assert again.code == 2
    assert "up to step 20 has reached" in again.err
    assert "leave --target out to train on" in again.err
    last = harness.resume(run)  # a target is one of a start
    assert (summary(last)["outcome"], summary(last)["steps"]) == ("finished", 21)
    assert summary(last)["steps_to_target"] is None


def test_a_target_survives_a_restart_of_all_members(
    losses: list[float], members: ModuleType, tmp_path: Path
) -> None:
    run, target = tmp_path / "run", f"loss={between(losses, 3)}"
    flags = ("--target", target, "--checkpoint-every", "3")
    arguments = harness.train_arguments("Regression", run, *flags, **FIELDS, pause_s=members.SLOW_S)
    with members.command(*arguments, run=run) as running:
        running.wait_for_step(6)
        running.kill("worker-0")
        done = running.wait(code=0)
    assert done.of("Resumed")
    (reached,) = done.of("TargetReached")
    assert (reached["step"], summary(done)["outcome"]) == (16, "target")
    (began, *_) = done.of("ViewChanged")
    assert reached["time_to_target_s"] == pytest.approx(
        reached["time"] - began["time"] - reached["evaluation_s"], abs=0.5
    ), "the restart counts"


@pytest.mark.parametrize(
    "strategy",
    ["allreduce", *(pytest.param(f"ps:{n}", marks=pytest.mark.long) for n in SERVED)],
)
def test_a_target_is_reached_after_a_death(
    strategy: str, losses: list[float], members: ModuleType, tmp_path: Path
) -> None:
    run, target = tmp_path / "run", between(losses, 3)
    # Longer than the reference: with stale gradients it may take more steps.
    how = {"strategy": strategy, "workers": 3, "pause_s": members.SLOW_S, "epochs": 12, **FIELDS}
    arguments = harness.train_arguments("Regression", run, "--target", f"loss={target}", **how)
    with members.command(*arguments, run=run) as running:
        running.wait_for_step(5)
        running.kill("worker-2")
        done = running.wait(code=0)
    assert done.of("MemberLost")
    (reached,) = done.of("TargetReached")
    assert summary(done)["outcome"] == "target"
    assert reached["step"] == done.of("Evaluated")[-1]["step"] == done.steps[-1]["step"]
    if strategy in ("allreduce", "ps:sync"):
        assert reached["step"] == 16
    assert reached["samples"] == sum(event["samples"] for event in done.steps)
    recovered_s = sum(event["seconds"] for event in done.of("Recovered"))
    assert reached["time_to_target_s"] > recovered_s, "recoveries count"


def test_a_target_of_the_last_evaluation_is_the_end(
    losses: list[float], members: ModuleType, tmp_path: Path
) -> None:
    flags = ("--target", f"loss={between(losses, 5)}")
    done = members.train("Regression", tmp_path / "run", *flags, **FIELDS)
    found = summary(done)
    assert (found["outcome"], found["limit"], found["steps_to_target"]) == ("finished", None, 21)
    missed = members.train("Regression", tmp_path / "other", "--target", "loss=0", **FIELDS)
    assert (missed.code, summary(missed)["outcome"]) == (0, "finished")
    assert "  target      loss=0 was not reached\n" in missed.out


@pytest.mark.parametrize(
    ("target", "fields", "says"),
    [
        ("loss", {}, '--target loss: it must be METRIC=NUMBER, such as accuracy=0.97 or "min per'),
        ("loss=nan", {}, "--target loss=nan: it must be METRIC=NUMBER"),
        ("losss=1", {}, "--target losss=1: the evaluation gives loss, worst; did you mean 'loss'?"),
        ("loss=1", {"evaluates": False}, "--target loss=1 needs evaluations, and eval_data() ret"),
        ("worst=1", {}, '--target "worst=1": the name does not show whether lower or higher is be'),
    ],
)
def test_wrong_targets(
    target: str, fields: dict[str, Any], says: str, members: ModuleType, tmp_path: Path
) -> None:
    done = members.train("Regression", tmp_path / "run", "--target", target, **fields)
    assert done.code == 2
    assert says in done.err
    assert not (tmp_path / "run").exists()
