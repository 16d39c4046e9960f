"""State that learners keep besides the weights: held by one worker alone, or the same on all of them."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from manyhands.coordinator.handover import receivers
from manyhands.runs.checkpoints import final, steps, verify
from manyhands.runs.folder import RunFolder
from manyhands.runs.saver import learner_states
from manyhands.testing import harness
from manyhands.testing.conformance import EQUAL, assert_once_an_epoch
from manyhands.testing.harness import Finished
from manyhands.testing.jobs import Regression

NUM_SAMPLES = 98

pytestmark = pytest.mark.usefixtures("extra_strategies")


def train(
    members: ModuleType, run: Path, *flags: str, strategy: str, workers: int, **fields: Any
) -> Finished:
    done = members.train(
        *("Regression", run, EQUAL, *flags), strategy=strategy, workers=workers, **fields
    )
    assert done.code == 0, f"{done.out}\n{done.err}\n{harness.logs_of(run)}"
    return done


def resume(members: ModuleType, run: Path, *flags: str) -> Finished:
    done = members.resume(run, *flags)
    assert done.code == 0, f"{done.out}\n{done.err}\n{harness.logs_of(run)}"
    return done


def counts(done: Finished) -> list[int]:
    """Return the counters in the newest checkpoint, one for each worker of that time."""
    manifest = verify(final(done.run, steps(done.run)[-1]))
    states = learner_states(manifest.path, done.state(), range(manifest.states))
    assert len(states) == manifest.workers
    return [state["count"] for state in states]


def samples(done: Finished) -> int:
    return sum(step["samples"] for step in done.steps)


def test_counters_keep_their_sum_on_other_numbers_of_workers(
    members: ModuleType, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    done = train(members, run, "--max-steps", "5", strategy="counted", workers=3)
    assert sum(counts(done)) == samples(done) == 80
    assert len(counts(done)) == 3
    assert all(counts(done))
    fewer = resume(members, run, "--workers", "2", "--max-steps", "5")
    assert sum(counts(fewer)) == samples(fewer)
    assert len(counts(fewer)) == 2
    more = resume(members, run, "--workers", "3")
    assert sum(counts(more)) == samples(more) == 3 * NUM_SAMPLES
    assert len(counts(more)) == 3
    assert_once_an_epoch(more)


def scaled(members: ModuleType, run: Path, *numbers: int, workers: int, epochs: int) -> Finished:
    """Train with counters, and scale the live run to these numbers of workers, one after the other."""
    arguments = harness.train_arguments(
        *("Regression", run, EQUAL, "--max-restarts", "0"),
        strategy="counted",
        workers=workers,
        epochs=epochs,
        pause_s=members.SLOW_S,
    )
    with members.command(*arguments, run=run) as running:
        for number in numbers:
            done_by_then = sum(e["event"] == "StepCommitted" for e in running.events())
            running.wait_for_step(done_by_then + 4)
            RunFolder.open(run).request(number)
            running.wait_for(partial(has_workers, number))
        return running.wait(code=0)


def has_workers(number: int, events: list[dict[str, Any]]) -> bool:
    views = [event for event in events if event["event"] == "ViewChanged"]
    return bool(views) and len(views[-1]["members"]) == number


def used_by(done: Finished, worker: str) -> int:
    """Return how many samples of committed steps this worker has computed."""
    ranges = (span for step in done.steps for span in step["shares"].get(worker, ()))
    return sum(stop - start for start, stop in ranges)


def handed_over(done: Finished) -> list[str]:
    return [e["message"] for e in done.of("Noticed") if "got the state of" in e["message"]]


def test_counters_keep_their_sum_when_workers_leave_and_join(
    members: ModuleType, tmp_path: Path
) -> None:
    done = scaled(members, tmp_path / "run", 2, 3, workers=3, epochs=8)
    assert sum(counts(done)) == samples(done) == 8 * NUM_SAMPLES
    assert len(counts(done)) == 3
    assert used_by(done, "worker-2") > 0
    (note,) = handed_over(done)
    assert note.endswith("got the state of worker-2, which has left")
    receiver = int(note[len("worker-")])
    # The one that got it counts it, too; the one that joined later began at 0.
    own = [used_by(done, f"worker-{number}") for number in (0, 1, 3)]
    own[receiver] += used_by(done, "worker-2")
    assert counts(done) == own
    assert not done.of("MemberLost")
    assert_once_an_epoch(done, epochs=8)


def test_counters_of_all_that_leave_go_to_those_that_stay(
    members: ModuleType, tmp_path: Path
) -> None:
    done = scaled(members, tmp_path / "run", 1, workers=4, epochs=6)
    assert counts(done) == [samples(done)] == [6 * NUM_SAMPLES]
    assert len(handed_over(done)) == 3
    assert not done.of("MemberLost")


@pytest.mark.parametrize("dies", ["worker-2", pytest.param("receiver", marks=pytest.mark.long)])
def test_a_death_in_the_handover_loses_one_counter_and_doubles_none(
    dies: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    victim = dies
    if dies == "receiver":
        victim = receivers(["worker-2"], ["worker-0", "worker-1", "worker-2"], first=1)["worker-2"]
    monkeypatch.setenv("DIES_IN_HANDOVER", victim)
    done = scaled(harness, tmp_path / "run", 2, workers=3, epochs=6)
    assert [lost["member"] for lost in done.of("MemberLost")] == [victim]
    assert len(counts(done)) == 2
    assert used_by(done, victim) > 0
    assert sum(counts(done)) == samples(done) - used_by(done, victim)
    assert not handed_over(done)
    assert_once_an_epoch(done, epochs=6)


def test_other_strategies_leave_what_the_workers_held(members: ModuleType, tmp_path: Path) -> None:
    run = tmp_path / "run"
    train(members, run, "--max-steps", "2", strategy="counted", workers=2)
    other = resume(members, run, "--strategy", "single", "--max-steps", "2")
    note = "single does not use what the workers of counted kept besides the weights"
    assert note in [event["message"] for event in other.of("Noticed")]
    # And back: what it finds now was saved by a strategy without counters.
    back = resume(members, run, "--strategy", "counted", "--workers", "2", "--max-steps", "2")
    assert sum(counts(back)) == 32
    assert len(back.of("Noticed")) == 1


def test_an_evaluation_of_averaged_weights_gives_the_trained_ones_back(
    members: ModuleType, tmp_path: Path
) -> None:
    fields = {"workers": 1, "eval_every": "2 steps", "epochs": 1}
    alone = train(members, tmp_path / "alone", strategy="single", **fields)
    done = train(members, tmp_path / "run", strategy="averaged", **fields)
    assert len(done.of("Evaluated")) == 4
    assert done.losses == pytest.approx(alone.losses, rel=1e-6)
    state = done.state()
    for ours, theirs in zip(state["model"].values(), alone.state()["model"].values(), strict=True):
        torch.testing.assert_close(ours, theirs)
    assert state["learner"]["num_steps"] == 7
    job = Regression()
    model = job.model()
    for parameter, total in zip(model.parameters(), state["learner"]["sums"], strict=True):
        parameter.data.copy_(total / 7)
    inputs, targets = job.eval_data().tensors  # type: ignore[union-attr]
    last = done.of("Evaluated")[-1]
    assert last["step"] == 7
    assert last["metrics"]["loss"] == pytest.approx(
        job.loss(model(inputs), (inputs, targets)).item(), rel=1e-5
    )
    assert last["metrics"]["loss"] != pytest.approx(
        alone.of("Evaluated")[-1]["metrics"]["loss"], rel=1e-3
    )
