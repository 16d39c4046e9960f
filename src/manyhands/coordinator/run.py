"""From options to a finished run: puts coordinator, conductor, sinks and run folder together."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from manyhands.coordinator.coordinator import Coordinator, on_signals
from manyhands.coordinator.driver import Driver
from manyhands.coordinator.options import RunOptions
from manyhands.errors import (
    Diverged,
    Interrupted,
    ManyhandsError,
    RecordError,
    UsageError,
    WeightsLost,
)
from manyhands.events import Console, JsonlSink, Queued, Sink, Stream, TensorBoardSink
from manyhands.events.events import Noticed, RunFinished
from manyhands.hosts.launchers import Launcher, LocalLauncher
from manyhands.hosts.machine import versions
from manyhands.hosts.timeouts import Timeouts
from manyhands.hosts.view import SERVER, WORKER
from manyhands.runs import checkpoints
from manyhands.runs.checkpoints import Manifest
from manyhands.runs.folder import EVENTS, RunFolder
from manyhands.threads import on_process_failure
from manyhands.transport import Authority

PROGRAMS = {WORKER: "manyhands.worker.main", SERVER: "manyhands.worker.server"}
"""What a member runs, by its role."""
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
    """Train in the run's folder; the exit code. A mistake of the person is raised, not told.

    `on_ready` is called when nothing stands in the way any more: what changes the folder waits till then.
    """
    run.lock()
    run.take_request()  # of a life before this one
    resumed = (run.path / EVENTS).exists()

    def ready() -> None:
        checkpoints.clear_partials(run.path)
        for step in checkpoints.steps(run.path):
            if checkpoint is not None and step > checkpoint.step:
                # Not deleted: it may be all that somebody has. Its steps are void from now on.
                checkpoints.set_aside(checkpoints.final(run.path, step))
                run.forget_summary()  # of steps that are void; else it counts until there is a new one
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
                on_process_failure(coordinator.broke)

                first = checkpoint

                def life(before: Driver | None) -> Driver:
                    # What was asked for is done by the time of a newer checkpoint.
                    anew = replace(options, schedule="")
                    return Driver(
                        coordinator,
                        options if checkpoint == first else anew,
                        run,
                        stream,
                        entries=PROGRAMS,
                        checkpoint=checkpoint,
                        resumed=resumed or before is not None,
                        before=before,
                        on_ready=ready,
                        tick=console.tick,
                        versions=versions(),
                    )

                def again(before: Driver) -> Driver:
                    nonlocal checkpoint
                    checkpoint = _begin_again(before)
                    return life(before)

                return _conduct([life(None)], again)
        finally:
            stream.close()
    finally:
        run.unlock()


def _begin_again(driver: Driver) -> Manifest | None:
    """Nobody is left who has the weights: end the others, too. The checkpoint to begin again from."""
    run, membership, options = driver.run, driver.membership, driver.options
    driver.coordinator.end_members()
    checkpoint, complaints = checkpoints.last_sound(run.path)
    source = f"checkpoints/{checkpoint.name}" if checkpoint else "the beginning: nothing was saved"
    passed_over = "".join(f" {complaint} It is passed over." for complaint in complaints)
    message = f"the weights are lost, and all begin again, from {source}.{passed_over}"
    driver.stream.emit(Noticed(message=message))
    if membership.wanted != options.workers:
        run.request(membership.wanted)  # as was asked for before
    return checkpoint


def _conduct(lives: list[Driver], again: Callable[[Driver], Driver]) -> int:
    """The training and its end: whatever happens, members are gone and the summary is written. Where the
    weights are lost, and all may begin again, another life is added."""
    error: ManyhandsError | None = None
    try:
        outcome = _outlive(lives, again)
        code = EXIT_CODES[outcome]
    except Interrupted as caught:
        code = caught.exit_code
        error, outcome = caught, "preempted" if code == EXIT_CODES["preempted"] else "interrupted"
    except Diverged as caught:
        error, outcome, code = caught, "diverged", caught.exit_code
    except RecordError:
        raise  # there is nowhere to write how it ended
    except ManyhandsError as caught:
        error, outcome, code = caught, "failed", caught.exit_code
    driver = lives[-1]
    driver.coordinator.stop()
    if isinstance(error, UsageError) and not any(life.run_stats.samples for life in lives):
        raise error
    run, injector = driver.run, driver.injector
    if driver.training_plan is not None:
        driver.training_plan.keep_best(checkpoints.steps(run.path))
    done = outcome in ("finished", "early-stopped")
    summary = driver.run_stats.summary(
        driver.options,
        driver.training_plan,
        outcome=outcome,
        checkpoint=driver.checkpoint_tracker.newest,
        error=str(error) if error else None,
        num_lost=driver.membership.num_lost,
        num_replaced=driver.membership.num_replaced,
        num_again=driver.membership.num_again,
        num_injected=len(injector.injuries) if injector else 0,
        chaos=injector.summary(finished=done) if injector else None,
    )
    try:
        if done or run.summary is None or any(life.run_stats.samples for life in lives):
            run.write_summary(summary)  # else the one of the training before still says all
    except OSError as caught:
        raise RecordError(f"{run.path} can't be written: {caught}") from caught
    advice, command = ("", None) if done else _what_next(lives, outcome)
    driver.stream.emit(
        RunFinished(outcome=outcome, summary=summary, resume_command=command, advice=advice)
    )
    return code


def _what_next(lives: Sequence[Driver], outcome: str) -> tuple[str, str | None]:
    """What to do after a run that did not come to its end, and what to type to go on."""
    driver = lives[-1]
    command = f"manyhands resume {shlex.quote(str(driver.run.path))}"
    if place := driver.coordinator.launcher.again:
        command += f" {place}"  # without it, all members would be on this machine
    saved, job = driver.checkpoint_tracker.newest, driver.options.job
    if outcome == "diverged":
        if not saved:
            return (
                "Nothing good was saved. Train again with a lower learning rate, warm-up or clip_norm.",
                None,
            )
        lr = driver.membership.facts["fields"].get("lr")
        if isinstance(lr, float):
            return "A lower learning rate may help.", f"{command} --set lr={lr / 10:g}"
        return "It would diverge again. Lower the learning rate of the job first.", command
    if driver.would_repeat and not any(life.run_stats.samples for life in lives):
        if not saved:
            return (
                f"Nothing was trained, and it would fail again. Correct {job}, then train again.",
                None,
            )
        return f"It would fail again. Correct {job} first.", command
    return "", command


def _outlive(lives: list[Driver], again: Callable[[Driver], Driver]) -> str:
    while True:
        try:
            return lives[-1].conduct()
        except WeightsLost:
            lives.append(again(lives[-1]))


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
    """Everything but training: job, strategy and cluster, with real members. Raises what is wrong."""
    run = RunFolder.create("check", path=folder)
    keys = options.needs_keys
    with Coordinator(
        launcher or LocalLauncher(),
        logs=run.logs,
        control=control,
        keys=keys,
        authority=authority,
        timeouts=timeouts,
    ) as coordinator:
        on_signals(coordinator)
        on_process_failure(coordinator.broke)
        driver = Driver(
            coordinator, replace(options, rehearse=True), run, Stream(sinks), entries=PROGRAMS
        )
        driver.conduct()
    return driver
