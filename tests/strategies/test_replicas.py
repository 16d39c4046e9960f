"""Two workers in each replica: the same samples and random numbers for both, whole replicas in each view."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest

from manyhands.testing import conformance, harness
from manyhands.testing.conformance import EQUAL, Case, Check, assert_once_an_epoch
from manyhands.testing.harness import Finished

PAIRED = Case("paired", workers=4)

pytestmark = pytest.mark.usefixtures("extra_strategies")


def scale(run: Path, workers: int, *, code: int) -> Finished:
    with harness.command("scale", str(run), "--workers", str(workers), run=run) as asked:
        return asked.wait(code=code)


def test_a_kill_of_a_process(tmp_path: Path) -> None:
    conformance.survives_a_kill(PAIRED, tmp_path)


@pytest.mark.parametrize(
    "check",
    [
        conformance.equals_single_with_accumulation,
        conformance.equals_single_with_own_weights,
        conformance.repeats_and_resumes_bit_equal,
        conformance.begins_again,
        conformance.counts_every_sample_once,
        conformance.ends_and_evaluates_in_steps,
    ],
    ids=lambda c: c.__name__,
)
def test_conformance_with_threads(check: Check, tmp_path: Path) -> None:
    check(Case("paired", workers=4, in_process=True), tmp_path)


@pytest.mark.long
def test_a_step_counts_once_per_replica(tmp_path: Path) -> None:
    run = tmp_path / "run"
    done = Case("paired(transport=tcp)", workers=4).train("Tokens", run, EQUAL)
    (view,) = done.of("ViewChanged")
    assert view["replica_size"] == 2
    for step in done.steps:
        assert set(step["shares"]) <= {"worker-0", "worker-2"}
        assert step["measures"] == {"double": pytest.approx(2 * step["loss"], rel=1e-5)}
    alone = Case("single", workers=1).train("Tokens", tmp_path / "alone")
    assert done.losses == pytest.approx(alone.losses, rel=1e-5)
    pairs = Case("allreduce(transport=tcp)", workers=4).train(
        "Tokens", tmp_path / "allreduce", EQUAL
    )
    ours, theirs = (sum(s["bytes_sent"] for s in run.steps) for run in (done, pairs))
    assert theirs < ours < 1.3 * theirs, "those of all four workers, and what pairs compare"


def test_a_worker_that_is_left_over_stands_by_until_there_is_another(
    members: ModuleType, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    arguments = PAIRED.arguments("Regression", run, pause_s=members.SLOW_S, epochs=8)
    with members.command(*arguments, run=run) as running:
        running.wait_for_step(4)
        running.kill("worker-0")
        done = running.wait(code=0)
    views = [(view["members"], view["standby"]) for view in done.of("ViewChanged")]
    assert views == [
        (["worker-0", "worker-1", "worker-2", "worker-3"], []),
        (["worker-2", "worker-3"], ["worker-1"]),
        (["worker-2", "worker-3", "worker-1", "worker-4"], []),
    ]
    assert "worker-1 stands by: a replica has 2 workers, and 3 are left" in done.err + done.out
    assert_once_an_epoch(done, epochs=8)
    assert {name for step in done.steps[-3:] for name in step["shares"]} == {"worker-2", "worker-1"}
    alone = Case("single", workers=1).train("Regression", tmp_path / "alone", epochs=8)
    assert done.losses[-1] == pytest.approx(alone.losses[-1], rel=1e-5)


def test_a_run_is_resized_by_whole_replicas(members: ModuleType, tmp_path: Path) -> None:
    run = tmp_path / "run"
    arguments = PAIRED.arguments("Regression", run, pause_s=members.SLOW_S, epochs=8)
    with members.command(*arguments, run=run) as running:
        running.wait_for_step(3)
        assert "paired trains with whole replicas of 2 workers" in scale(run, 3, code=2).err
        scale(run, 2, code=0)
        done = running.wait(code=0)
    last = done.of("ViewChanged")[-1]
    assert (last["members"], last["standby"]) == (["worker-0", "worker-1"], [])
    assert not done.of("MemberLost")
    assert_once_an_epoch(done, epochs=8)


def test_a_number_of_workers_that_makes_no_whole_replicas_is_refused(tmp_path: Path) -> None:
    done = harness.train("Regression", tmp_path / "run", strategy="paired", workers=3)
    assert done.code == 2
    assert "--workers 3: paired trains with whole replicas of 2 workers" in done.err
    assert "--workers 2" in done.err
