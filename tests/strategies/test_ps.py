"""Parameter servers that do not wait for everybody: what they learn, and what a slow worker does to them.

The times of a slow worker are in benchmarks/stragglers.py. Here its steps are counted: each worker of
the job `Straggling` writes a line into a diary when it begins to compute.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

import pytest

from manyhands.testing import harness
from manyhands.testing.conformance import assert_once_an_epoch
from manyhands.testing.counting import COUNTING, check_counts

ROOT = Path(__file__).parents[2]
WITHOUT_WAITING = ["ps:async", "ps:ssp(staleness=2)", "ps:backup(spares=1)"]
WORKERS = 4


@pytest.mark.long
@pytest.mark.parametrize("strategy", WITHOUT_WAITING)
def test_digits_are_learnt(strategy: str, tmp_path: Path) -> None:
    done = harness.train(
        ROOT / "examples/digits.py", tmp_path / "run", strategy=strategy, workers=WORKERS, epochs=15
    )
    assert done.code == 0, done.err
    assert done.of("Evaluated")[-1]["metrics"]["accuracy"] > 0.95
    assert_once_an_epoch(done, epochs=15, samples=1437)
    assert_books_agree(done)


@pytest.mark.long
@pytest.mark.parametrize("strategy", WITHOUT_WAITING)
def test_mnist_is_learnt(strategy: str, mnist_folder: Path, tmp_path: Path) -> None:
    environ, run = {"MANYHANDS_DATA": str(mnist_folder)}, tmp_path / "run"
    arguments = harness.train_arguments(
        ROOT / "examples/mnist.py", run, strategy=strategy, workers=WORKERS, epochs=4
    )
    with harness.command(*arguments, run=run, environ=environ) as running:
        done = running.wait(timeout_s=280)
    assert done.code == 0, done.err
    assert done.of("Evaluated")[-1]["metrics"]["accuracy"] > 0.975
    assert_once_an_epoch(done, epochs=4, samples=60_000)
    assert_books_agree(done)


@pytest.mark.long
def test_everybody_waits_for_a_slow_worker_in_sync(tmp_path: Path) -> None:
    race = run_race("ps:sync", tmp_path)
    assert race.slow == race.num_steps, "each step has a part of the slow one"
    assert race.fast == [race.num_steps] * (WORKERS - 1)
    assert race.lead == 1


def test_nobody_waits_for_a_slow_worker_in_async(tmp_path: Path) -> None:
    race = run_race("ps:async", tmp_path)
    assert 1 <= race.slow < mean(race.fast) / 4, f"{race}"
    assert min(race.fast) > max(race.fast) / 2, f"{race}"
    assert race.slow + sum(race.fast) == WORKERS * race.num_steps
    assert race.lead > 10, "the bound of ssp is none here"
    assert race.staleness["max"] > 10, "while the slow one computes, others change the weights"
    for (
        step
    ) in race.steps:  # the rate that was applied: divided by 1 + staleness, the mean over parts
        assert LR / (1 + step["staleness"]) * 0.999 <= step["lr"] <= LR * 1.001
        assert (step["lr"] < LR * 0.999) == (step["staleness"] > 0)


def test_ssp_holds_its_bound(tmp_path: Path) -> None:
    bound = 2
    race = run_race(f"ps:ssp(staleness={bound})", tmp_path)
    assert race.lead == bound + 1, "one that may be 2 ahead has begun a third step, and no more"
    assert max(race.fast) <= race.slow + bound + 1 + WORKERS
    # Of each of the others, at most the steps from `bound` behind to `bound` ahead; and one's own.
    assert race.staleness["max"] <= (2 * bound + 1) * (WORKERS - 1) + 1


def test_backup_goes_on_without_the_slowest(tmp_path: Path) -> None:
    race = run_race("ps:backup(spares=1)", tmp_path)
    assert 1 <= race.slow < mean(race.fast) / 4, f"{race}"
    # A step is 3 parts; one in each step may come too late, and is computed again by others.
    redone = race.slow + sum(race.fast) - 3 * race.num_steps
    assert 0 <= redone <= race.num_steps
    assert race.staleness["max"] <= 1


@pytest.mark.parametrize(
    ("strategy", "flags"),
    [
        ("ps:backup(spares=1)", ()),
        pytest.param(
            "ps:backup(spares=1,transport=tcp)", ("--trust-network",), marks=pytest.mark.long
        ),
        pytest.param("ps:backup(spares=1,late=decay,decay=1.0)", (), marks=pytest.mark.long),
    ],
)
def test_every_sample_weighs_one_in_backup(
    strategy: str, flags: tuple[str, ...], tmp_path: Path
) -> None:
    """Whoever was late, and though parts are not equal (16 samples in 3) and the last round has fewer."""
    done = harness.train(
        Path(COUNTING), tmp_path / "run", *flags, strategy=strategy, workers=WORKERS, pause_s=0.005
    )
    assert done.code == 0, done.err
    check_counts(done.state(), epochs=3)


@dataclass(frozen=True)
class Race:
    """How often each worker began to compute."""

    slow: int
    fast: list[int]
    lead: int
    """The most steps that anybody had begun more than another one who had not yet done its last."""
    num_steps: int
    staleness: dict[str, Any]
    steps: list[dict[str, Any]]


LR = 0.001


def run_race(strategy: str, folder: Path) -> Race:
    """One of four workers is ten times slower than the others."""
    diary, samples = folder / "diary", 640
    done = harness.train(
        "Straggling",
        folder / "run",
        strategy=strategy,
        workers=WORKERS,
        diary=diary,
        samples=samples,
        lr=LR,
        anneal=False,
    )
    assert done.code == 0, done.err
    for step in done.steps:  # of the time of the workers, however many of them had a part of it
        assert step["compute_s"] + step["wait_s"] <= step["step_s"] * 1.001
    assert_once_an_epoch(done, epochs=1, samples=samples)
    summary = assert_books_agree(done)
    lines = [line.split() for line in diary.read_text().splitlines()]
    counts = Counter(process for process, _ in lines)
    assert len(counts) == WORKERS
    (slow,) = {process for process, is_slow in lines if is_slow == "1"}
    return Race(
        slow=counts[slow],
        fast=[count for process, count in counts.items() if process != slow],
        lead=lead_of([process for process, _ in lines]),
        num_steps=summary["steps"],
        staleness=summary["staleness"],
        steps=done.steps,
    )


def lead_of(begun: list[str]) -> int:
    last = {process: index for index, process in enumerate(begun)}
    counts: Counter[str] = Counter()
    lead = 0
    for index, process in enumerate(begun):
        counts[process] += 1
        behind = [counts[other] for other, end in last.items() if index < end]
        lead = max(lead, counts[process] - min(behind, default=counts[process]))
    return lead


def assert_books_agree(done: harness.Finished) -> dict[str, Any]:
    """As many pushes are in the weights as were committed; the summary."""
    summary: dict[str, Any] = json.loads((done.run / "summary.json").read_text())
    assert summary["pushes"]["applied"] == summary["pushes"]["committed"] > 0
    return summary
