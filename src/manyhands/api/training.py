"""`mh.train()` and `mh.resume()`: training from a script, a notebook or a thread. The commands use the same.

    result = mh.train("job.py", strategy="allreduce", workers=4, settings={"lr": 0.05})
    result = mh.train(Digits(lr=0.05), workers=4)
    result = mh.resume(result.path, settings={"epochs": 40})

A start has three parts, for a new run (`NewRun`) and for one that continues (`ContinuedRun`):

    resolve    job, options and cluster; what is wrong is raised here, before anything exists
    launch     say how members are started, and end the agents in any case
    train      write the folder and run the coordinator in this thread, until the end

The workers are fresh programs, never copies of this one: a script needs no `if __name__ == "__main__"`.
"""

from __future__ import annotations

import os
import shlex
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypedDict, Unpack

from manyhands.api import init_from as weights_of
from manyhands.api.job_source import SAVED_AS, JobSource, given_settings, job_source
from manyhands.api.options import Resolved, resolve_options
from manyhands.api.result import Result
from manyhands.api.where import MEANT_FOR, RayCluster, ResolvedCluster, find_cluster, launching
from manyhands.compute.schedule import SCHEDULES
from manyhands.coordinator import run as coordinator_run
from manyhands.coordinator.options import LaunchPlan, RunOptions
from manyhands.coordinator.run import Ending
from manyhands.errors import (
    CheckpointError,
    Interrupted,
    UsageError,
    check_choice,
    closest,
)
from manyhands.events import Console, make_console
from manyhands.hosts.machine import versions
from manyhands.job import Job, job_of_run, parse_settings
from manyhands.job_length import length_of, merge_settings
from manyhands.runs import checkpoints
from manyhands.runs.checkpoints import Manifest
from manyhands.runs.files import file_digest
from manyhands.runs.folder import RunFolder

Cluster = ResolvedCluster | RayCluster | None


class Options(TypedDict, total=False):
    """Arguments of `mh.train()` and `mh.resume()` that are flags of the commands, with the same meaning:
    `checkpoint_every=100` is `--checkpoint-every 100`. `manyhands train --help` describes each."""

    device: str
    """Device of each worker: "auto", "cpu", "cuda", "cuda:1", or a list, "cuda,cpu"."""
    threads: int
    """Compute threads per worker; by default the cores, divided among them."""
    max_steps: int
    """Number of steps after which it stops, with a checkpoint."""
    max_time: str | float
    """Time after which it does the same: seconds, or a text such as "50m"."""
    target: str
    """Metric at which it does the same: "accuracy=0.97"."""
    checkpoint_every: int
    """Steps between checkpoints, besides those after each epoch."""
    keep: int
    """Number of newest checkpoints to keep; the best is always kept."""
    max_restarts: int
    """Number of dead members that are replaced."""
    max_bad_steps: int
    """Number of steps in a row without a finite loss after which it ends as diverged; 0: never."""
    stuck_after: float
    """Seconds after which a worker that hangs in the job's code is reported; 0: never."""
    equal_shares: bool
    """If true, all workers get the same share of a batch, even if some are faster."""
    scale_batch: str
    """Rule by which the batch and the learning rate follow the number of workers: "linear", "sqrt"."""
    scale_reference: int
    """Number of workers that the job's batch_size and learning rate are those of."""
    scale_warmup: int
    """Steps over which the learning rate is raised."""
    chaos: str
    """Faults to inject, such as "kill worker every 10s"."""
    on: str
    """Where members run: "local", "ray", "ray=HOST:PORT" or "ray=local"."""
    wait: float
    """With on="ray": seconds to wait for free resources."""
    ray_placement: str
    """With on="ray": "spread" or "pack"."""
    ray_ship: str
    """With on="ray": a folder with the job that Ray copies to the nodes."""
    control: str
    """Link between members and coordinator: "unix", "tcp" or "tcp://HOST:PORT"."""
    trust_network: bool
    """If true, gradients and parameters are authenticated and not encrypted."""


def train(
    job: Any,
    *,
    strategy: str | None = None,
    workers: int | str | None = None,
    settings: Mapping[str, Any] | None = None,
    run_dir: str | os.PathLike[str] | None = None,
    init_from: str | os.PathLike[str] | None = None,
    progress: bool = True,
    **options: Unpack[Options],
) -> Result:
    """Train a job to its end, and return what it has left. Raises a `mh.ManyhandsError` otherwise.

    Ctrl-C stops after the steps under way and saves; `mh.Interrupted` is raised then, and `mh.resume`
    continues. In another thread than the main one, no signal is handled.

    Args:
        job: A path, "job.py" or "job.py:Name"; a module, "pkg.module:Name"; or an instance of a job, whose
            class may be that of a script or of a notebook's cell: its source is saved in the run's folder.
        strategy: How the workers agree on the weights, "allreduce" or "ps:ssp(staleness=4)".
        workers: Their number, or a range, "2:4".
        settings: Fields of the job to set: {"lr": 0.05}.
        run_dir: Folder of the run; by default runs/<job>-<time>.
        init_from: Another run, to start with its weights: RUN, RUN:last or RUN:N.
        progress: If true, print progress, as the command does.
        options: Other flags of `manyhands train`.
    """
    given = _given(
        options, strategy=strategy, workers=workers, run_dir=run_dir, init_from=init_from
    )
    source = job_source(job)
    resolved = Resolved(given)
    cluster = _members_from_here(resolved, ["train", source.reference], source)
    changed = given_settings(settings or {})
    if isinstance(job, Job):
        parse_settings(type(job), changed)
    start = NewRun.resolve(source, resolved, cluster, merge_settings(source.settings, changed))
    return _result(start.launch(_console(progress)))


def resume(
    run: str | os.PathLike[str],
    *,
    strategy: str | None = None,
    workers: int | str | None = None,
    settings: Mapping[str, Any] | None = None,
    checkpoint: str | None = None,
    schedule: str | None = None,
    progress: bool = True,
    **options: Unpack[Options],
) -> Result:
    """Continue a run where it stopped, in the same folder. A run that is finished is returned as it is,
    unless `settings` or `checkpoint` ask for more.

    Args:
        run: The folder of the run.
        strategy: Another strategy than before.
        workers: Another number of workers than before.
        settings: Fields of the job to change: {"epochs": 20} trains longer.
        checkpoint: Checkpoint to continue from, "step-100"; by default the newest intact one.
        schedule: How the learning-rate schedule continues if there are more steps than it was made for:
            "stretch", "restart" or "keep".
        progress: If true, print progress, as the command does.
        options: Other flags of `manyhands resume`.
    """
    given = _given(
        options, strategy=strategy, workers=workers, checkpoint=checkpoint, schedule=schedule
    )
    cluster = _members_from_here(Resolved(given), ["resume", os.fspath(run)])
    with opened(Path(run)) as folder:
        start = ContinuedRun.resolve(
            folder,
            given,
            cluster,
            given_settings(settings or {}),
            warn=lambda text: warnings.warn(text, stacklevel=4),
        )
        if start is None:
            return Result(folder.path)
        for note in start.notes if progress else ():
            print(f"note: {note}")
        return _result(start.launch(_console(progress)))


# What the commands share --------------------------------------------------------------------------


@dataclass(frozen=True)
class NewRun:
    """A training that is about to start in a folder of its own."""

    source: JobSource
    resolved: Resolved
    options: RunOptions
    cluster: Cluster
    weights: Manifest | None
    """The checkpoint of another run that it starts with."""

    @classmethod
    def resolve(
        cls,
        source: JobSource,
        resolved: Resolved,
        cluster: Cluster,
        settings: Mapping[str, str],
        *,
        debug: bool = False,
    ) -> NewRun:
        """Resolve and check everything that can be without starting a member."""
        options = resolve_options(
            resolved,
            job=source.reference,
            settings=dict(settings),
            cluster=cluster.spec if cluster else None,
            elsewhere=cluster is not None,
            debug=debug,
        )
        weights = None
        if (other := resolved.get("init_from", None)) is not None:
            weights = weights_of.find_weights(other)
            options = replace(options, init_from=weights.path.resolve())
        return cls(source, resolved, options, cluster, weights)

    def launch(self, console: Console | None, launch_plan: LaunchPlan | None = None) -> Ending:
        with launching(self.cluster, self.resolved, self.options, launch_plan) as (plan, done):
            ending = self.train(plan, console)
            done(ending.exit_code)
            return ending

    def train(self, launch_plan: LaunchPlan, console: Console | None) -> Ending:
        folder = RunFolder.create(self.source.title, path=self.resolved.get("run_dir", None, Path))
        try:
            options = replace(self.options, job=self._write(folder), origin=self.source.origin)
            return coordinator_run.train(options, folder, launch_plan, console=console)
        except (UsageError, KeyboardInterrupt):  # after the start, Ctrl-C is handled as a signal
            folder.discard()  # nothing was trained: leave no folder behind
            raise

    def _write(self, folder: RunFolder) -> str:
        """Write config.json, and a saved job. Returns the reference of the job."""
        source, reference, saved = self.source, self.source.reference, {}
        if source.file is None:
            path = folder.path / SAVED_AS
            path.write_text(source.text)
            reference, saved = f"{path}:{source.reference}", {"saved": SAVED_AS}
            file, anywhere = path.resolve(), f"{path.resolve()}:{source.reference}"
        else:
            file, anywhere = source.file.path, source.file.anywhere
        folder.write_config(
            {
                "created": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
                "command": sys.argv,
                "versions": versions(),
                "job": {
                    "reference": reference,
                    "anywhere": anywhere,
                    "file": str(file),
                    "sha256": file_digest(file),
                    **saved,
                },
                "settings": dict(self.options.settings),
                "options": self.resolved.sources,
                **({"init_from": weights_of.note(self.weights)} if self.weights else {}),
            }
        )
        return reference


@dataclass(frozen=True)
class ContinuedRun:
    """A run that is about to continue in its folder."""

    folder: RunFolder
    resolved: Resolved
    options: RunOptions
    cluster: Cluster
    checkpoint: Manifest | None
    notes: Sequence[str]
    """What to know before training continues."""

    @classmethod
    def resolve(
        cls,
        folder: RunFolder,
        given: Mapping[str, Any],
        cluster: Cluster,
        changed: Mapping[str, str],
        *,
        warn: Callable[[str], None],
        debug: bool = False,
    ) -> ContinuedRun | None:
        """Resolve and check everything that can be without starting a member. None: the run is finished.
        `warn` is called if another user made the run, whose job file is code."""
        name = given.get("checkpoint")
        if _is_done(folder) and not changed and not name:
            return None
        config = folder.config
        job = job_of_run(config, folder.path)
        if (owner := folder.owner_warning()) is not None:
            warn(f"{owner}: {job.path}")
        if "seed" in changed:
            raise UsageError(
                "--set seed: a run keeps its seed, since the order of its samples depends on it."
            )
        resolved = _resolve_anew(given, config["options"])
        options = resolve_options(
            resolved,
            job=job.anywhere,
            settings=merge_settings(config["settings"], changed),
            cluster=cluster.spec if cluster else None,
            elsewhere=cluster is not None,
            debug=debug,
        )
        if (schedule := given.get("schedule")) is not None:
            check_choice("--schedule", schedule, SCHEDULES)
            options = replace(options, schedule=schedule)
        checkpoint, complaints = _choose_checkpoint(folder, name)
        if checkpoint is None:
            options = replace(options, init_from=weights_of.noted(config))
        notes = tuple(_notes(config, job.path, checkpoint, complaints))
        return cls(folder, resolved, options, cluster, checkpoint, notes)

    def launch(self, console: Console | None, launch_plan: LaunchPlan | None = None) -> Ending:
        config, options = self.folder.config, self.options

        def on_ready() -> None:
            # Options of a debugging session do not become those of the run.
            sources = {**config["options"], **({} if options.debug else self.resolved.sources)}
            self.folder.write_config(
                {**config, "settings": dict(options.settings), "options": sources}
            )

        with launching(self.cluster, self.resolved, options, launch_plan) as (plan, done):
            ending = coordinator_run.train(
                options,
                self.folder,
                plan,
                console=console,
                checkpoint=self.checkpoint,
                on_ready=on_ready,
            )
            done(ending.exit_code)
            return ending


@contextmanager
def opened(path: Path) -> Iterator[RunFolder]:
    """Open a run, locked before anything changes: another process may be training in it."""
    folder = RunFolder.open(path)
    folder.lock()
    try:
        yield folder
    finally:
        folder.unlock()


def how_to_train_longer(folder: RunFolder) -> str:
    """Return what to type for a run that is finished."""
    length = length_of(folder.config)
    return (
        f"{folder.path} is already finished. To train longer, set the total number of {length}: "
        f"manyhands resume {folder.path} --set {length}=N  (with a learning rate schedule, also "
        "--schedule stretch, restart or keep)"
    )


def _resolve_anew(given: Mapping[str, Any], options: Mapping[str, Any]) -> Resolved:
    """Take the options of the last start, except those that this start must choose anew."""
    resolved = Resolved(given, options)
    for flag in ("chaos", "max_steps", "max_time", "target", "on", *MEANT_FOR):
        resolved.forget(flag)
    before = options.get("on", {}).get("value", "local")
    if (resolved.get("on", "local"), before) != ("local", "local"):
        resolved.forget("control")  # an address on hosts that may have changed
    if given.get("strategy") is not None:
        resolved.forget("workers")  # a new strategy has its own default
    return resolved


def _notes(
    config: Mapping[str, Any],
    path: Path,
    checkpoint: Manifest | None,
    complaints: Sequence[str],
) -> Iterator[str]:
    """Yield notes to print before training continues."""
    if file_digest(path) != config["job"]["sha256"]:
        yield f"{path} has changed since the run was started."
    for complaint in complaints:
        yield f"{complaint} It was skipped."
    if checkpoint is None:
        first = config.get("init_from")
        source = f", from the weights of step {first['step']} of {first['run']}" if first else ""
        yield f"There is no checkpoint yet: training starts from the beginning{source}."


def _is_done(folder: RunFolder) -> bool:
    summary = folder.summary
    return summary is not None and summary.get("outcome") in ("finished", "early-stopped")


def _choose_checkpoint(
    folder: RunFolder, checkpoint: str | None
) -> tuple[Manifest | None, list[str]]:
    """Return the checkpoint to resume from, and what is wrong with newer ones."""
    if checkpoint is None:
        return checkpoints.last_intact(folder.path)
    name = checkpoint.removeprefix("checkpoints/").removeprefix("step-")
    try:
        return checkpoints.choose(folder.path, name), []
    except CheckpointError as error:
        raise UsageError(f"--checkpoint {checkpoint}: {error}") from error


# From Python --------------------------------------------------------------------------------------


def _given(options: Options, **named: Any) -> dict[str, str]:
    """Return the arguments as they would be typed, without those that are not given."""
    known = [*Options.__annotations__, *named]
    for name in options:
        if name not in known:
            raise UsageError(f"There is no option {name}{closest(name, known)}")
    given: dict[str, Any] = {**named, **options}
    if isinstance(seconds := given.get("max_time"), int | float):
        given["max_time"] = f"{seconds}s"
    return {name: str(value) for name, value in given.items() if value is not None}


def _members_from_here(
    resolved: Resolved, words: Sequence[str], source: JobSource | None = None
) -> Cluster:
    """Find where members run. `words`: the command that does the same."""
    place, file = resolved.get("on", "local"), resolved.get("cluster", None)
    if place == "env" or file is not None:
        raise UsageError(
            f"on={place!r}: from Python, members run on this machine or on Ray. Processes that are started "
            f"together train with the command:  manyhands {shlex.join(words)} --on env"
        )
    cluster = find_cluster(resolved, argv=["manyhands", *words])
    if cluster is not None and source is not None and source.file is None:
        raise UsageError(
            f"{source.reference} is a class of a script or a notebook, which other machines may not see. "
            f'Write it into a file for them:  mh.train("job.py:{source.reference}", on="ray")'
        )
    return cluster


def _console(progress: bool) -> Console | None:
    if not progress:
        return None
    console = make_console()
    console.raises = True
    return console


def _result(ending: Ending) -> Result:
    """Return the result of a run that ended well; raise how it ended otherwise."""
    if ending.error is not None:
        ending.error.run = ending.run
        # The stack is that of the coordinator, and says nothing about the job.
        raise ending.error.with_traceback(None)
    if ending.outcome in ("interrupted", "preempted"):
        saved = f" The newest checkpoint is {ending.run / ending.saved}." if ending.saved else ""
        error = Interrupted(
            f"The training was stopped on request ({ending.outcome}).{saved} Continue with  "
            f'mh.resume("{ending.run}")',
            exit_code=ending.exit_code,
        )
        error.run = ending.run
        raise error
    return Result(ending.run)
