"""What this machine has, whether what manyhands needs works here, and what to fix.

Everything is tried for real: links make a round trip, and fresh processes form a process group and
all-reduce. Takes some seconds; changes nothing. Exit code 0 when there is nothing to fix, else 1.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

from manyhands.cluster.checkup import Check, Finding, checks, wants_colour
from manyhands.cluster.specs import describe, detect
from manyhands.watch.units import clean

NAME = "doctor"
HELP = "what this machine has, what works, and what to fix"
EXAMPLES = """\
examples:
  manyhands doctor
  manyhands doctor /scratch/runs      where the run folders shall go, if not to runs/
  manyhands doctor --json             for programs: name, ok (true, false, null), detail, remedy
  manyhands doctor --cluster env      which cluster this process is told to be a part of
  manyhands doctor --cluster cluster.toml --as gpu-a
"""

MARKS = {True: "ok", False: "fix", None: "note"}
COLOURS = {True: "32", False: "1;31", None: "33"}
MARK_CELLS = 6


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "folder", nargs="?", type=Path, default=Path("runs"), help="of the runs; default: runs"
    )
    parser.add_argument(
        "--json", action="store_true", help="the findings as a JSON list, at the end"
    )
    parser.add_argument(
        "--cluster",
        metavar="FILE|env",
        help="show only who takes part, as a cluster file says, or as the environment does: torchrun, "
        "srun, Kubernetes, TF_CONFIG, or RANK and WORLD_SIZE; exit code 2 if that is wrong",
    )
    parser.add_argument(
        "--as", dest="entry", metavar="NAME", help="which entry of the cluster file this host is"
    )


def run(arguments: argparse.Namespace) -> int:
    if arguments.cluster or arguments.entry:
        return _show_cluster(arguments)
    todo = checks(arguments.folder)
    if arguments.json:
        findings = [check.run() for check in todo]
        print(json.dumps([finding.to_dict() for finding in findings], indent=2))
    else:
        findings = list(_told(todo, sys.stdout))
        print(_verdict(findings))
    return int(any(finding.ok is False for finding in findings))


def _show_cluster(arguments: argparse.Namespace) -> int:
    """What was understood; whether it works between the hosts is another question."""
    file = None if arguments.cluster in (None, "env") else Path(arguments.cluster)
    spec = detect(cluster=file, name=arguments.entry)
    print(json.dumps(dataclasses.asdict(spec), indent=2) if arguments.json else describe(spec))
    return 0


def _told(todo: list[Check], out: TextIO) -> Iterator[Finding]:
    """Run the checks, and print what each one found as soon as it has."""
    name_cells = max(len(check.name) for check in todo)
    colour, live = wants_colour(out), out.isatty()
    for check in todo:
        waiting = f"{'...':{MARK_CELLS}}{check.name}"
        if live:
            out.write(waiting)
            out.flush()
        finding = check.run()
        if live:
            out.write("\r" + " " * len(waiting) + "\r")
        print("\n".join(_lines(finding, name_cells, colour)), file=out, flush=True)
        yield finding


def _lines(finding: Finding, name_cells: int, colour: bool) -> Iterator[str]:
    mark = f"{MARKS[finding.ok]:{MARK_CELLS}}"
    if colour:
        mark = f"\x1b[{COLOURS[finding.ok]}m{mark}\x1b[0m"
    detail = " ".join(clean(finding.detail).split())
    yield f"{mark}{finding.name:{name_cells}}  {detail}"
    if finding.remedy:
        yield f"{'':{MARK_CELLS + name_cells}}  -> {finding.remedy}"


def _verdict(findings: list[Finding]) -> str:
    to_fix = [finding.name for finding in findings if finding.ok is False]
    return f"To fix: {', '.join(to_fix)}." if to_fix else "Nothing to fix."
