"""Every strategy keeps what the conformance suite asks, with threads for processes: seconds for all of it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from manyhands.runs.checkpoints import final, steps, verify
from manyhands.runs.saver import learner_states
from manyhands.strategies.registry import STRATEGIES
from manyhands.testing import harness, in_process, suite
from manyhands.testing.conformance import (
    EQUAL,
    PAIRS,
    Case,
    Check,
    assert_once_an_epoch,
    checks_for,
    dies_in_the_exchange,
    ends_and_evaluates_in_steps,
    equals_single,
    equals_single_with_own_weights,
    evaluates_without_a_trace,
    first_worker_dies,
    learns,
    repeats_and_resumes_bit_equal,
    survives_a_kill,
    workers_join_and_leave,
)
from manyhands.testing.harness import Finished

CASES = [
    Case(strategy, workers=workers, in_process=True)
    for strategy, workers in [
        ("single", 1),
        ("allreduce", 2),
        ("allreduce", 4),
        ("allreduce + int8", 3),
        ("local(every=3)", 2),
        ("local(every=4)", 3),
        ("local(every=4,moments=average)", 3),
        ("ps:sync", 2),
        ("ps:sync(transport=tcp)", 3),
        ("ps:sync(placement=dedicated)", 2),
        ("ps:async(transport=shm)", 3),
        ("ps:async(transport=tcp)", 2),
        ("ps:ssp", 3),
        ("ps:backup", 3),
    ]
] + [
    # Momentum begins anew in each round: 0.92.
    Case("local(every=4,moments=reset)", workers=3, in_process=True, accuracy=0.9),
]


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    with in_process.folder_in_memory() as folder:
        yield folder


@pytest.mark.parametrize(
    ("case", "check"),
    [
        pytest.param(case, check, id=f"{check.__name__}-{case}")
        for case in CASES
        for check in checks_for(case)
        if check not in PAIRS.values() or case.workers > 3  # those are in test_pairs_in_process.py
    ],
)
def test_conformance(case: Case, check: Check, tmp_path: Path) -> None:
    check(case, tmp_path)


@pytest.mark.usefixtures("extra_strategies")
@pytest.mark.parametrize(
    "check",
    [
        equals_single,
        repeats_and_resumes_bit_equal,
        workers_join_and_leave,
        dies_in_the_exchange,
        first_worker_dies,
    ],
    ids=lambda check: check.__name__,
)
def test_replicas_of_two_workers(check: Check, tmp_path: Path) -> None:
    check(Case("paired", workers=4, in_process=True), tmp_path)


@pytest.mark.usefixtures("extra_strategies")
def test_a_strategy_that_never_updates_does_not_learn(tmp_path: Path) -> None:
    """Everything else looks right."""
    case = Case("unmoved", workers=2, in_process=True)
    for check in (
        equals_single,
        repeats_and_resumes_bit_equal,
        survives_a_kill,
        ends_and_evaluates_in_steps,
        evaluates_without_a_trace,
    ):
        (folder := tmp_path / check.__name__).mkdir()
        check(case, folder)
    with pytest.raises(AssertionError, match=r"0\.\d+ of the digits, not 0\.93"):
        learns(case, tmp_path / "learns")


def test_a_death_that_never_comes_fails_the_check(tmp_path: Path) -> None:
    """A worker alone exchanges nothing."""
    with pytest.raises(AssertionError, match="worker-0 did not die: exchange"):
        dies_in_the_exchange(Case("single", workers=1, in_process=True), tmp_path)


@pytest.mark.usefixtures("extra_strategies")
def test_the_suite_reports_what_fails(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    unmoved = STRATEGIES["unmoved"]
    monkeypatch.delitem(STRATEGIES, unmoved.name)  # it need not be there
    monkeypatch.setattr(suite, "checks_of", lambda case: [equals_single, learns])
    with pytest.raises(AssertionError, match="learns on 2 workers"):
        suite.check_strategy(unmoved, workers=[2])
    first, second, last = capsys.readouterr().out.splitlines()
    assert first.startswith("equals_single")
    assert "passed" in first
    assert second.startswith("learns")
    assert "FAILED" in second
    assert last.startswith("unmoved: 1 of 2 checks passed")
    assert unmoved.name not in STRATEGIES


def counts(done: Finished) -> list[int]:
    """The counters in the newest checkpoint, one for each worker of that time."""
    manifest = verify(final(done.run, steps(done.run)[-1]))
    states = learner_states(manifest.path, done.state(), range(manifest.states))
    return [state["count"] for state in states]


@pytest.mark.usefixtures("extra_strategies")
def test_counters_keep_their_sum_on_other_numbers_of_workers(tmp_path: Path) -> None:
    """State that a worker holds alone: stopped, and resumed on fewer and on more workers."""
    case, run = Case("counted", workers=3, in_process=True), tmp_path
    done = case.train("Regression", run / "run", EQUAL, "--max-steps", "5")
    assert len(counts(done)) == 3
    assert sum(counts(done)) == 5 * 16
    for workers, flags in ((2, ("--max-steps", "5")), (4, ())):
        done = case.resume(run / "run", "--workers", str(workers), *flags)
        assert len(counts(done)) == workers
        assert sum(counts(done)) == sum(step["samples"] for step in done.steps)
    assert sum(counts(done)) == 3 * 98
    assert_once_an_epoch(done)


def test_one_run_prints_into_its_result(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """And a wrong command ends as on the command line."""
    run = tmp_path / "run"
    wrong = harness.train_arguments("Regression", run, strategy="single", workers=2)
    with in_process.command(*wrong, run=run) as running:
        done = running.wait(code=2)
    assert "single" in done.err
    assert "allreduce" in done.err
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("check", [equals_single, equals_single_with_own_weights])
@pytest.mark.parametrize("moments", ["keep", "average", "reset"])
def test_an_average_of_weights_in_each_step_is_the_global_step(
    check: Check, moments: str, tmp_path: Path
) -> None:
    """With plain SGD. The last batch of an epoch has fewer samples than there are workers."""
    plain = {"optim": "sgd", "anneal": False, "clip_norm": "none", "lr": 0.05}
    strategy = f"local(every=1,moments={moments})"
    check(Case(strategy, 3, fields=plain, in_process=True, same_as_single=True), tmp_path)
