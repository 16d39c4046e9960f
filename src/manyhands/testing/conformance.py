"""The conformance suite of strategies, with real processes. A new strategy is one more Case.

from manyhands.testing.conformance import CHECKS, Case

@pytest.mark.parametrize("case", [Case("mine", workers=2)], ids=str)
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_conformance(case, check, tmp_path):
    check(case, tmp_path)
"""

from __future__ import annotations

import signal
import tempfile
import time
from collections import Counter
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest

from manyhands.contract import Traits
from manyhands.strategies.registry import make_strategy
from manyhands.testing import harness
from manyhands.testing.counting import COUNTING, Counting, check_counts
from manyhands.testing.harness import Finished

SAMPLES, BATCH, EPOCHS = 98, 16, 3
EQUAL = "--equal-shares"
"""For bit-equal results: shares by speed depend on other load, and the order of sums on the shares."""


@dataclass(frozen=True)
class Case:
    strategy: str
    workers: int
    flags: tuple[str, ...] = ()
    fields: Mapping[str, Any] = field(default_factory=dict)
    counts_rows: bool = True
    """If true, rows of tables count every sample once per epoch too, not only dense weights."""

    def __str__(self) -> str:
        more = (*self.flags, *(f"{name}={value}" for name, value in self.fields.items()))
        return "-".join((self.strategy, str(self.workers), *more))

    @property
    def traits(self) -> Traits:
        return make_strategy(self.strategy).traits

    def arguments(self, job: str, run: Path, *flags: str, **fields: Any) -> list[str]:
        return harness.train_arguments(
            job,
            run,
            *self.flags,
            *flags,
            strategy=self.strategy,
            workers=self.workers,
            **{**self.fields, **fields},
        )

    def train(self, job: str, run: Path, *flags: str, **fields: Any) -> Finished:
        with harness.command(*self.arguments(job, run, *flags, **fields), run=run) as running:
            return running.wait(code=0)


def equals_single(case: Case, folder: Path) -> None:
    """Use every sample once per epoch, and match the losses and weights of one worker to 1e-5."""
    _as_single(case, case.train("Regression", folder / "run"), "Regression")


def equals_single_with_accumulation(case: Case, folder: Path) -> None:
    """Dividing each share into micro-batches changes nothing."""
    done = case.train("Adam", folder / "run", accumulate=3)
    _as_single(case, done, "Adam", accumulate=3)


def equals_single_with_own_weights(case: Case, folder: Path) -> None:
    """Shares count by the job's own weights (tokens), not by samples; so do the values that it logs."""
    done = case.train("Tokens", folder / "run")
    _as_single(case, done, "Tokens")
    for record in done.steps:
        assert record["measures"] == {"double": pytest.approx(2 * record["loss"], rel=1e-5)}


def repeats_and_resumes_bit_equal(case: Case, folder: Path) -> None:
    """Get the same bits from the same seed, also when stopped in the middle of an epoch and resumed."""
    whole = case.train("Dropout", folder / "whole", EQUAL)
    run = folder / "stopped"
    stopped = _stop_at(3, case.arguments("Dropout", run, EQUAL, pause_s=0.05), run)
    assert 3 <= len(stopped.steps) < len(whole.steps), "the run ended before it could be stopped"
    assert stopped.losses == whole.losses[: len(stopped.steps)]
    resumed = harness.resume(run, "--set", "pause_s=0")
    assert resumed.code == 0, f"{resumed.out}\n{resumed.err}"
    assert resumed.losses == whole.losses
    assert_same_bits(resumed.state(), whole.state())
    assert_once_an_epoch(resumed)


def begins_again(case: Case, folder: Path) -> None:
    """Kill all members: all restart from the last checkpoint, and the result does not show it."""
    run = folder / "run"
    arguments = case.arguments("Dropout", run, EQUAL, "--checkpoint-every", "2", pause_s=0.05)
    with harness.command(*arguments, run=run) as running:
        running.wait_for_step(9)
        pids = running.pids()
        for victim in pids:
            running.kill(victim)
        done = running.wait(code=0)
    assert not done.of("MemberFailed")
    (resumed,) = done.of("Resumed")
    assert resumed["step"] >= 2
    assert len(done.of("MemberStarted")) >= 2 * len(pids)
    assert harness.gone([*pids.values(), running.process.pid])
    assert_once_an_epoch(done)
    if case.traits.equals_single:
        whole = case.train("Dropout", folder / "whole", EQUAL)
        assert done.losses == whole.losses
        assert_same_bits(done.state(), whole.state())


def goes_on_after_a_kill(case: Case, folder: Path) -> None:
    """Kill a worker: the run finishes by itself, with the same samples and the same result."""
    run, victim = folder / "run", f"worker-{case.workers - 1}"
    arguments = case.arguments("Regression", run, "--max-restarts", "0", pause_s=0.03)
    with harness.command(*arguments, run=run) as running:
        running.wait_for_step(6)
        pids = running.pids()
        running.kill(victim)
        done = running.wait(code=0)
    assert [e["member"] for e in done.of("MemberLost")] == [victim]
    assert not done.of("MemberFailed")
    lost, recovered = done.of("MemberLost")[0]["time"], done.of("Recovered")[0]["time"]
    later = [e for e in done.steps if e["time"] > recovered]
    assert later, "the run ended before the kill"
    assert not any(victim in e["shares"] for e in later)
    assert harness.gone([*pids.values(), running.process.pid])
    # These steps are in the weights, but the victim could not report its part of their loss.
    unreported = {e["step"] for e in done.steps if lost <= e["time"] <= recovered}
    _as_single(case, done, "Regression", unreported=unreported)


def survives_a_kill(case: Case, folder: Path) -> None:
    """Kill a worker: training continues in place or restarts, as the strategy declares."""
    (goes_on_after_a_kill if case.traits.elastic else begins_again)(case, folder)


def counting_case(case: Case) -> Case:
    """Return the case for the counting job, in which every update counts in full."""
    strategy, rows = case.strategy, True
    if strategy.startswith(("ps:async", "ps:ssp")):
        name, _, options = strategy.rstrip(")").partition("(")
        strategy = f"{name}({','.join(filter(None, (options, 'lr_rule=none')))})"
        # Rows in shared memory are updated in place: some of what a killed worker did may count twice.
        rows = "transport=tcp" in strategy
    fields = {name: value for name, value in case.fields.items() if name == "pause_s"}
    return replace(case, strategy=strategy, fields=fields, counts_rows=rows)


def counts_every_sample_once(case: Case, folder: Path) -> None:
    """Kill two members: the weights have counted every sample once per epoch."""
    case, run, epochs = counting_case(case), folder / "run", 6
    arguments = case.arguments(
        COUNTING, run, "--checkpoint-every", "5", epochs=epochs, pause_s=0.03
    )
    with harness.command(*arguments, run=run) as running:
        running.wait_for_step(7)
        for member in list(running.pids())[-2:]:
            with suppress(ProcessLookupError):  # it may have been ended for a restart already
                running.kill(member)
            time.sleep(0.1)
        done = running.wait(code=0)
    assert done.of("MemberLost"), "the run ended before the kills"
    assert_once_an_epoch(done, epochs=epochs, samples=Counting.samples)
    check_counts(done.state(), epochs=epochs, rows=case.counts_rows)


def resumes_as(case: Case, other: Case, folder: Path) -> None:
    """Stop in the middle of an epoch; resume with another strategy or number of workers."""
    run = folder / "run"
    stopped = _stop_at(9, case.arguments("Regression", run, pause_s=0.05), run)
    assert len(stopped.steps) < EPOCHS * -(-SAMPLES // BATCH)
    switches = ("--strategy", other.strategy, "--workers", str(other.workers))
    resumed = harness.resume(run, *switches, *other.flags, "--set", "pause_s=0")
    assert resumed.code == 0, f"{resumed.out}\n{resumed.err}"
    _as_single(case, resumed, "Regression")


def reports_the_bytes_it_sends(case: Case, folder: Path) -> None:
    """Compare the bytes in the events with the kernel's count."""
    from manyhands.testing.traffic import tcp_bytes_sent

    run = folder / "run"
    arguments = case.arguments("Regression", run, pause_s=0.02, width=40_000, epochs=12)

    def reported(running: harness.RunningCommand) -> int:
        return sum(e["bytes_sent"] for e in running.events() if e["event"] == "StepCommitted")

    with harness.command(*arguments, run=run) as running:
        running.wait_for_step(5)
        pids = list(running.pids().values())
        said, sent = -reported(running), -tcp_bytes_sent(pids)
        running.wait_for_step(65)
        said, sent = said + reported(running), sent + tcp_bytes_sent(pids)
    # The events lag the wire by a report's interval: by a few of the sixty steps, either way.
    assert said == pytest.approx(sent, rel=0.1, abs=50_000)


def ends_and_evaluates_in_steps(case: Case, folder: Path) -> None:
    """Train for a number of steps in two starts, and kill a worker on the way: the run stops, ends and is
    evaluated at exactly the steps that were asked for."""
    run, steps, due = folder / "run", 17, [5, 10, 15, 17]
    length = {"steps": steps, "eval_every": "5 steps", "eval_samples": 20}
    flags = ("--checkpoint-every", "4", "--max-steps", "12")
    arguments = case.arguments("Regression", run, *flags, **length, pause_s=0.05)
    with harness.command(*arguments, run=run) as running:
        running.wait_for_step(7)
        running.kill(f"worker-{case.workers - 1}")
        stopped = running.wait(code=0)
    assert stopped.of("MemberLost"), "the run ended before the kill"
    summary = stopped.of("RunFinished")[-1]["summary"]
    assert (summary["outcome"], summary["steps"]) == ("limit", 12)
    done = harness.resume(run, "--set", "pause_s=0")
    assert done.code == 0, f"{done.out}\n{done.err}"
    assert [record["step"] for record in done.steps] == list(range(1, steps + 1))
    uses = {epoch: sorted(positions) for epoch, positions in done.uses_by_epoch().items()}
    whole = list(range(SAMPLES))
    assert uses == {0: whole, 1: whole, 2: whole[: (steps - 2 * 7) * BATCH]}
    found = {event["step"]: event for event in done.of("Evaluated")}
    assert sorted(found) == due
    assert {event["samples"] for event in found.values()} == {20}
    if case.traits.equals_single:
        reference = _reference("Regression", tuple(sorted({**case.fields, **length}.items())))
        for step, expected in zip(due, reference.metrics, strict=True):
            assert found[step]["metrics"] == pytest.approx(expected, rel=1e-4)


CHECKS = (
    equals_single,
    equals_single_with_accumulation,
    equals_single_with_own_weights,
    repeats_and_resumes_bit_equal,
    survives_a_kill,
    begins_again,
    counts_every_sample_once,
    ends_and_evaluates_in_steps,
    reports_the_bytes_it_sends,
)
"""All checks. `resumes_as` takes a second case."""


def assert_once_an_epoch(done: Finished, *, epochs: int = EPOCHS, samples: int = SAMPLES) -> None:
    uses = done.uses_by_epoch()
    assert sorted(uses) == list(range(epochs))
    for epoch, positions in uses.items():
        wrong = {p: n for p, n in Counter(positions).items() if n != 1}
        assert sorted(positions) == list(range(samples)), f"epoch {epoch}: not used once: {wrong}"


def assert_same_bits(first: Any, second: Any) -> None:
    """Assert that two states are equal in every bit."""
    import torch

    if isinstance(first, Mapping):
        assert first.keys() == second.keys()
        for key in first:
            assert_same_bits(first[key], second[key])
    elif isinstance(first, list | tuple):
        assert len(first) == len(second)
        for one, other in zip(first, second, strict=True):
            assert_same_bits(one, other)
    elif isinstance(first, torch.Tensor):
        assert torch.equal(first, second), f"{first} is not {second}"
    else:
        assert first == second


def _stop_at(step: int, arguments: list[str], run: Path) -> Finished:
    """Run a command and preempt it after a step."""
    with harness.command(*arguments, run=run) as running:
        running.wait_for_step(step)
        running.signal(signal.SIGTERM)
        return running.wait(code=75)


def _as_single(
    case: Case, done: Finished, job: str, *, unreported: Collection[int] = (), **fields: Any
) -> None:
    import torch

    assert_once_an_epoch(done)
    assert done.steps[-1]["step"] == EPOCHS * -(-SAMPLES // BATCH)
    if not case.traits.equals_single:
        return
    reference = _reference(job, tuple(sorted({**case.fields, **fields}.items())))
    for record, expected in zip(done.steps, reference.losses, strict=True):
        if record["step"] not in unreported:
            assert record["loss"] == pytest.approx(expected, rel=1e-5), record["step"]
    got = done.state()["model"]
    for name, expected in reference.weights.items():
        torch.testing.assert_close(got[name], expected, rtol=1e-5, atol=1e-6)
    for ours, theirs in zip(done.of("Evaluated"), reference.metrics, strict=True):
        assert ours["metrics"] == pytest.approx(theirs, rel=1e-4)


@dataclass(frozen=True)
class Reference:
    """Result of one worker for a job."""

    losses: list[float]
    metrics: list[Mapping[str, float]]
    weights: Mapping[str, Any]


@lru_cache
def _reference(job: str, fields: tuple[tuple[str, Any], ...]) -> Reference:
    """Train with one worker; once for all cases that are compared with it."""
    with tempfile.TemporaryDirectory() as folder:
        done = Case("single", workers=1).train(job, Path(folder) / "run", **dict(fields))
        metrics = [event["metrics"] for event in done.of("Evaluated")]
        return Reference(done.losses, metrics, done.state()["model"])
