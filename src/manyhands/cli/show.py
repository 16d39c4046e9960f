"""Show one run: job, strategy, best checkpoint, curves, lost members.

Works while it trains, after a kill, and for runs of older versions. A curve goes from the first to the last
step, followed by its first and its last value.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from manyhands.cli.digest import DONE, TRAINS, Digest, digest
from manyhands.errors import RunFolderError
from manyhands.events.history import BARS, PLAIN_BARS, sparkline
from manyhands.events.text import direction
from manyhands.events.units import clean, count, duration, figure, plural
from manyhands.runs.files import dump_json
from manyhands.runs.folder import RunFolder

HELP = "show one run: best checkpoint, curves, lost members"
EXAMPLES = """\
examples:
  manyhands show runs/digits-20260101-120000
  manyhands show runs/digits-20260101-120000 --json     all figures and curves, for programs
  manyhands list                                        all runs
"""
LABEL_CELLS = 12
LOST_SHOWN = 10


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_folder", type=Path, metavar="RUN", help="the folder of the run")
    parser.add_argument("--json", action="store_true", help="print a JSON object, curves included")


def run(arguments: argparse.Namespace) -> int:
    folder = RunFolder.open(arguments.run_folder)
    try:
        known = digest(folder, with_steps=True)
    except (KeyError, TypeError, AttributeError) as error:
        raise RunFolderError(
            f"{folder.path} can't be read: {type(error).__name__}: {error}."
        ) from None
    if arguments.json:
        curves = {"loss": known.history.losses, "eval": known.history.curves}
        print(dump_json({**known.to_dict(), "curves": curves}))
        return 0
    print(clean(str(known.path)))
    rows = list(_rows(known, bars=_bars()))
    cells = max(LABEL_CELLS, *(len(label) + 2 for label, _ in rows))
    for label, value in rows:
        print(clean(f"  {label:<{cells}}{value}").rstrip())
    if known.resume_command:
        print(f"\ncontinue with:  {clean(known.resume_command)}")
    return 0


def _bars() -> str:
    try:
        BARS.encode(sys.stdout.encoding or "ascii")
    except UnicodeEncodeError:
        return PLAIN_BARS
    return BARS


def _rows(run: Digest, *, bars: str) -> Iterator[tuple[str, str]]:
    history = run.history
    yield "job", run.job + (f" ({run.job_class})" if run.job_class else "")
    if run.changed:
        yield "changed", " ".join(f"{name}={value}" for name, value in run.changed.items())
    yield "strategy", f"{run.strategy}, {run.workers} worker{'' if run.workers == 1 else 's'}"
    resumes = history.num_starts - 1
    resumed = f", resumed {plural(resumes, 'time')}" if resumes > 0 else ""
    yield "started", run.started.replace("T", " ") + resumed
    yield "outcome", _outcome(run)
    if run.error and run.outcome not in DONE:
        yield "why", run.error
    inside = []
    if run.epochs is not None:
        inside.append(f"{round(run.epochs, 2):g} epoch{'' if run.epochs == 1 else 's'}")
    inside += [plural(run.samples, "sample")] if run.samples else []
    yield "steps", count(run.step) + (f" ({', '.join(inside)})" if inside else "")
    if run.samples_per_s:
        yield "speed", f"{count(run.samples_per_s)} samples/s"
    for at, each in enumerate(history.lost[:LOST_SHOWN]):
        yield (
            "" if at else "lost",
            f"{each.member} after step {count(each.after_step)}: {each.reason}",
        )
    if len(history.lost) > LOST_SHOWN:
        yield "", f"and {len(history.lost) - LOST_SHOWN} more"
    if run.final:
        yield "final", _figures(run.final)
    if run.best is not None:
        step = "" if run.best_step is None else f"step {count(run.best_step)}, "
        yield "best", f"{_figures(run.best)}  ({step}{direction(run.monitor)})"
        yield "", str(run.best_checkpoint or "its checkpoint is no longer on disk")
    if run.last_checkpoint is not None and run.last_checkpoint != run.best_checkpoint:
        yield "last", str(run.last_checkpoint)
    if history.losses:
        yield "loss", _curve([value for _, value in history.losses], bars)
    for name, curve in history.curves.items():
        yield f"eval {name}", _curve([value for _, value in curve], bars)


def _outcome(run: Digest) -> str:
    total, outcome = run.history.num_steps, run.outcome + (f" ({run.limit})" if run.limit else "")
    if run.outcome in DONE or not total:
        return f"{run.outcome}, {duration(run.seconds)}"
    done = f"step {count(run.step)} of {count(total)} ({run.step / total:.0%})"
    since = "for" if run.outcome == TRAINS else "after"
    return f"{outcome}, {since} {duration(run.seconds)}: {done}"


def _figures(metrics: Any) -> str:
    return "  ".join(f"{name} {figure(value)}" for name, value in metrics.items())


def _curve(values: Sequence[float], bars: str) -> str:
    return f"{sparkline(values, bars=bars)}  {figure(values[0])} to {figure(values[-1])}"
