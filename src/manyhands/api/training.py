"""`mh.train()` and `mh.resume()`: training from a script, a notebook or a thread.

    result = mh.train("job.py", strategy="allreduce", workers=4, settings={"lr": 0.05})
    result = mh.train(Digits(lr=0.05), workers=4)
    result = mh.resume(result.path, settings={"epochs": 40})

The workers are fresh programs, never copies of this one: a script needs no `if __name__ == "__main__"`.
"""

from __future__ import annotations

import os
import shlex
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict, Unpack

from manyhands.api.job_source import JobSource, given_settings, job_source
from manyhands.api.options import Resolved
from manyhands.api.result import Result
from manyhands.api.starts import Cluster, ContinuedRun, NewRun, opened
from manyhands.api.where import find_cluster
from manyhands.coordinator.run import Ending
from manyhands.errors import (
    Interrupted,
    UsageError,
    closest,
)
from manyhands.events import Console, make_console
from manyhands.job import Job, parse_settings
from manyhands.job_length import merge_settings


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
