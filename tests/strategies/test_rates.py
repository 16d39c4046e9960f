"""Real runs whose batch follows the workers, and whose learning rate follows all workers' losses."""

from __future__ import annotations

import math
import signal
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from manyhands.runs import checkpoints
from manyhands.testing import harness
from manyhands.testing.conformance import Case, assert_once_an_epoch, assert_same_bits
from manyhands.testing.harness import Finished

SAMPLES, BATCH, LR, WARMUP = 98, 16, 0.05, 6
STEPS_PER_EPOCH = math.ceil(SAMPLES / BATCH)
EPOCHS = 30


def scale(run: Path, workers: int) -> None:
    with harness.command("scale", str(run), "--workers", str(workers), run=run) as asked:
        done = asked.wait()
    assert done.code == 0, f"{done.out}\n{done.err}"


def by_hand(changes: dict[int, int], num_steps: int) -> Iterator[tuple[int, float]]:
    """The samples and the learning rate of each step, by the step from which on there were so many workers;
    one is the reference."""
    start = end = factor = 1.0
    since = used = 0
    world = 1
    for step in range(1, num_steps + 1):
        if step in changes:
            world = changes[step]
            start, end, since = factor, float(world), step - 1
        way = min(1.0, (step - since) / WARMUP) if end > start else 1.0
        factor = start + (end - start) * way
        epoch, within = divmod(used, SAMPLES)
        ticks = epoch * STEPS_PER_EPOCH + within // BATCH
        cosine = (1 + math.cos(math.pi * ticks / (EPOCHS * STEPS_PER_EPOCH))) / 2
        samples = min(BATCH * world, SAMPLES - within)
        used += samples
        yield samples, LR * cosine * factor


@pytest.mark.parametrize(
    "strategy",
    [
        "allreduce",
        pytest.param("ps:sync", marks=pytest.mark.long),
        pytest.param("ps:sync(transport=tcp)", marks=pytest.mark.long),
    ],
)
def test_the_batch_and_the_rate_follow_the_workers(
    strategy: str, members: ModuleType, tmp_path: Path
) -> None:
    """One worker, then two, then one, and two when it is resumed: also the cosine is where it should be, by
    samples."""
    run = tmp_path / "run"
    flags = ("--scale-batch", "linear", "--scale-warmup", str(WARMUP), "--equal-shares")
    case = Case(strategy, workers=1, flags=flags)
    arguments = case.arguments("Regression", run, pause_s=members.SLOW_S, epochs=EPOCHS)
    with members.command(*arguments, run=run) as running:
        running.wait_for_step(3)
        scale(run, 2)
        last = max(e["step"] for e in running.events() if e["event"] == "StepCommitted")
        running.wait_for_step(last + 3)
        scale(run, 1)
        last = max(e["step"] for e in running.events() if e["event"] == "StepCommitted")
        running.wait_for_step(last + 2)
        running.signal(signal.SIGTERM)
        stopped = running.wait()
    assert stopped.code == 75, f"{stopped.out}\n{stopped.err}"
    done = members.resume(run, "--workers", "2", "--set", "pause_s=0")
    assert done.code == 0, f"{done.out}\n{done.err}"
    assert_once_an_epoch(done, epochs=EPOCHS)
    worlds = [len(view["members"]) for view in done.of("ViewChanged")]
    assert worlds == [1, 2, 1, 2]
    told = done.of("RateChanged")
    changes = {e["step"]: world for e, world in zip(told, (2, 1, 2), strict=True)}
    expected = list(by_hand(changes, len(done.steps)))
    assert [e["samples"] for e in done.steps] == [samples for samples, _ in expected]
    lrs = [lr for _, lr in expected]
    assert [e["lr"] for e in done.steps] == pytest.approx(lrs, rel=1e-6, abs=1e-12)
    facts = [(e["factor"], e["over"], e["batch_size"]) for e in told]
    assert facts == [(2.0, WARMUP, 2 * BATCH), (1.0, 0, BATCH), (2.0, WARMUP, 2 * BATCH)]
    assert told[-1]["steps"] == len(done.steps), "as it was foretold"
    first, last = (e["step"] for e in told[:2])
    for e in done.steps[: told[2]["step"] - 1]:
        helped = any(e["shares"].get("worker-1", ()))
        assert helped == (first <= e["step"] < last), "who gets samples counts, and nobody else"
    assert done.state()["scheduler"]["last_epoch"] == EPOCHS * STEPS_PER_EPOCH


RULE = "watch=train_loss; every=5; patience=2; factor=0.5; threshold=0.1"
LOWERED = [21, 31, 41]
"""The steps from which on the learning rate is lower, of a job that soon gets no better."""


def lowered(done: Finished) -> list[int]:
    return [e["step"] for e in done.of("RateChanged")]


def train(strategy: str, run: Path, *flags: str) -> Finished:
    case = Case(strategy, workers=1 if strategy == "single" else 2, flags=flags)
    return case.train("Regression", run, plateau=RULE, epochs=6)


@pytest.mark.long
def test_a_plateau_is_seen_by_all_at_the_same_step(tmp_path: Path) -> None:
    """By one worker, by two in all-reduce, by servers; in a resumed run too. And a batch that may follow the
    workers, but need not, changes nothing, not a bit."""
    alone = train("single", tmp_path / "alone")
    assert lowered(alone) == LOWERED
    rates = [e["lr"] for e in alone.steps]
    plain = train("allreduce", tmp_path / "plain")
    assert (lowered(plain), [e["lr"] for e in plain.steps]) == (LOWERED, rates)
    scaled = train("allreduce", tmp_path / "scaled", "--scale-batch", "linear")
    assert scaled.losses == plain.losses
    assert [e["lr"] for e in scaled.steps] == rates
    assert_same_bits(scaled.state(), plain.state())

    run = tmp_path / "served"
    case = Case("ps:sync", workers=2)
    slow = case.arguments("Regression", run, plateau=RULE, epochs=6, pause_s=0.05)
    with harness.command(*slow, run=run) as running:
        running.wait_for_step(23)
        running.signal(signal.SIGTERM)
        stopped = running.wait()
    assert stopped.code == 75, f"{stopped.out}\n{stopped.err}"
    assert len(stopped.steps) < len(rates), "it was to be stopped before its end"
    assert lowered(stopped)[0] == LOWERED[0]
    newest, _ = checkpoints.newest(run)
    assert newest is not None
    assert newest.training_plan["rates"]["plateau"]["factor"] < 1.0
    resumed = harness.resume(run, "--set", "pause_s=0")
    assert resumed.code == 0, f"{resumed.out}\n{resumed.err}"
    assert [e["lr"] for e in resumed.steps] == rates
    assert resumed.losses == pytest.approx(alone.losses, rel=1e-5)


@pytest.mark.long
@pytest.mark.parametrize("strategy", ["ps:backup", "ps:async", "ps:async(transport=tcp)"])
def test_a_plateau_without_lockstep(strategy: str, tmp_path: Path) -> None:
    """What meets what is decided by time, and so is how many steps a mean waits for; that all wait is not."""
    done = train(strategy, tmp_path / "run")
    assert_once_an_epoch(done, epochs=6)
    assert lowered(done), "it gets no better"
    assert all((step - 1) % 5 == 0 for step in lowered(done))
    for event in done.of("RateChanged"):
        factors = {e["lr"] for e in done.steps if e["step"] >= event["step"]}
        assert max(factors) <= LR * event["factor"]


@pytest.mark.long
def test_rounds_that_leave_some_out_follow_the_workers(tmp_path: Path) -> None:
    flags = ("--scale-batch", "sqrt", "--scale-reference", "1", "--scale-warmup", "4")
    case = Case("ps:backup", workers=3, flags=flags)
    done = case.train("Regression", tmp_path / "run", epochs=6, anneal=False)
    assert_once_an_epoch(done, epochs=6)
    assert {e["samples"] for e in done.steps} == {3 * BATCH, SAMPLES % (3 * BATCH)}
    assert done.steps[-1]["lr"] == pytest.approx(LR * math.sqrt(3))
