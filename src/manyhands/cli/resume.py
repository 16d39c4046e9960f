"""Continue a run where it stopped, in the same folder, on any number of workers."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from manyhands.cli import init_from
from manyhands.cli.options import (
    Resolved,
    add_training_flags,
    fit_debug,
    parse_set,
    resolve_options,
)
from manyhands.cli.where import MEANT_FOR, RayCluster, ResolvedCluster, find_cluster, launching
from manyhands.compute.schedule import SCHEDULES
from manyhands.coordinator.run import train
from manyhands.errors import CheckpointError, UsageError, check_choice
from manyhands.events import make_console
from manyhands.job import job_of_run
from manyhands.job_length import length_of, merge_settings
from manyhands.runs import checkpoints
from manyhands.runs.checkpoints import Manifest
from manyhands.runs.files import file_digest
from manyhands.runs.folder import RunFolder

HELP = "continue a run where it stopped, on any number of workers"
EXAMPLES = """\
examples:
  manyhands resume runs/digits-20260101-120000
  manyhands resume runs/digits-20260101-120000 --workers 4
  manyhands resume runs/digits-20260101-120000 --set epochs=20 --schedule stretch    train longer
  manyhands resume runs/digits-20260101-120000 --max-time 50m      the next fifty minutes of it
  manyhands resume runs/digits-20260101-120000 --target accuracy=0.99   until it is that good
  manyhands resume runs/digits-20260101-120000 --set lr=0.01       with another learning rate
  manyhands resume runs/digits-20260101-120000 --checkpoint step-276   from an older checkpoint
  srun manyhands resume runs/digits-4711 --on env --key-file run.key   on many hosts
  manyhands resume runs/digits-20260101-120000 --debug             with breakpoint() in the job
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_folder", type=Path, metavar="RUN", help="the folder of the run")
    parser.add_argument(
        "--checkpoint",
        metavar="step-N",
        help="resume from this checkpoint (default: the newest intact one)",
    )
    parser.add_argument(
        "--schedule",
        metavar="HOW",
        help="how the learning-rate schedule continues if there are more steps than it was made for: stretch "
        "(over all steps, from its current position), restart (over the remaining steps) or keep (as it was; "
        "after its end, the rate stays the same)",
    )
    add_training_flags(parser)


def run(arguments: argparse.Namespace) -> int:
    fit_debug(arguments)
    cluster = find_cluster(Resolved(arguments))
    if isinstance(cluster, ResolvedCluster) and not cluster.is_coordinator:
        return cluster.serve()
    folder = RunFolder.open(arguments.run_folder)
    folder.lock()  # before anything changes: another process may be training in it
    try:
        if not _is_done(folder, arguments):
            return _resume(folder, arguments, cluster)
    finally:
        folder.unlock()
    length = length_of(folder.config)
    print(
        f"{folder.path} is already finished. To train longer, set the total number of {length}: "
        f"manyhands resume {folder.path} --set {length}=N  (with a learning rate schedule, also "
        "--schedule stretch, restart or keep)"
    )
    return 0


def _resume(
    folder: RunFolder, arguments: argparse.Namespace, cluster: ResolvedCluster | RayCluster | None
) -> int:
    config = folder.config
    job = job_of_run(config, folder.path)
    if (warning := folder.owner_warning()) is not None:
        print(f"warning: {warning}: {job.path}", file=sys.stderr)
    changed = parse_set(arguments.set)
    if "seed" in changed:
        raise UsageError(
            "--set seed: a run keeps its seed, since the order of its samples depends on it."
        )
    resolved = _resolve(arguments, config["options"])
    options = resolve_options(
        resolved,
        job=job.anywhere,
        settings=merge_settings(config["settings"], changed),
        cluster=cluster.spec if cluster else None,
        elsewhere=cluster is not None,
        debug=arguments.debug,
    )
    if arguments.schedule is not None:
        check_choice("--schedule", arguments.schedule, SCHEDULES)
        options = replace(options, schedule=arguments.schedule)
    checkpoint, complaints = _choose_checkpoint(folder, arguments.checkpoint)
    if checkpoint is None:
        options = replace(options, init_from=init_from.noted(config))
    for note in _notes(config, job.path, checkpoint, complaints):
        print(f"note: {note}")

    def on_ready() -> None:
        # Options of a debugging session do not become those of the run.
        sources = {**config["options"], **({} if options.debug else resolved.sources)}
        folder.write_config({**config, "settings": dict(options.settings), "options": sources})

    console = make_console(quiet=arguments.quiet, shared=arguments.debug)
    with launching(cluster, resolved, options, arguments.launch_plan) as (launch_plan, done):
        return done(
            train(
                options,
                folder,
                launch_plan,
                console=console,
                checkpoint=checkpoint,
                on_ready=on_ready,
            )
        )


def _resolve(arguments: argparse.Namespace, options: Mapping[str, Any]) -> Resolved:
    """Take the options of the last start, except those that this start must choose anew."""
    resolved = Resolved(arguments, options)
    for flag in ("chaos", "max_steps", "max_time", "target", "on", *MEANT_FOR):
        resolved.forget(flag)
    before = options.get("on", {}).get("value", "local")
    if (resolved.get("on", "local"), before) != ("local", "local"):
        resolved.forget("control")  # an address on hosts that may have changed
    if arguments.strategy is not None:
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


def _is_done(folder: RunFolder, arguments: argparse.Namespace) -> bool:
    summary = folder.summary
    if summary is None or summary.get("outcome") not in ("finished", "early-stopped"):
        return False
    return not arguments.set and not arguments.checkpoint


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
