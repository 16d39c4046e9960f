"""From options to a finished run: connects coordinator, driver, sinks and run folder.

A run has one driver per start: when the weights are lost, all members start again from the last
checkpoint.
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from manyhands.coordinator.coordinator import Coordinator, on_signals
from manyhands.coordinator.driver import Driver
from manyhands.coordinator.options import RunOptions
from manyhands.coordinator.plan import TrainingPlan
from manyhands.errors import (
    Diverged,
    Interrupted,
    ManyhandsError,
    RecordError,
    UsageError,
    WeightsLost,
)
from manyhands.events import Console, JsonlSink, Queued, Sink, Stream, TensorBoardSink
from manyhands.events.events import Noticed, RunFinished, RunStarted
from manyhands.hosts.launchers import Launcher, LocalLauncher, cores
from manyhands.hosts.machine import versions
from manyhands.hosts.timeouts import Timeouts
from manyhands.runs import checkpoints
from manyhands.runs.checkpoints import Manifest
from manyhands.runs.folder import EVENTS, RunFolder
from manyhands.threads import on_process_failure
from manyhands.transport import Authority

FOLDER_CHECK_S = 1.0
"""How often to look whether the run folder is still there."""
EXIT_CODES = {"finished": 0, "early-stopped": 0, "interrupted": 130, "preempted": 75}


def train(
    options: RunOptions,
    run: RunFolder,
    *,
    console: Console,
    checkpoint: Manifest | None = None,
    control: str = "unix",
    timeouts: Timeouts | None = None,
    launcher: Launcher | None = None,
    authority: Authority | None = None,
    on_ready: Callable[[], None] = lambda: None,
) -> int:
    """Train in the run's folder. Returns the exit code; a user error is raised, not printed.

    `on_ready` is called once nothing can go wrong any more: only then may the folder change.
    """
    run.lock()
    run.take_request()  # of an earlier start
    options = replace(options, resumed=(run.path / EVENTS).exists())

    def ready() -> None:
        checkpoints.clear_partials(run.path)
        for step in checkpoints.steps(run.path):
            if checkpoint is not None and step > checkpoint.step:
                # Not deleted: it may be all that the user has. Its steps are void from now on.
                checkpoints.set_aside(checkpoints.final(run.path, step))
                run.forget_summary()  # its steps are void; otherwise it counts until there is a new one
        on_ready()

    try:
        stream = Stream(
            [JsonlSink(run.path / EVENTS), console, Queued(TensorBoardSink(run.path / "tb"))]
        )
        try:
            with Coordinator(
                launcher or LocalLauncher(),
                logs=run.logs,
                timeouts=timeouts,
                control=control,
                keys=options.needs_keys,
                authority=authority,
            ) as coordinator:
                on_signals(coordinator)
                on_process_failure(coordinator.thread_failed)
                _announce(coordinator, options, run, stream, resumed_from=checkpoint)
                folder_watch = FolderWatch(run)
                starts: list[Driver] = []

                def tick() -> None:
                    console.tick()
                    folder_watch.check(starts[-1].plan)

                def start(source: Manifest | None, before: Driver | None = None) -> Driver:
                    return Driver(
                        coordinator,
                        # A newer checkpoint has the schedule as it was asked for.
                        options if source == checkpoint else replace(options, schedule=""),
                        run,
                        stream,
                        checkpoint=source,
                        before=before,
                        on_ready=ready,
                        tick=tick,
                    )

                starts.append(start(checkpoint))
                return _run(starts, lambda before: start(_end_start(before), before))
        finally:
            stream.close()
    finally:
        run.unlock()


class FolderWatch:
    """Notices that the run folder is gone: without it nothing can be saved, and nobody would find the run."""

    def __init__(self, run: RunFolder) -> None:
        self._run = run
        self._checked = time.monotonic()

    def check(self, plan: TrainingPlan | None) -> None:
        """Raise if it is gone. Looks once in a while."""
        now = time.monotonic()
        if now - self._checked < FOLDER_CHECK_S:
            return
        self._checked = now
        if self._run.is_gone:
            step = plan.committed_step if plan is not None else 0
            raise RecordError(
                f"The run folder {self._run.path} was deleted or moved: nothing can be saved any more. The "
                f"run was stopped after step {step}."
            )


def _announce(
    coordinator: Coordinator,
    options: RunOptions,
    run: RunFolder,
    stream: Stream,
    *,
    resumed_from: Manifest | None = None,
) -> None:
    new_weights = options.init_from is not None and resumed_from is None
    stream.emit(
        RunStarted(
            run=str(run.path),
            job=options.job,
            strategy=options.strategy,
            workers=options.workers,
            versions=versions(),
            init_from=str(options.init_from) if new_weights else None,
        )
    )
    if options.workers > cores() and coordinator.launcher.shares_cores:
        message = (
            f"{options.workers} workers share {cores()} cores; "
            "more workers than cores are slower than as many"
        )
        stream.emit(Noticed(message=message))


def _end_start(driver: Driver) -> Manifest | None:
    """The weights are lost: end the members that are left. Returns the checkpoint to start again from."""
    run, membership, options = driver.run, driver.membership, driver.options
    driver.coordinator.end_members()
    checkpoint, complaints = checkpoints.last_intact(run.path)
    source = f"checkpoints/{checkpoint.name}" if checkpoint else "the beginning: nothing was saved"
    skipped = "".join(f" {complaint} It is skipped." for complaint in complaints)
    message = f"the weights are lost; all members start again from {source}.{skipped}"
    driver.stream.emit(Noticed(message=message))
    if membership.pool.target != options.workers:
        run.request(membership.pool.target)  # as requested before
    return checkpoint


def _run(starts: list[Driver], start_again: Callable[[Driver], Driver]) -> int:
    """Train and end the run: whatever happens, members are gone and the summary is written."""
    error: ManyhandsError | None = None
    try:
        outcome = _drive(starts, start_again)
        code = EXIT_CODES[outcome]
    except Interrupted as caught:
        code = caught.exit_code
        error, outcome = caught, "preempted" if code == EXIT_CODES["preempted"] else "interrupted"
    except Diverged as caught:
        error, outcome, code = caught, "diverged", caught.exit_code
    except RecordError:
        raise  # there is nowhere to write the summary
    except ManyhandsError as caught:
        error, outcome, code = caught, "failed", caught.exit_code
    driver = starts[-1]
    driver.coordinator.stop()
    if isinstance(error, UsageError) and not any(each.run_stats.samples for each in starts):
        raise error
    run, injector = driver.run, driver.injector
    if driver.plan is not None:
        driver.plan.best.keep(checkpoints.steps(run.path))
    done = outcome in ("finished", "early-stopped")
    summary = driver.run_stats.summary(
        driver.options,
        driver.plan,
        outcome=outcome,
        checkpoint=driver.checkpoint_tracker.newest,
        error=str(error) if error else None,
        num_lost=driver.membership.num_lost,
        num_replaced=driver.membership.num_replaced,
        num_restarts=driver.membership.num_restarts,
        num_injected=len(injector.faults) if injector else 0,
        chaos=injector.summary(finished=done) if injector else None,
    )
    try:
        if done or run.summary is None or any(each.run_stats.samples for each in starts):
            run.write_summary(summary)  # otherwise the summary of the previous start still holds
    except OSError as caught:
        raise RecordError(f"{run.path} can't be written: {caught}") from caught
    advice, command = ("", None) if done else _advice(starts, outcome)
    driver.stream.emit(
        RunFinished(outcome=outcome, summary=summary, resume_command=command, advice=advice)
    )
    return code


def _advice(starts: Sequence[Driver], outcome: str) -> tuple[str, str | None]:
    """What to do after a run that was not finished, and the command that resumes it."""
    driver = starts[-1]
    command = f"manyhands resume {shlex.quote(str(driver.run.path))}"
    if place := driver.coordinator.launcher.again:
        command += f" {place}"  # without it, all members would start on this machine
    saved, job = driver.checkpoint_tracker.newest, driver.options.job
    if outcome == "diverged":
        if not saved:
            return (
                "Nothing good was saved. Train again with a lower learning rate, warm-up or clip_norm.",
                None,
            )
        lr = driver.membership.roster.facts.all_fields.get("lr")
        if isinstance(lr, float):
            return "A lower learning rate may help.", f"{command} --set lr={lr / 10:g}"
        return "It would diverge again. Lower the learning rate of the job first.", command
    if driver.failures.would_repeat and not any(each.run_stats.samples for each in starts):
        if not saved:
            return (
                f"Nothing was trained, and it would fail again. Correct {job}, then train again.",
                None,
            )
        return f"It would fail again. Correct {job} first.", command
    return "", command


def _drive(starts: list[Driver], start_again: Callable[[Driver], Driver]) -> str:
    while True:
        try:
            return starts[-1].drive()
        except WeightsLost:
            starts.append(start_again(starts[-1]))


def rehearse(
    options: RunOptions,
    folder: Path,
    *,
    control: str = "unix",
    launcher: Launcher | None = None,
    authority: Authority | None = None,
    timeouts: Timeouts | None = None,
    sinks: Sequence[Sink] = (),
) -> Driver:
    """Do everything but train: job, strategy and cluster, with real members. Raises what is wrong."""
    run = RunFolder.create("check", path=folder)
    with Coordinator(
        launcher or LocalLauncher(),
        logs=run.logs,
        control=control,
        keys=options.needs_keys,
        authority=authority,
        timeouts=timeouts,
    ) as coordinator:
        on_signals(coordinator)
        on_process_failure(coordinator.thread_failed)
        stream = Stream(sinks)
        _announce(coordinator, options, run, stream)
        driver = Driver(coordinator, replace(options, rehearse=True), run, stream)
        driver.drive()
    return driver
