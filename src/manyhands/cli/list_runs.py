"""The runs in a folder, oldest first, with how each ended."""

from __future__ import annotations

import argparse
from pathlib import Path

from manyhands.errors import RunFolderError
from manyhands.state.runs import Run, runs_in

HELP = "the runs here, and how each ended"
EXAMPLES = "example:\n  manyhands list\n"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", nargs="?", type=Path, default=Path("runs"), help="default: runs")


def run(arguments: argparse.Namespace) -> int:
    runs = runs_in(arguments.folder)
    if not runs:
        print(f"No runs in {arguments.folder}. Train one:  manyhands train examples/digits.py")
        return 0
    rows: list[tuple[str, ...]] = [("run", "outcome", "strategy", "workers", "steps", "final")]
    rows += [_row(one) for one in runs]
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    for row in rows:
        print(
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        )
    return 0


def _row(run: Run) -> tuple[str, ...]:
    try:
        options, summary = run.config["options"], run.summary or {}
    except (RunFolderError, KeyError):
        return (str(run.path), "unreadable", "", "", "", "")
    outcome = "training now" if run.locked else summary.get("outcome") or "cut off"
    metrics = summary.get("final_metrics") or {}
    final = "  ".join(f"{k} {v:.4g}" for k, v in metrics.items() if isinstance(v, int | float))
    return (
        str(run.path),
        outcome,
        str(options["strategy"]["value"]),
        str(options["workers"]["value"]),
        "" if (steps := summary.get("steps")) is None else str(steps),
        final,
    )
