"""The conformance suite of strategies. A new strategy is one more Case.

from manyhands.testing.conformance import CHECKS, Case

@pytest.mark.parametrize("case", [Case("mine", workers=2)], ids=str)
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_conformance(case, check, tmp_path):
    check(case, tmp_path)

With `Case("mine", workers=2, in_process=True)` members are threads of this process (in_process.py), and a
check takes a few tenths of a second instead of ten. suite.py runs all of them with one call.
"""

from __future__ import annotations

import math
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import pytest

from manyhands import pairs
from manyhands.contract import Traits
from manyhands.hosts.view import WORKER
from manyhands.pairs import Feature
from manyhands.runs.folder import RunFolder
from manyhands.strategies.pairs import refusal_of
from manyhands.strategies.registry import codec_of, make_strategy
from manyhands.testing import harness, in_process
from manyhands.testing.counting import (
    COUNTING,
    COUNTING_ROWS,
    Counting,
    check_counts,
    check_round_counts,
)
from manyhands.testing.gates import Gates
from manyhands.testing.harness import Finished
from manyhands.testing.thread_members import BEGIN, COMPUTE, EXCHANGE, Death

Running = harness.RunningCommand | in_process.RunningThreads

SAMPLES, BATCH, EPOCHS = 98, 16, 3
ACCURACY = 0.93
"""Least accuracy on the digits after six epochs. One worker reaches 0.96; without any update it is 0.1."""
COUNTED_AT = (5, 35)
"""Micro-batches of each worker at which the bytes that it has sent are counted."""
EQUAL = "--equal-shares"
"""For bit-equal results: shares by speed depend on other load, and the order of sums on the shares."""


@dataclass(frozen=True)
class Case:
    """A strategy with its options, on a number of workers."""

    strategy: str
    workers: int
    flags: tuple[str, ...] = ()
    fields: Mapping[str, Any] = field(default_factory=dict)
    counts_rows: bool = True
    """If true, rows of tables count every sample once per epoch too, not only dense weights."""

    accuracy: float = ACCURACY
    """Accuracy that it must reach on the digits; see `learns`. A case that states less says why."""
    in_process: bool = False
    """If true, members are threads of this process, and not processes."""
    same_as_single: bool = False
    """If true, it equals one worker with these fields, unless a worker dies."""

    def __str__(self) -> str:
        more = (*self.flags, *(f"{name}={value}" for name, value in self.fields.items()))
        return "-".join((self.strategy, str(self.workers), *more))

    @property
    def traits(self) -> Traits:
        return make_strategy(self.strategy).traits

    @property
    def equals_single(self) -> bool:
        return self.traits.equals_single or self.same_as_single

    @property
    def replica_size(self) -> int:
        """Workers that hold one copy of the model together."""
        return make_strategy(self.strategy).replica_size(self.workers)

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

    @contextmanager
    def command(
        self,
        *arguments: str,
        run: Path,
        deaths: Sequence[Death] = (),
        slow_after: int | None = None,
    ) -> Iterator[Running]:
        """Run a command where this case has its members; end it at the end of the block.

        Args:
            deaths: Threads to kill at chosen moments.
            slow_after: The step after which threads wait for the test to interfere; processes are slowed down
                by the job's `pause_s`.
        """
        if self.in_process:
            with in_process.command(
                *arguments, run=run, deaths=deaths, slow_after=slow_after
            ) as threads:
                yield threads
        else:
            assert not deaths, "a process can't be killed at a chosen moment"
            with harness.command(*arguments, run=run) as processes:
                yield processes

    def train(
        self, job: str, run: Path, *flags: str, deaths: Sequence[Death] = (), **fields: Any
    ) -> Finished:
        arguments = self.arguments(job, run, *flags, **fields)
        with self.command(*arguments, run=run, deaths=deaths) as running:
            return running.wait(code=0)

    def resume(self, run: Path, *flags: str) -> Finished:
        with self.command(*harness.resume_arguments(run, *flags), run=run) as running:
            return running.wait(code=0)

    def pause_s(self, seconds: float) -> float:
        """Return by how much to slow down each step of a process so that a test can interfere in time."""
        return 0.0 if self.in_process else seconds


Check = Callable[[Case, Path], None]
"""A check of a case, with a folder for its runs. Raises AssertionError if the strategy fails it."""


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
    stopped = _stop_at(3, case, "Dropout", run, EQUAL)
    assert 3 <= len(stopped.steps) < len(whole.steps), "the run ended before it could be stopped"
    assert stopped.losses == whole.losses[: len(stopped.steps)]
    resumed = case.resume(run, "--set", "pause_s=0")
    assert resumed.losses == whole.losses
    assert_same_bits(resumed.state(), whole.state())
    assert_once_an_epoch(resumed)


def begins_again(case: Case, folder: Path) -> None:
    """Kill all members: all restart from the last checkpoint, and the result does not show it."""
    run = folder / "run"
    flags, pause_s = (EQUAL, "--checkpoint-every", "2"), case.pause_s(0.05)
    arguments = case.arguments("Dropout", run, *flags, pause_s=pause_s)
    with case.command(*arguments, run=run, slow_after=8) as running:
        running.wait_for_step(9)
        victims = running.members()
        for victim in victims:
            running.kill(victim)
        done = running.wait(code=0)
    assert not done.of("MemberFailed")
    (resumed,) = done.of("Resumed")
    assert resumed["step"] >= 2
    assert len(done.of("MemberStarted")) >= 2 * len(victims)
    assert running.all_gone()
    assert_once_an_epoch(done)
    if case.traits.equals_single:
        whole = case.train("Dropout", folder / "whole", EQUAL)
        assert done.losses == whole.losses
        assert_same_bits(done.state(), whole.state())


def goes_on_after_a_kill(case: Case, folder: Path) -> None:
    """Kill a worker: the run finishes by itself, with the same samples and the same result."""
    run, victim = folder / "run", f"worker-{case.workers - 1}"
    arguments = case.arguments("Regression", run, "--max-restarts", "0", pause_s=case.pause_s(0.03))
    with case.command(*arguments, run=run, slow_after=5) as running:
        running.wait_for_step(6)
        running.kill(victim)
        done = running.wait(code=0)
    assert [e["member"] for e in done.of("MemberLost")] == [victim]
    assert not done.of("MemberFailed")
    lost, recovered = done.of("MemberLost")[0]["time"], done.of("Recovered")[0]["time"]
    later = [e for e in done.steps if e["time"] > recovered]
    assert later, "the run ended before the kill"
    assert not any(victim in e["shares"] for e in later)
    assert running.all_gone()
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
    if case.traits.round_steps is not None:
        fields["tables"] = False
    return replace(case, strategy=strategy, fields=fields, counts_rows=rows)


def counts_every_sample_once(case: Case, folder: Path) -> None:
    """Kill two members: the weights have counted every sample once per epoch."""
    case, run, epochs = counting_case(case), folder / "run", 6
    arguments = case.arguments(
        COUNTING, run, "--checkpoint-every", "5", epochs=epochs, pause_s=case.pause_s(0.03)
    )
    with case.command(*arguments, run=run, slow_after=6) as running:
        running.wait_for_step(7)
        for member in running.members()[-2:]:
            with suppress(ProcessLookupError):  # it may have been ended for a restart already
                running.kill(member)
            time.sleep(case.pause_s(0.1))
        done = running.wait(code=0)
    assert done.of("MemberLost"), "the run ended before the kills"
    assert_once_an_epoch(done, epochs=epochs, samples=Counting.samples)
    if (every := case.traits.round_steps) is None:
        check_counts(done.state(), epochs=epochs, rows=case.counts_rows)
    else:
        check_round_counts(done.state(), running.events(), round_steps=every)


def resumes_as(case: Case, other: Case, folder: Path) -> None:
    """Stop in the middle of an epoch; resume with another strategy or number of workers."""
    run = folder / "run"
    # In rounds, steps are recorded when their round has ended.
    stopped = _stop_at(9 if case.traits.round_steps is None else 3, case, "Regression", run)
    assert len(stopped.steps) < EPOCHS * -(-SAMPLES // BATCH)
    switches = ("--strategy", other.strategy, "--workers", str(other.workers))
    resumed = case.resume(run, *switches, *other.flags, "--set", "pause_s=0")
    _as_single(case, resumed, "Regression")


def reports_the_bytes_it_sends(case: Case, folder: Path) -> None:
    """Compare the bytes of a step in the events with the kernel's count between two steps at which all
    workers wait."""
    assert case.traits.lockstep, "without lockstep, workers can't all wait before the same step"
    run, gate = folder / "run", folder / "gate"
    gate.mkdir()
    first, last = COUNTED_AT
    fields = {"epochs": 1, "gate": gate, "gates": f"{first},{last}", "width": 40_000, "lr": 1e-6}
    with harness.command(*case.arguments("Gated", run, **fields), run=run) as running:
        gates = Gates(gate, running, workers=case.workers)
        sent = []
        for number in COUNTED_AT:
            gates.wait(number)
            sent.append(gates.bytes_sent())
            gates.open(number)
        done = running.wait(code=0)
    between = [e["bytes_sent"] for e in done.steps if first <= e["step"] < last]
    assert sum(between) == pytest.approx(sent[1] - sent[0], rel=0.02)


def ends_and_evaluates_in_steps(case: Case, folder: Path) -> None:
    """Train for a number of steps in two starts, and kill a worker on the way: the run stops, ends and is
    evaluated at exactly the steps that were asked for."""
    run, steps, due = folder / "run", 17, [5, 10, 15, 17]
    length = {"steps": steps, "eval_every": "5 steps", "eval_samples": 20}
    flags = ("--checkpoint-every", "4", "--max-steps", "12")
    arguments = case.arguments("Regression", run, *flags, **length, pause_s=case.pause_s(0.05))
    with case.command(*arguments, run=run, slow_after=6) as running:
        running.wait_for_step(7)
        running.kill(f"worker-{case.workers - 1}")
        stopped = running.wait(code=0)
    assert stopped.of("MemberLost"), "the run ended before the kill"
    summary = stopped.of("RunFinished")[-1]["summary"]
    assert (summary["outcome"], summary["steps"]) == ("limit", 12)
    done = case.resume(run, "--set", "pause_s=0")
    assert [record["step"] for record in done.steps] == list(range(1, steps + 1))
    uses = {epoch: sorted(positions) for epoch, positions in done.uses_by_epoch().items()}
    whole = list(range(SAMPLES))
    if case.traits.round_steps is None:
        assert uses == {0: whole, 1: whole, 2: whole[: (steps - 2 * 7) * BATCH]}
    else:  # samples that are lost come again, in more steps of the same epoch
        *before, last = uses.values()
        assert all(positions == whole for positions in before)
        assert len(set(last)) == len(last)
    found = {event["step"]: event for event in done.of("Evaluated")}
    assert sorted(found) == due
    assert {event["samples"] for event in found.values()} == {20}
    if case.traits.equals_single:
        reference = _reference_for(case, "Regression", **length)
        for step, expected in zip(due, reference.metrics, strict=True):
            assert found[step]["metrics"] == pytest.approx(expected, rel=1e-4)


def stops_at_a_time_and_a_target(case: Case, folder: Path) -> None:
    """Stop at `--max-time`, and another run at a `--target`; resume both until the end."""
    fields: dict[str, Any] = {"eval_every": "4 steps"}
    run = folder / "run"
    stopped = case.train("Regression", run, "--max-time", "300ms", **fields, pause_s=0.03)
    assert stopped.of("RunFinished")[-1]["summary"]["outcome"] == "limit"
    whole = case.resume(run, "--set", "pause_s=0")
    assert whole.of("RunFinished")[-1]["summary"]["outcome"] == "finished"
    assert_once_an_epoch(whole)
    losses = [event["metrics"]["loss"] for event in whole.of("Evaluated")]
    target = (losses[0] + min(losses)) / 2
    run = folder / "to a target"
    epochs = EPOCHS if case.traits.equals_single else 4 * EPOCHS  # stale gradients take more steps
    flags = ("--target", f"min loss={target}")
    found = case.train("Regression", run, *flags, **fields, epochs=epochs)
    (reached,) = found.of("TargetReached")
    summary = found.of("RunFinished")[-1]["summary"]
    assert summary["steps_to_target"] == reached["step"] == found.steps[-1]["step"]
    *before, last = (event["metrics"]["loss"] for event in found.of("Evaluated"))
    assert last == reached["value"] <= target < min(before, default=math.inf)
    if case.traits.equals_single:
        reference = _reference_for(case, "Regression", **fields)
        sooner = [metrics["loss"] <= target for metrics in reference.metrics]
        assert reached["step"] == min(4 * (sooner.index(True) + 1), len(reference.losses))
    if summary["outcome"] == "target":
        found = case.resume(run)
    assert found.of("RunFinished")[-1]["summary"]["outcome"] == "finished"
    assert_once_an_epoch(found, epochs=epochs)


def learns(case: Case, folder: Path) -> None:
    """Reach an accuracy on handwritten digits, which takes updates that are right."""
    done = case.train("Digits", folder / "run")
    accuracy = done.of("Evaluated")[-1]["metrics"]["accuracy"]
    assert accuracy >= case.accuracy, f"{accuracy:.3f} of the digits, not {case.accuracy}"


def resumes_on_other_numbers_of_workers(case: Case, folder: Path) -> None:
    """Stop in the middle of an epoch; resume on one replica more, if that is possible."""
    workers = case.workers + (case.replica_size if case.workers > 1 else 0)
    resumes_as(case, replace(case, workers=workers), folder)


def evaluates_without_a_trace(case: Case, folder: Path) -> None:
    """Training does not show how often the model was evaluated."""
    often = case.train("Dropout", folder / "often", EQUAL, eval_every="3 steps")
    assert len(often.of("Evaluated")) == 7
    never = case.train("Dropout", folder / "never", EQUAL, evaluates=False)
    assert not never.of("Evaluated")
    assert often.losses == never.losses
    assert_same_bits(often.state()["model"], never.state()["model"])


def workers_join_and_leave(case: Case, folder: Path) -> None:
    """Add a replica to the live run and then remove one, if the strategy can: the result does not show it."""
    run, epochs = folder / "run", 9
    more = case.workers + case.replica_size
    numbers = [more, case.workers] if case.traits.can_shrink else [more]
    pause_s = case.pause_s(0.05)
    arguments = case.arguments("Regression", run, pause_s=pause_s, epochs=epochs)
    with case.command(*arguments, run=run, slow_after=2) as running:
        running.wait_for_step(3)
        for number in numbers:
            RunFolder.open(run).request(number)
            running.wait_for(partial(_has_workers, number))
        done = running.wait(code=0)
    assert not done.of("MemberLost")
    _as_single(case, done, "Regression", epochs=epochs)


def _has_workers(number: int, events: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether the newest view has this number of workers."""
    members = [event["members"] for event in events if event["event"] == "ViewChanged"]
    return bool(members) and sum(name.startswith(WORKER) for name in members[-1]) == number


def dies_before_its_forward(case: Case, folder: Path) -> None:
    """The last worker dies at the beginning of a step."""
    _dies(case, folder, case.workers - 1, BEGIN)


def dies_after_its_backward(case: Case, folder: Path) -> None:
    """The last worker dies when its gradients are complete."""
    _dies(case, folder, case.workers - 1, COMPUTE)


def dies_in_the_exchange(case: Case, folder: Path) -> None:
    """The last worker dies when it has given its gradients away, to a group or to servers, and waits."""
    _dies(case, folder, case.workers - 1, EXCHANGE)


def first_worker_dies(case: Case, folder: Path) -> None:
    """The worker that writes the checkpoints dies."""
    _dies(case, folder, 0, COMPUTE)


def _dies(case: Case, folder: Path, rank: int, moment: str) -> None:
    run, victim = folder / "run", f"{WORKER}-{rank}"
    death = Death(victim, step=9, moment=moment)
    flags = (EQUAL, "--checkpoint-every", "2")
    done = case.train("Regression", run, *flags, deaths=[death])
    lost = done.of("MemberLost")
    assert [event["member"] for event in lost] == [victim], f"{victim} did not die: {moment}"
    unreported: set[int] = set()
    if case.traits.elastic:
        recovered = done.of("Recovered")[0]["time"]
        unreported = {e["step"] for e in done.steps if lost[0]["time"] <= e["time"] <= recovered}
    _as_single(case, done, "Regression", unreported=unreported)


def trusts_the_network(case: Case, folder: Path) -> None:
    """Without encryption between members, the result is the same."""
    equals_single(replace(case, flags=(*case.flags, "--trust-network")), folder)


def scales_the_batch(case: Case, folder: Path) -> None:
    """Batch and learning rate follow the number of workers: here half of both, as on one worker."""

    def train(case: Case, reference: int) -> Finished:
        scaled = ("--scale-batch", "linear", "--scale-reference", str(reference))
        return case.train("Regression", folder / f"{reference}", *scaled, batch_size=2 * BATCH)

    done = train(case, 2 * case.workers)
    assert_once_an_epoch(done)
    assert {record["samples"] for record in done.steps} == {BATCH, SAMPLES % BATCH}
    if case.traits.equals_single:
        alone = replace(case, strategy="single", workers=1, flags=())
        reference = train(alone, 2) if case.workers > 1 else done
        assert done.losses == pytest.approx(reference.losses, rel=1e-5)


def trains_tables(case: Case, folder: Path) -> None:
    """Sparse tables learn as with one worker, or at all, and have the same ids."""
    import torch

    fields: dict[str, Any] = {"table_optim": "momentum", "epochs": 5}
    done = case.train("Sparse", folder / "run", **fields)
    assert_once_an_epoch(done, epochs=5)
    reference = _reference_for(case, "Sparse", **fields)
    tables = done.state()["tables"]
    assert tables.keys() == reference.tables.keys()
    for name, expected in reference.tables.items():
        assert torch.equal(tables[name]["ids"], expected["ids"])
    if not case.traits.equals_single:
        assert sum(done.losses[-7:]) < 0.75 * sum(done.losses[:7])
        return
    assert done.losses == pytest.approx(reference.losses, rel=1e-5)
    for name, expected in reference.tables.items():
        for key in ("rows", "state"):
            torch.testing.assert_close(tables[name][key], expected[key], rtol=1e-4, atol=1e-6)


def trains_row_models(case: Case, folder: Path) -> None:
    """A model that changes the rows of its tables itself sees every sample once per epoch."""
    done = case.train(COUNTING_ROWS, folder / "run")
    assert_once_an_epoch(done, samples=Counting.samples)
    check_counts(done.state(), epochs=Counting.epochs)


CHECKS: tuple[Check, ...] = (
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
"""Checks that are made with real processes, too. `resumes_as` takes a second case, and `learns` is for those
that do not equal `single`."""

IN_PROCESS: tuple[Check, ...] = (
    *(check for check in CHECKS if check is not reports_the_bytes_it_sends),
    stops_at_a_time_and_a_target,
    learns,
    evaluates_without_a_trace,
    resumes_on_other_numbers_of_workers,
    workers_join_and_leave,
    dies_before_its_forward,
    dies_after_its_backward,
    dies_in_the_exchange,
    first_worker_dies,
)
"""All checks whose members may be threads. Bytes are counted by the kernel, for processes."""


PAIRS: Mapping[Feature, Check] = {
    pairs.WORKERS: equals_single,
    pairs.FP32: equals_single,
    pairs.ELASTIC: workers_join_and_leave,
    pairs.SHRINKING: workers_join_and_leave,
    pairs.SCALING: scales_the_batch,
    pairs.TRUST: trusts_the_network,
    pairs.ACCUMULATION: equals_single_with_accumulation,
    pairs.TABLES: trains_tables,
    pairs.ROW_MODEL: trains_row_models,
}
"""What shows that a strategy works with a feature, for all that one process can have."""


def checks_of_pairs(case: Case) -> list[Check]:
    """Return the checks of `PAIRS` for what the strategy, with its codec, does not refuse."""
    config = make_strategy(case.strategy)
    codec = codec_of(config).feature
    given = [codec] if codec is not None else []
    if case.workers > 1:
        given.append(pairs.WORKERS)
    works = {feature for feature in PAIRS if refusal_of(config, [*given, feature]) is None}
    if case.workers == 1:
        works -= {pairs.ELASTIC, pairs.SHRINKING}
    return list(dict.fromkeys(check for feature, check in PAIRS.items() if feature in works))


def checks_for(case: Case) -> list[Check]:
    """Return the checks of `IN_PROCESS` that a strategy has to pass, by its traits."""
    traits = case.traits
    left_out: set[Check] = set()
    if traits.equals_single:
        left_out.add(learns)
    if not traits.lockstep:  # who computes which part depends on who is free
        left_out |= {repeats_and_resumes_bit_equal, evaluates_without_a_trace}
    if traits.round_steps is not None:  # an evaluation ends a round
        left_out.add(evaluates_without_a_trace)
    if not traits.elastic:
        left_out.add(workers_join_and_leave)
    if case.workers == 1:
        left_out |= {workers_join_and_leave, dies_in_the_exchange, first_worker_dies}
    return [check for check in IN_PROCESS if check not in left_out]


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


def _stop_at(step: int, case: Case, job: str, run: Path, *flags: str) -> Finished:
    """Train, and preempt the run after a step."""
    arguments = case.arguments(job, run, *flags, pause_s=case.pause_s(0.05))
    with case.command(*arguments, run=run, slow_after=step - 1) as running:
        running.wait_for_step(step)
        running.signal(signal.SIGTERM)
        return running.wait(code=75)


def _as_single(
    case: Case, done: Finished, job: str, *, unreported: Collection[int] = (), **fields: Any
) -> None:
    import torch

    epochs = fields.get("epochs", EPOCHS)
    assert_once_an_epoch(done, epochs=epochs)
    num_steps = epochs * -(-SAMPLES // BATCH)
    if case.traits.round_steps is None or not done.of("MemberLost"):
        assert done.steps[-1]["step"] == num_steps
    else:  # samples that are lost come again, in steps of their own
        assert done.steps[-1]["step"] >= num_steps
    if not case.equals_single:
        return
    reference = _reference_for(case, job, **fields)
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
    tables: Mapping[str, Any]


def _reference_for(case: Case, job: str, **fields: Any) -> Reference:
    """Train the job of a case with one worker."""
    return _reference(case.in_process, job, tuple(sorted({**case.fields, **fields}.items())))


@lru_cache
def _reference(in_process: bool, job: str, fields: tuple[tuple[str, Any], ...]) -> Reference:
    """Train with one worker; once for all cases that are compared with it."""
    alone = Case("single", workers=1, in_process=in_process)
    with tempfile.TemporaryDirectory() as folder:
        done = alone.train(job, Path(folder) / "run", **dict(fields))
        metrics = [event["metrics"] for event in done.of("Evaluated")]
        state = done.state()
        return Reference(done.losses, metrics, state["model"], state.get("tables", {}))
