"""Training with real processes and an elastic strategy, whose members are killed."""

from __future__ import annotations

import dataclasses
import itertools
import os
import signal
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from traits import Lockstep, WorkQueue

from manyhands.coordinator.context import RunContext
from manyhands.coordinator.coordinator import Coordinator
from manyhands.coordinator.driver import Driver
from manyhands.coordinator.options import RunOptions
from manyhands.errors import MemberError, WeightsLost
from manyhands.events import events as ev
from manyhands.events.sinks import Sink, Stream
from manyhands.hosts.launchers.local import LocalLauncher
from manyhands.hosts.timeouts import Timeouts
from manyhands.hosts.view import SERVER, WORKER
from manyhands.runs import checkpoints
from manyhands.runs.folder import RunFolder

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent
SAMPLES, BATCH, EPOCHS = 98, 16, 4
JOB = """
import time
from dataclasses import dataclass
import torch
from manyhands.testing.jobs import Regression

@dataclass
class Plain(Regression):
    epochs: int = {epochs}
    clip_norm: float | None = None
    def optimizer(self, params):
        return torch.optim.SGD(params, lr=0.05)
    def schedule(self, optimizer, num_steps):
        return None
"""
PARTS = WorkQueue()
STEPS = Lockstep()


@dataclass
class Watcher(Sink):
    """Keeps the events, and acts on them once each time that it is told to."""

    coordinator: Coordinator | None = None
    seen: list[ev.Event] = field(default_factory=list)
    acts: list[tuple[Callable[[ev.Event], bool], Callable[[], None]]] = field(default_factory=list)

    def handle(self, event: ev.Event) -> None:
        self.seen.append(event)
        if self.acts and self.acts[0][0](event):
            self.acts.pop(0)[1]()

    def close(self) -> None:
        pass

    def of(self, kind: type[ev.Event]) -> list[Any]:
        return [event for event in self.seen if isinstance(event, kind)]

    def stop(self) -> None:
        """As Ctrl-C does."""
        assert self.coordinator is not None
        self.coordinator.interrupt(signal.SIGINT)

    def kill(self, member: str, number: signal.Signals = signal.SIGKILL) -> None:
        pids = {event.member: event.pid for event in self.of(ev.MemberStarted)}
        os.kill(pids[member], number)


@pytest.fixture(autouse=True)
def members_find_the_strategy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(HERE), prepend=os.pathsep)


def conduct(
    tmp_path: Path,
    config: Lockstep,
    watcher: Watcher,
    *,
    workers: int = 3,
    max_restarts: int = 0,
    pause_s: float = 0.02,
    epochs: int = EPOCHS,
    timeouts: Timeouts | None = None,
    outcome: str = "finished",
) -> Driver:
    tmp_path.mkdir(exist_ok=True)
    job = tmp_path / "job.py"
    job.write_text(JOB.format(epochs=epochs))
    options = RunOptions(
        job=str(job),
        strategy="ledger-sync" if config.traits.lockstep else "ledger",
        workers=workers,
        settings={"pause_s": str(pause_s)},
        device="cpu",
        max_restarts=max_restarts,
        config=config,
        programs={WORKER: "ledger", SERVER: "ledger"},
    )
    run = RunFolder.create("run", path=tmp_path / "run")
    run.write_config({})
    with Coordinator(LocalLauncher(), logs=run.logs, timeouts=timeouts) as coordinator:
        driver = Driver(RunContext(coordinator, options, run, Stream([watcher])))
        watcher.coordinator = coordinator
        try:
            assert driver.drive() == outcome
        finally:
            coordinator.stop()
    return driver


def at_step(number: int) -> Callable[[ev.Event], bool]:
    return lambda event: isinstance(event, ev.StepCommitted) and event.step >= number


def assert_whole(driver: Driver, watcher: Watcher) -> None:
    """Every sample was used once, all is saved, each epoch was evaluated."""
    steps = sorted(watcher.of(ev.StepCommitted), key=lambda step: step.step)
    assert [step.step for step in steps] == list(range(1, len(steps) + 1))
    used = Counter(
        (step.epoch, i)
        for step in steps
        for ranges in step.shares.values()
        for low, high in ranges
        for i in range(low, high)
    )
    # In the last epoch of one that was stopped, only the first so many.
    order = ((epoch, i) for epoch in itertools.count() for i in range(SAMPLES))
    assert used == Counter(itertools.islice(order, used.total()))
    newest, complaints = checkpoints.newest(driver.context.run.path)
    assert not complaints
    assert newest is not None
    assert newest.step == len(steps)
    assert driver.plan is not None
    assert driver.plan.samples_used == used.total()
    evaluated = [event.epoch for event in watcher.of(ev.Evaluated)]
    assert evaluated == list(range(len(evaluated)))
    assert len(evaluated) >= used.total() // SAMPLES - 1


def test_without_lockstep_nothing_is_lost_and_staleness_is_reported(tmp_path: Path) -> None:
    watcher = Watcher()
    driver = conduct(tmp_path, PARTS, watcher, pause_s=0.005)
    assert_whole(driver, watcher)
    (view,) = watcher.of(ev.ViewChanged)
    assert (view.placement, view.transport) == ("in one file", "file")
    staleness = driver.run_stats.staleness
    assert staleness is not None
    assert staleness.count >= SAMPLES * EPOCHS / BATCH
    assert staleness.max <= 2
    assert staleness.mean > 0
    assert all(step.staleness is not None for step in watcher.of(ev.StepCommitted))


@pytest.mark.parametrize(
    "config", [pytest.param(PARTS, marks=pytest.mark.long), STEPS], ids=["parts", "steps"]
)
def test_the_others_continue_after_a_death(tmp_path: Path, config: Lockstep) -> None:
    watcher = Watcher()
    watcher.acts.append((at_step(9), lambda: watcher.kill("worker-0")))
    driver = conduct(tmp_path, config, watcher)
    assert_whole(driver, watcher)
    assert len(watcher.of(ev.Evaluated)) == EPOCHS
    (lost,) = watcher.of(ev.MemberLost)
    assert (lost.member, lost.reason, lost.workers) == ("worker-0", "killed by SIGKILL", 2)
    (recovered,) = watcher.of(ev.Recovered)
    assert recovered.view == 2
    split = [recovered.detection_s, recovered.view_s, recovered.redo_s]
    assert recovered.seconds == pytest.approx(sum(split))
    assert min(split) >= 0
    following = watcher.seen[watcher.seen.index(recovered) + 1]
    assert isinstance(following, ev.StepCommitted | ev.Evaluated)
    assert watcher.of(ev.ViewChanged)[-1].members == ("worker-1", "worker-2")
    newest, _ = checkpoints.newest(driver.context.run.path)
    assert newest is not None
    assert newest.workers == 2


def test_in_lockstep_a_death_changes_no_number(tmp_path: Path) -> None:
    """The step in flight is done again with the same samples: losses as if nobody had died."""
    quiet, struck = Watcher(), Watcher()
    conduct(tmp_path / "quiet", STEPS, quiet, pause_s=0.0, workers=2)
    struck.acts.append((at_step(9), lambda: struck.kill("worker-1")))
    conduct(tmp_path / "struck", STEPS, struck, workers=2)
    losses = {step.step: step.loss for step in quiet.of(ev.StepCommitted)}
    # Of the steps whose reports died with the victim only a part of the loss is known.
    after = itertools.dropwhile(lambda e: not isinstance(e, ev.Recovered), struck.seen)
    later = {event.step: event.loss for event in after if isinstance(event, ev.StepCommitted)}
    assert len(later) > 5
    assert later == pytest.approx({step: losses[step] for step in later}, rel=1e-4)
    last, wanted = struck.of(ev.Evaluated)[-1], quiet.of(ev.Evaluated)[-1]
    assert last.metrics == pytest.approx(wanted.metrics, rel=1e-4)


@pytest.mark.parametrize(
    "config", [pytest.param(PARTS, marks=pytest.mark.long), STEPS], ids=["parts", "steps"]
)
def test_the_dead_are_replaced_under_new_names(tmp_path: Path, config: Lockstep) -> None:
    watcher = Watcher()
    watcher.acts += [
        (at_step(9), lambda: watcher.kill("worker-0")),
        (lambda e: isinstance(e, ev.StepCommitted) and "worker-2" in e.shares, watcher.stop),
    ]
    driver = conduct(
        tmp_path, config, watcher, workers=2, max_restarts=1, epochs=900, outcome="interrupted"
    )
    assert_whole(driver, watcher)
    views = [view.members for view in watcher.of(ev.ViewChanged)]
    assert views == [("worker-0", "worker-1"), ("worker-1",), ("worker-1", "worker-2")]
    assert (driver.membership.num_lost, driver.membership.num_replaced) == (1, 1)
    assert len(watcher.of(ev.Recovered)) == 1, "a replacement is no recovery"


def test_the_end_does_not_wait_for_new_members(tmp_path: Path) -> None:
    watcher = Watcher()
    watcher.acts.append((at_step(20), lambda: watcher.kill("worker-1")))
    driver = conduct(tmp_path, PARTS, watcher, workers=2, max_restarts=1, pause_s=0.005)
    assert_whole(driver, watcher)
    assert (driver.membership.num_lost, driver.membership.num_replaced) == (1, 0)


def test_a_new_member_that_fails_to_start_is_replaced(tmp_path: Path) -> None:
    watcher = Watcher()

    def kill_and_spoil() -> None:
        (tmp_path / "job.py").write_text("import nonesuch")
        watcher.kill("worker-1")

    def twice(_: ev.Event) -> bool:
        return len([n for n in watcher.of(ev.Noticed) if "failed to start" in n.message]) == 2

    watcher.acts += [(at_step(5), kill_and_spoil), (twice, watcher.stop)]
    driver = conduct(
        tmp_path, PARTS, watcher, workers=2, max_restarts=2, epochs=900, outcome="interrupted"
    )
    assert_whole(driver, watcher)
    told = [
        notice.message for notice in watcher.of(ev.Noticed) if "failed to start" in notice.message
    ]
    assert len(told) == 2
    assert "nonesuch" in told[0]
    assert driver.membership.num_replaced == 0


@pytest.mark.long
@pytest.mark.parametrize("config", [PARTS, STEPS], ids=["parts", "steps"])
def test_a_frozen_member_is_ended_and_the_others_continue(tmp_path: Path, config: Lockstep) -> None:
    watcher = Watcher()
    watcher.acts.append((at_step(5), lambda: watcher.kill("worker-1", signal.SIGSTOP)))
    # A process that starts on a busy machine may be silent for some seconds, too.
    timeouts = dataclasses.replace(Timeouts(), silence_s=10.0, beat_s=0.2)
    driver = conduct(tmp_path, config, watcher, workers=2, timeouts=timeouts)
    assert_whole(driver, watcher)
    (lost,) = watcher.of(ev.MemberLost)
    assert "sent nothing for" in lost.reason
    (recovered,) = watcher.of(ev.Recovered)
    if config is STEPS:
        # It froze in the middle of a step, and its last beat was sent a moment before.
        assert recovered.detection_s > 2


@pytest.mark.long
def test_two_deaths_at_once(tmp_path: Path) -> None:
    watcher = Watcher()

    def both() -> None:
        watcher.kill("worker-0")
        watcher.kill("worker-2")

    watcher.acts.append((at_step(9), both))
    driver = conduct(tmp_path, PARTS, watcher)
    assert_whole(driver, watcher)
    assert {lost.member for lost in watcher.of(ev.MemberLost)} == {"worker-0", "worker-2"}
    assert watcher.of(ev.ViewChanged)[-1].members == ("worker-1",)


def test_without_members_the_run_fails(tmp_path: Path) -> None:
    watcher = Watcher()
    watcher.acts.append((at_step(5), lambda: watcher.kill("worker-0")))
    with pytest.raises(MemberError, match="worker-0 killed by SIGKILL") as failed:
        conduct(tmp_path, PARTS, watcher, workers=1)
    assert failed.value.exit_code == 137


def test_without_members_all_may_restart(tmp_path: Path) -> None:
    watcher = Watcher()
    watcher.acts.append((at_step(5), lambda: watcher.kill("worker-0")))
    with pytest.raises(WeightsLost, match="killed by SIGKILL") as lost:
        conduct(tmp_path, PARTS, watcher, workers=1, max_restarts=1)
    assert lost.value.exit_code == 137
    assert not watcher.of(ev.MemberFailed)
    assert [(e.member, e.workers) for e in watcher.of(ev.MemberLost)] == [("worker-0", 0)]


@pytest.mark.long
def test_servers_stand_beside_the_workers_and_may_die(tmp_path: Path) -> None:
    watcher = Watcher()
    watcher.acts.append((at_step(9), lambda: watcher.kill("server-0")))
    config = dataclasses.replace(PARTS, servers=2)
    driver = conduct(tmp_path, config, watcher, workers=2)
    assert_whole(driver, watcher)
    first, second = watcher.of(ev.ViewChanged)
    assert first.members == ("worker-0", "worker-1", "server-0", "server-1")
    assert (first.servers, second.servers) == (2, 1)
    assert second.members == ("worker-0", "worker-1", "server-1")
    assert all(set(s.shares) <= {"worker-0", "worker-1"} for s in watcher.of(ev.StepCommitted))
