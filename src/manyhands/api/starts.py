"""A start of a run, for a new one (`NewRun`) and one that continues (`ContinuedRun`), in three parts:

    resolve    job, options and cluster; what is wrong is raised here, before anything exists
    launch     say how members are started, and end the agents in any case
    train      write the folder, and run the coordinator in this thread until the end

`mh.train()` and `mh.resume()` use them, and so do the commands.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from manyhands.api import init_from as weights_of
from manyhands.api.job_source import SAVED_AS, JobSource
from manyhands.api.options import Resolved, resolve_options
from manyhands.api.where import MEANT_FOR, RayCluster, ResolvedCluster, launching
from manyhands.compute.schedule import SCHEDULES
from manyhands.coordinator import run as coordinator_run
from manyhands.coordinator.options import LaunchPlan, RunOptions
from manyhands.coordinator.run import Ending
from manyhands.errors import (
    CheckpointError,
    UsageError,
    check_choice,
)
from manyhands.events import Console
from manyhands.hosts.machine import versions
from manyhands.job import job_of_run
from manyhands.job_length import length_of, merge_settings
from manyhands.runs import checkpoints
from manyhands.runs.checkpoints import Manifest
from manyhands.runs.files import file_digest
from manyhands.runs.folder import RunFolder

Cluster = ResolvedCluster | RayCluster | None


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
