"""List the runs in a folder: job, changed fields, best metric, outcome.

The oldest run comes first unless --sort is given. `best` is the monitored metric of the best evaluation.
`training now` and `cut off` (killed) are read from the run's events, since there is no summary yet.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from manyhands.cli.digest import Digest, digest
from manyhands.coordinator.metric_monitor import metric_name
from manyhands.errors import ManyhandsError, UsageError, check_choice
from manyhands.events.units import clean, count, duration
from manyhands.runs.files import dump_json
from manyhands.runs.folder import CONFIG, runs_in

HELP = "list the runs here: job, changed fields, best, time, outcome"
EXAMPLES = """\
examples:
  manyhands list                        in runs/
  manyhands list /scratch/runs          in another folder
  manyhands list --sort best            the best first
  manyhands list --json | jq '.[] | select(.outcome == "failed") | .run'
  manyhands show RUN                    one of them, with its curves
"""

SORTS: dict[str, Callable[[Digest], Any]] = {
    "started": lambda run: run.started,
    "best": lambda run: run.rank,
    "time": lambda run: -run.seconds,
    "steps": lambda run: -run.step,
    "outcome": lambda run: run.outcome,
    "job": lambda run: (run.job_class, run.job),
    "name": lambda run: str(run.path),
}
COLUMNS = ("run", "job", "outcome", "strategy", "workers", "steps", "time", "best", "changed")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "folder",
        nargs="?",
        type=Path,
        default=Path("runs"),
        help="folder of the runs (default: runs)",
    )
    parser.add_argument(
        "--sort",
        default="started",
        metavar="BY",
        help="sort by started (default: the oldest first), best (the best first, per metric), time (the "
        "longest first), steps, outcome, job or name",
    )
    parser.add_argument("--json", action="store_true", help="print everything, as a JSON list")


def run(arguments: argparse.Namespace) -> int:
    check_choice("--sort", arguments.sort, SORTS)
    if (arguments.folder / CONFIG).is_file():
        raise UsageError(
            f"{arguments.folder} is a run, not a folder of runs. Type:  manyhands show {arguments.folder}"
        )
    known, unreadable = [], []
    for each in runs_in(arguments.folder):
        try:
            known.append(digest(each, with_steps=False))
        except (ManyhandsError, KeyError, TypeError, AttributeError):
            unreadable.append(each.path)
    if arguments.sort != "started":  # runs_in() sorts by that
        known.sort(key=SORTS[arguments.sort])
    if arguments.json:
        lost = [{"run": str(path), "outcome": "unreadable"} for path in unreadable]
        print(dump_json([*(each.to_dict() for each in known), *lost]))
        return 0
    if not known and not unreadable:
        print(f"No runs in {arguments.folder}. Train one:  manyhands train examples/digits.py")
        return 0
    rows = [COLUMNS, *(_row(each) for each in known)]
    rows += [(str(path), "", "unreadable", *[""] * (len(COLUMNS) - 3)) for path in unreadable]
    widths = [max(len(row[at]) for row in rows) for at in range(len(COLUMNS))]
    for row in rows:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        print("  ".join(cells).rstrip())
    return 0


def _row(run: Digest) -> tuple[str, ...]:
    value = run.best_value
    best = "" if value is None else f"{metric_name(run.monitor)} {value:.4g}"
    if value is None and run.final:  # never evaluated: the training loss
        loss = run.final.get("loss")
        best = f"(loss {loss:.4g})" if isinstance(loss, int | float) else ""
    row = (
        str(run.path),
        run.job_class or Path(run.job).name,
        run.outcome,
        run.strategy,
        str(run.workers),
        count(run.step),
        duration(run.seconds),
        best,
        " ".join(f"{name}={value}" for name, value in run.changed.items()),
    )
    return tuple(clean(cell) for cell in row)
