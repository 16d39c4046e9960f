"""Models with sparse tables, by every strategy, in real processes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from manyhands.compute.feed import Feed
from manyhands.compute.train_state import TrainState, begin_with
from manyhands.contract import Context
from manyhands.control.messages import Portion
from manyhands.hosts.me import Me
from manyhands.runs.checkpoints import choose
from manyhands.strategies.single import SingleLearner
from manyhands.testing import harness
from manyhands.testing.conformance import Case, assert_once_an_epoch, assert_same_bits
from manyhands.testing.jobs import Sparse

SYNCHRONOUS = [
    pytest.param(Case("allreduce", workers=2), marks=pytest.mark.long),
    pytest.param(Case("allreduce", workers=4), marks=pytest.mark.long),
    Case("ps:sync", workers=2),
    pytest.param(Case("ps:sync(servers=3)", workers=4), marks=pytest.mark.long),
    pytest.param(Case("ps:sync(placement=dedicated)", workers=2), marks=pytest.mark.long),
    pytest.param(
        Case("ps:sync(transport=tcp)", workers=2, flags=("--trust-network",)),
        marks=pytest.mark.long,
    ),
    pytest.param(
        Case("ps:sync(transport=tcp,placement=dedicated,servers=3)", workers=2),
        marks=pytest.mark.long,
    ),
    pytest.param(
        Case("ps:sync(transport=tcp,replicas=0)", workers=3, flags=("--trust-network",)),
        marks=pytest.mark.long,
    ),
]


@lru_cache
def alone(folder: Path, optimizer: str) -> harness.Finished:
    """Train with one worker, for comparison."""
    run = folder / f"single-{optimizer}"
    return Case("single", workers=1).train("Sparse", run, table_optim=optimizer)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("alone")


@pytest.mark.parametrize("case", SYNCHRONOUS, ids=str)
def test_synchronous_strategies_equal_one_worker(case: Case, folder: Path, tmp_path: Path) -> None:
    optimizer = "adam" if case.workers == 2 else "momentum"
    done = case.train("Sparse", tmp_path / "run", table_optim=optimizer)
    reference = alone(folder, optimizer)
    assert done.losses == pytest.approx(reference.losses, rel=1e-5)
    assert_once_an_epoch(done)
    assert_close(done.state()["tables"], reference.state()["tables"])


@pytest.mark.long
@pytest.mark.parametrize("strategy", ["allreduce", "ps:sync", "ps:sync(transport=tcp)"])
def test_rows_follow_the_factor_of_the_learning_rate(strategy: str, tmp_path: Path) -> None:
    """Half of the batch and of the rate, on one worker where two are meant and on two of four."""
    fields = {"batch_size": 32, "table_optim": "momentum"}
    scaled = ("--scale-batch", "linear", "--scale-reference")
    one = Case("single", workers=1, flags=(*scaled, "2"))
    two = Case(strategy, workers=2, flags=(*scaled, "4"))
    reference = one.train("Sparse", tmp_path / "one", **fields)
    done = two.train("Sparse", tmp_path / "two", **fields)
    assert {e["samples"] for e in done.steps} == {16, 2}
    assert done.steps[0]["lr"] == 0.05 / 2
    assert done.losses == pytest.approx(reference.losses, rel=1e-5)
    assert_close(done.state()["tables"], reference.state()["tables"])


@pytest.mark.long
@pytest.mark.parametrize(
    "case", [Case("ps:sync", workers=2), Case("ps:sync(transport=tcp)", workers=2)], ids=str
)
def test_same_seed_same_bits(case: Case, tmp_path: Path) -> None:
    first, second = (case.train("Sparse", tmp_path / name) for name in ("first", "second"))
    assert first.losses == second.losses
    assert_same_bits(first.state()["tables"], second.state()["tables"])


@pytest.mark.parametrize(
    "strategy",
    [
        pytest.param("ps:async", marks=pytest.mark.long),
        pytest.param("ps:ssp(staleness=2)", marks=pytest.mark.long),
        pytest.param("ps:backup(spares=1)", marks=pytest.mark.long),
        "ps:async(transport=tcp,row_bits=16,row_age=2,replicas=0)",
        pytest.param("ps:async(placement=dedicated,transport=tcp)", marks=pytest.mark.long),
        pytest.param("allreduce(tables=shared)", marks=pytest.mark.long),
    ],
)
def test_asynchronous_strategies_learn(strategy: str, folder: Path, tmp_path: Path) -> None:
    done = Case(strategy, workers=2).train("Sparse", tmp_path / "run", epochs=6)
    assert_once_an_epoch(done, epochs=6)
    first, last = done.losses[:7], done.losses[-7:]
    assert sum(last) < 0.75 * sum(first)
    assert_same_ids(done, alone(folder, "adagrad"))


@pytest.mark.parametrize(
    ("first", "then"),
    [
        pytest.param("ps:sync", "allreduce", marks=pytest.mark.long),
        pytest.param("allreduce", "ps:sync(transport=tcp)", marks=pytest.mark.long),
        pytest.param("ps:sync(transport=tcp)", "single", marks=pytest.mark.long),
    ],
)
def test_a_run_resumes_with_another_strategy(
    first: str, then: str, folder: Path, tmp_path: Path
) -> None:
    case, run = Case(first, workers=2), tmp_path / "run"
    with harness.command(*case.arguments("Sparse", run, pause_s=0.05), run=run) as running:
        running.wait_for_step(9)
        running.signal(15)
        stopped = running.wait()
    assert stopped.code == 75, f"{stopped.out}\n{stopped.err}"
    workers = "1" if then == "single" else "3"
    switches = ("--strategy", then, "--workers", workers, "--set", "pause_s=0")
    done = harness.resume(run, *switches)
    assert done.code == 0, f"{done.out}\n{done.err}"
    reference = alone(folder, "adagrad")
    assert done.losses == pytest.approx(reference.losses, rel=1e-5)
    assert_close(done.state()["tables"], reference.state()["tables"])


@pytest.mark.parametrize(
    "strategy",
    [
        pytest.param("ps:sync", marks=pytest.mark.long),
        "ps:sync(transport=tcp)",
        pytest.param("ps:sync(placement=dedicated,transport=tcp)", marks=pytest.mark.long),
    ],
)
def test_a_killed_worker_changes_no_row(strategy: str, folder: Path, tmp_path: Path) -> None:
    """Killed several times, at any moment of a step: each update is in the rows once."""
    case, run = Case(strategy, workers=3), tmp_path / "run"
    arguments = case.arguments("Sparse", run, "--max-restarts", "0", pause_s=0.02)
    with harness.command(*arguments, run=run) as running:
        running.wait_for_step(8)
        running.kill("worker-2")
        done = running.wait()
        assert done.code == 0, f"{done.out}\n{done.err}\n{running.logs()}"
    assert done.of("MemberLost")
    assert_once_an_epoch(done)
    assert_close(done.state()["tables"], alone(folder, "adagrad").state()["tables"])


@pytest.mark.parametrize("transport", [pytest.param("shm", marks=pytest.mark.long), "tcp"])
def test_a_killed_server_of_an_asynchronous_run_loses_no_row(
    transport: str, folder: Path, tmp_path: Path
) -> None:
    case, run = Case(f"ps:async(transport={transport})", workers=3), tmp_path / "run"
    with harness.command(*case.arguments("Sparse", run, pause_s=0.02), run=run) as running:
        running.wait_for_step(8)
        running.kill("worker-0")
        done = running.wait()
        assert done.code == 0, f"{done.out}\n{done.err}\n{running.logs()}"
    assert_once_an_epoch(done)
    pushes = json.loads((run / "summary.json").read_text())["pushes"]
    assert pushes["applied"] == pushes["committed"] > 0
    assert_same_ids(done, alone(folder, "adagrad"))


def assert_same_ids(done: harness.Finished, reference: harness.Finished) -> None:
    """Check that no row is lost, and none is invented."""
    for name, table in reference.state()["tables"].items():
        assert torch.equal(done.state()["tables"][name]["ids"], table["ids"])


def assert_close(got: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    assert got.keys() == expected.keys()
    for name, table in expected.items():
        assert torch.equal(got[name]["ids"], table["ids"])
        for key in ("rows", "state"):
            torch.testing.assert_close(got[name][key], table[key], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    "strategy",
    [
        "single",
        pytest.param("allreduce", marks=pytest.mark.long),
        "ps:sync",
        pytest.param("allreduce(tables=shared)", marks=pytest.mark.long),
        pytest.param("ps:backup", marks=pytest.mark.long),
        pytest.param("ps:async(transport=tcp)", marks=pytest.mark.long),
    ],
)
def test_unused_rows_are_evicted(strategy: str, folder: Path, tmp_path: Path) -> None:
    """Each id comes once: of 1,600 only those of the last steps are there at the end. The gradient is
    clipped once in every step, also where servers wait for each other to evict."""
    reference = passing_alone(folder)
    done = reference
    if strategy != "single":
        done = Case(strategy, workers=2).train("Passing", tmp_path / "run", **CLIPPED)
    ids = done.state()["tables"]["rows"]["ids"]
    assert 100 <= len(ids) <= 400
    if strategy not in ("ps:backup", "ps:async(transport=tcp)"):
        assert done.losses == pytest.approx(reference.losses, rel=1e-4)
        for name, weights in reference.state()["model"].items():
            torch.testing.assert_close(
                done.state()["model"][name], weights, rtol=1e-4, atol=1e-6, msg=name
            )


CLIPPED = {"clip_norm": 0.1, "width": 20_000, "lr": 0.05}
"""Every step is clipped, and each of two servers has blocks."""


@lru_cache
def passing_alone(folder: Path) -> harness.Finished:
    return Case("single", workers=1).train("Passing", folder / "passing", **CLIPPED)


@pytest.mark.long
@pytest.mark.parametrize("strategy", ["ps:sync", "ps:sync(transport=tcp)"])
def test_incremental_checkpoints_have_all_rows(strategy: str, tmp_path: Path) -> None:
    run = tmp_path / "run"
    # Steps take a while, so that a checkpoint is written before the next one is due.
    flags = ("--checkpoint-every", "50")
    done = Case(strategy, workers=2).train("Passing", run, *flags, unused=0, pause_s=0.01)
    newest = max((run / "checkpoints").glob("step-*"), key=lambda path: int(path.name[5:]))
    files = json.loads((newest / "tables.json").read_text())
    assert len(files["rows"]) >= 2, "the last rows are in a file of their own"
    assert done.state()["tables"]["rows"]["ids"].tolist() == list(range(1600))
    resumed = harness.resume(
        run, "--set", "epochs=2", "--set", "pause_s=0", "--schedule", "restart"
    )
    assert resumed.code == 0, f"{resumed.out}\n{resumed.err}"
    assert (resumed.state()["tables"]["rows"]["counts"] == 2).all(), "each was seen once an epoch"


@pytest.mark.long
@pytest.mark.parametrize(
    ("restarts", "pause_s"),
    # With a longer pause the other has come, and got all rows from this one, before the end.
    [("0", 0.02), ("1", 0.05)],
)
def test_the_last_worker_continues_with_the_tables(
    restarts: str, pause_s: float, tmp_path: Path
) -> None:
    """Rows that it first uses then are made and learn, as with one worker from the start."""
    # Equal shares: nobody is left out for being slow, on a machine that has other work too.
    case = Case("allreduce", workers=2, flags=("--max-restarts", restarts, "--equal-shares"))
    run = tmp_path / "run"
    arguments = case.arguments("Passing", run, unused=0, pause_s=pause_s)
    with harness.command(*arguments, run=run) as running:
        running.wait_for_step(10)
        running.kill("worker-1")
        done = running.wait()
    assert done.code == 0, f"{done.out}\n{done.err}"
    assert len(done.of("ViewChanged")) == 2 + int(restarts)
    alone = Case("single", workers=1).train("Passing", tmp_path / "alone", unused=0)
    assert_close(done.state()["tables"], alone.state()["tables"])


def losses_from(run: Path, *, epochs: int) -> list[float]:
    """What one worker makes of a training that begins with the last weights of a run, without processes."""
    job = Sparse(table_optim="adam", epochs=epochs)
    train_state = TrainState.of(job, device="cpu", num_steps=7 * epochs)
    begin_with(str(choose(run, "last").path), train_state, job)
    learner = SingleLearner(Context(train_state, cast(Me, None)))
    feed = Feed(job, job.data(), device="cpu")
    losses = []
    for step in range(7 * epochs):
        epoch, place = divmod(step, 7)
        first, last = 16 * place, min(16 * place + 16, 98)
        portion = Portion(step + 1, epoch, last - first, ((first, last),))
        losses.append(learner.step(feed.share(portion)).mean_loss)
    return losses


@pytest.mark.parametrize(
    "strategy",
    [
        pytest.param("single", marks=pytest.mark.long),
        pytest.param("allreduce", marks=pytest.mark.long),
        pytest.param("allreduce(tables=shared)", marks=pytest.mark.long),
        pytest.param("ps:sync", marks=pytest.mark.long),
        "ps:sync(transport=tcp,placement=dedicated)",
        pytest.param("ps:async", marks=pytest.mark.long),
        pytest.param("ps:async(transport=tcp)", marks=pytest.mark.long),
    ],
)
def test_a_run_starts_from_the_weights_of_another(
    strategy: str, folder: Path, tmp_path: Path
) -> None:
    first, run = alone(folder, "adam"), tmp_path / "run"
    case = Case(strategy, workers=1 if strategy == "single" else 2)
    flags = ("--init-from", f"{first.run}:last", "--checkpoint-every", "3")
    done = case.train("Sparse", run, *flags, table_optim="adam", epochs=1)
    expected = losses_from(first.run, epochs=1)
    # Without waiting, one part of the first step may be computed after another is in the weights.
    assert done.losses[0] == pytest.approx(expected[0], rel=0.2 if "async" in strategy else 1e-5)
    assert done.losses[0] < 0.7 * first.losses[0]
    if "async" not in strategy and "shared" not in strategy:
        assert done.losses == pytest.approx(expected, rel=1e-5)  # fresh optimizers, in rows too
    checkpoint = first.run / "checkpoints" / "step-21"
    noted = {"run": str(first.run), "step": 21, "checkpoint": str(checkpoint)}
    assert json.loads((run / "config.json").read_text())["init_from"] == noted
    assert done.events[0]["init_from"] == str(checkpoint)
    if strategy != "ps:sync":
        return
    resumed = harness.resume(run, "--checkpoint", "step-3")
    assert resumed.code == 0, f"{resumed.out}\n{resumed.err}"
    assert resumed.losses == pytest.approx(expected, rel=1e-5)  # and not the first weights again


@pytest.mark.parametrize(
    ("job", "given", "words"),
    [
        ("Sparse", ":5", ["no checkpoint of step 5", "steps 7, 14, 21"]),
        ("Sparse", "/nowhere", ["There is no run"]),
        (
            "Regression",
            ":last",
            [
                "don't fit the model of Regression",
                "missing parameters, which the model has: 0.bias, 0.weight, 2.bias, 2.weight",
                "unexpected parameters, which the model does not have: body.0.bias",
                "unexpected tables, which the model does not have: bags, rows",
            ],
        ),
    ],
)
def test_weights_that_do_not_fit_are_refused_by_name(
    job: str, given: str, words: list[str], folder: Path, tmp_path: Path
) -> None:
    flag, run = f"{alone(folder, 'adam').run}{given}", tmp_path / "run"
    arguments = Case("single", workers=1).arguments(job, run, "--init-from", flag)
    with harness.command(*arguments, run=run) as running:
        done = running.wait()
    assert done.code == 2
    assert all(word in done.err for word in words), done.err
    assert not run.exists()
