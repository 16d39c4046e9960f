"""Runs a job from options to summary: connects coordinator, driver, sinks and run folder.

A run has one driver per start: when the weights are lost, all members restart from the last
checkpoint.
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from manyhands.coordinator.context import RunContext
from manyhands.coordinator.coordinator import Coordinator
from manyhands.coordinator.driver import Driver
from manyhands.coordinator.options import LaunchPlan, RunOptions
from manyhands.coordinator.plan import LIMIT, TARGET, TrainingPlan
from manyhands.errors import (
    Diverged,
    Interrupted,
    ManyhandsError,
    RecordError,
    UsageError,
    WeightsLost,
)
from manyhands.events import Console, JsonlSink, Queued, Sink, Stream, TensorBoardSink
from manyhands.events.events import RunFinished, RunStarted
from manyhands.events.units import show_time
from manyhands.hosts.launchers.local import cores
from manyhands.hosts.machine import versions
from manyhands.hosts.stop_signals import on_stop_signals, signals_restored
from manyhands.runs import checkpoints
from manyhands.runs.checkpoints import Manifest
from manyhands.runs.folder import EVENTS, RunFolder
from manyhands.threads import on_process_failure

FOLDER_CHECK_S = 1.0
"""Interval of checks that the run folder still exists."""
DONE = ("finished", "early-stopped")
EXIT_CODES = {
    **dict.fromkeys((*DONE, LIMIT, TARGET), 0),
    "interrupted": 130,
    "preempted": 75,
}


@dataclass(frozen=True)
class Ending:
    """How a start of a run ended."""

    run: Path
    outcome: str
    error: ManyhandsError | None
    """The error that ended it; it is in the summary already."""
    saved: str | None
    """The newest checkpoint, such as "checkpoints/step-100"."""

    @property
    def exit_code(self) -> int:
        return self.error.exit_code if self.error else EXIT_CODES[self.outcome]


def train(
    options: RunOptions,
    run: RunFolder,
    launch_plan: LaunchPlan,
    *,
    console: Console | None,
    checkpoint: Manifest | None = None,
    on_ready: Callable[[], None] = lambda: None,
) -> Ending:
    """Train in the run's folder. A user error before the first step is raised; it leaves no summary.

    `on_ready` is called once nothing can go wrong any more: only then may the folder change.
    """
    with ExitStack() as stack:
        stack.enter_context(signals_restored())  # at the end: a late Ctrl-C interrupts no clean-up
        run.lock()
        stack.callback(run.unlock)
        run.take_request()  # of an earlier start
        options = replace(options, resumed=(run.path / EVENTS).exists())
        shown = [] if console is None else [console]
        sinks = [JsonlSink(run.path / EVENTS), *shown, Queued(TensorBoardSink(run.path / "tb"))]
        stream = Stream(sinks)
        stack.callback(stream.close)
        coordinator = stack.enter_context(_coordinator(options, run, launch_plan))
        context = RunContext(coordinator, options, run, stream)
        _announce(context, resumed_from=checkpoint)
        folder_watch = FolderWatch(run)
        starts: list[Driver] = []

        def ready(source: Manifest | None) -> None:
            checkpoints.clear_partials(run.path)
            for step in checkpoints.steps(run.path):
                if source is not None and step > source.step:
                    # Not deleted: it may be all that the user has. Its steps are void from now on.
                    checkpoints.set_aside(checkpoints.final(run.path, step))
                    run.forget_summary()  # its steps are void; otherwise it counts until there is a new one
            on_ready()

        def on_poll() -> None:
            if console is not None:
                console.tick()
            folder_watch.check(starts[-1].plan)

        def start(source: Manifest | None, before: Driver | None = None) -> None:
            # A newer checkpoint already has the requested schedule.
            own = options if source == checkpoint else replace(options, schedule="")
            starts.append(
                Driver(
                    replace(context, options=own),
                    checkpoint=source,
                    before=before,
                    on_ready=lambda: ready(source),
                    on_poll=on_poll,
                )
            )

        def drive() -> str:
            while True:
                try:
                    return starts[-1].drive()
                except WeightsLost:
                    start(_end_start(starts[-1]), starts[-1])

        start(checkpoint)
        return _run(starts, drive)


@contextmanager
def _coordinator(
    options: RunOptions, run: RunFolder, launch_plan: LaunchPlan
) -> Iterator[Coordinator]:
    with Coordinator(
        launch_plan.launcher,
        logs=run.logs,
        timeouts=launch_plan.timeouts,
        control=launch_plan.control,
        keys=options.needs_keys,
        authority=launch_plan.authority,
    ) as coordinator:
        # Ctrl-C, a scheduler's SIGTERM or SIGUSR1, the hang-up of a terminal
        on_stop_signals(lambda got, _frame: coordinator.interrupt(got))
        before = on_process_failure(coordinator.thread_failed)
        try:
            yield coordinator
        finally:
            on_process_failure(before)


class FolderWatch:
    """Detects that the run folder was deleted or moved: nothing can be saved without it."""

    def __init__(self, run: RunFolder) -> None:
        self._run = run
        self._checked = time.monotonic()

    def check(self, plan: TrainingPlan | None) -> None:
        """Raise if it is gone. Checks once per FOLDER_CHECK_S."""
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


def _announce(context: RunContext, *, resumed_from: Manifest | None = None) -> None:
    options, stream = context.options, context.stream
    new_weights = options.init_from is not None and resumed_from is None
    stream.emit(
        RunStarted(
            run=str(context.run.path),
            job=options.origin or options.job,
            strategy=options.strategy,
            workers=options.workers,
            versions=versions(),
            init_from=str(options.init_from) if new_weights else None,
        )
    )
    if options.workers > cores() and context.coordinator.launcher.shares_cores:
        stream.notice(
            f"{options.workers} workers share {cores()} cores; "
            "training is slower with more workers than cores"
        )


def _end_start(driver: Driver) -> Manifest | None:
    """End the remaining members after the weights were lost. Returns the checkpoint to restart from."""
    run, membership, options = driver.context.run, driver.membership, driver.options
    driver.coordinator.end_members()
    checkpoint, complaints = checkpoints.last_intact(run.path)
    source = f"checkpoints/{checkpoint.name}" if checkpoint else "the beginning: nothing was saved"
    skipped = "".join(f" {complaint} It is skipped." for complaint in complaints)
    driver.stream.notice(f"the weights are lost; all members restart from {source}.{skipped}")
    if membership.pool.target != options.workers:
        run.request(membership.pool.target)  # as requested before
    return checkpoint


def _run(starts: Sequence[Driver], drive: Callable[[], str]) -> Ending:
    """Train and end the run. In every case the members are ended and the summary is written."""
    error: ManyhandsError | None = None
    try:
        outcome = drive()
    except RecordError:
        raise  # there is nowhere to write the summary
    except ManyhandsError as caught:
        error = caught
        if isinstance(caught, Interrupted):
            preempted = caught.exit_code == EXIT_CODES["preempted"]
            outcome = "preempted" if preempted else "interrupted"
        else:
            outcome = "diverged" if isinstance(caught, Diverged) else "failed"
    driver = starts[-1]
    driver.coordinator.stop()
    if isinstance(error, UsageError) and not any(each.run_stats.samples for each in starts):
        raise error
    run = driver.context.run
    if driver.plan is not None:
        driver.plan.best.keep(checkpoints.steps(run.path))
    done = outcome in DONE
    summary = _summary(driver, outcome, str(error) if error else None)
    try:
        if done or run.summary is None or any(each.run_stats.samples for each in starts):
            run.write_summary(summary)  # otherwise the summary of the previous start still holds
    except OSError as caught:
        raise RecordError(f"{run.path} can't be written: {caught}") from caught
    advice, command = ("", None) if done else _advice(starts, outcome)
    driver.stream.emit(
        RunFinished(outcome=outcome, summary=summary, resume_command=command, advice=advice)
    )
    return Ending(run.path, outcome, error, driver.checkpoint_tracker.newest)


def _summary(driver: Driver, outcome: str, error: str | None) -> dict[str, Any]:
    """Return the content of summary.json. Steps, samples and epochs count the whole run, times this start."""
    plan, stats, membership = driver.plan, driver.run_stats, driver.membership
    injector, checkpoint = driver.injector, driver.checkpoint_tracker.newest
    final: Mapping[str, float] = plan.last_metrics if plan else {}
    if not final and stats.last_loss is not None:
        final = {"loss": stats.last_loss}
    none = None if checkpoint else 0  # a run that failed to resume still has what is saved
    best = plan.best.evaluation if plan else None
    return {
        "outcome": outcome,
        "limit": _limit(driver, outcome),
        "strategy": driver.options.strategy,
        "workers": driver.options.workers,
        "steps": plan.committed_step if plan else none,
        "samples": plan.samples_used if plan else none,
        "epochs": round(plan.samples_used / plan.config.num_samples, 3) if plan else none,
        **stats.speed(),
        "final_metrics": final,
        "monitor": str(plan.config.monitor) if plan and plan.config.has_eval else None,
        "best_metrics": {**best.metrics, "step": best.step} if best and best.metrics else None,
        "target": driver.options.target or None,
        **stats.to_target(),
        "bytes_sent": stats.bytes_sent,
        "pushes": stats.audit(),
        "staleness": stats.staleness.to_dict() if stats.staleness else None,
        "lost": membership.num_lost,
        "replaced": membership.num_replaced,
        "begun_again": membership.num_full_restarts,
        "injected": len(injector.faults) if injector else 0,
        "chaos": injector.summary(finished=outcome in (*DONE, LIMIT, TARGET)) if injector else None,
        "checkpoint": checkpoint,
        "error": error,
    }


def _limit(driver: Driver, outcome: str) -> str | None:
    """The flag that ended this start, as it was typed."""
    options, plan = driver.options, driver.plan
    if outcome == TARGET:
        return f"--target {options.target}"
    if outcome != LIMIT:
        return None
    if plan is not None and plan.limited:
        return f"--max-steps {options.max_steps}"
    return f"--max-time {show_time(options.max_time_s or 0.0)}"


def _advice(starts: Sequence[Driver], outcome: str) -> tuple[str, str | None]:
    """Return what to do after a run that was not finished, and the command that resumes it."""
    driver = starts[-1]
    command = f"manyhands resume {shlex.quote(str(driver.context.run.path))}"
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
                f"Nothing was trained, and it would fail again. Correct {driver.options.origin or job}, then "
                "train again.",
                None,
            )
        return f"It would fail again. Correct {job} first.", command
    return "", command


def rehearse(
    options: RunOptions, folder: Path, launch_plan: LaunchPlan, *, sinks: Sequence[Sink] = ()
) -> Driver:
    """Do everything but train: job, strategy and cluster, with real members. Raises what is wrong."""
    run = RunFolder.create("check", path=folder)
    with _coordinator(options, run, launch_plan) as coordinator:
        stream = Stream(sinks)
        context = RunContext(coordinator, replace(options, rehearse=True), run, stream)
        _announce(context)
        driver = Driver(context)
        driver.drive()
    return driver
