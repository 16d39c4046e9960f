"""Give a live run more workers, or fewer. It goes on meanwhile: new ones come in between two steps."""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from manyhands.errors import RunFolderError, UsageError
from manyhands.events.units import plural
from manyhands.runs.folder import EVENTS, RunFolder

HELP = "give a live run more workers, or fewer"
EXAMPLES = """\
examples:
  manyhands scale runs/digits-20260101-120000 --workers 4
  manyhands scale runs/digits-20260101-120000 --workers 2 --no-wait
"""
POLL_S = 0.1
ASKED = re.compile(r"asked for (\d+) workers?(, and refused)?")
"""How a run says that it has read what it was asked for."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_folder", type=Path, metavar="RUN", help="the folder of the run")
    parser.add_argument("--workers", type=int, required=True, metavar="N", help="how many from now")
    parser.add_argument(
        "--wait",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="until they are there (default)",
    )


def run(arguments: argparse.Namespace) -> int:
    wanted: int = arguments.workers
    if wanted < 1:
        raise UsageError(f"--workers {wanted}: at least 1 worker is needed.")
    folder = RunFolder.open(arguments.run_folder)
    if not folder.locked:
        raise RunFolderError(
            f"Nobody is training in {folder.path}. Go on with so many workers:  "
            f"manyhands resume {folder.path} --workers {wanted}"
        )
    news = _events(folder.path / EVENTS)
    folder.request(wanted)
    if not arguments.wait:
        print(f"asked for {plural(wanted, 'worker')}")
        return 0
    return _wait(folder, wanted, news)


def _wait(folder: RunFolder, wanted: int, news: Iterator[dict[str, Any] | None]) -> int:
    """Tell what happens until there are so many, or somebody wants another number. `news` begins with the
    view that there is."""
    taken = False  # what was asked for before is not ours
    workers: list[str] = []
    for event in news:
        match event:
            case None:
                if not folder.locked:
                    raise RunFolderError(f"{folder.path} ended before there were {wanted} workers.")
                time.sleep(POLL_S)
                continue
            case {"event": "Noticed", "message": str(message)} if asked := ASKED.match(message):
                if int(asked[1]) != wanted:
                    if taken:
                        raise UsageError(
                            f"{wanted} workers are not wanted any more: {message} since."
                        )
                    continue
                if asked[2]:
                    raise UsageError(message)
                taken = True
                print(message)
                if len(workers) != wanted:
                    continue
            case {"event": "Noticed", "message": str(message)} if "free slot" in message:
                if taken:
                    print(message)
                continue
            case {"event": "ViewChanged", "members": list(members), "servers": int(servers)}:
                workers = members[: len(members) - servers]
            case {"event": "RunFinished"}:
                print("the run has ended meanwhile", file=sys.stderr)
                return 1
            case _:
                continue
        if taken:
            print(f"{plural(len(workers), 'worker')}: {', '.join(workers)}")
            if len(workers) == wanted:
                return 0
    raise AssertionError("events have no end")


def _events(path: Path) -> Iterator[dict[str, Any] | None]:
    """The last view so far, then events from now on, as they come; None when there is none at the moment."""
    file = open(path)  # noqa: SIM115 - read as long as somebody listens
    *whole, rest = file.read().split("\n")
    views = [line for line in whole if '"event":"ViewChanged"' in line]
    return _lines(file, views[-1:], rest)


def _lines(file: Any, whole: list[str], rest: str) -> Iterator[dict[str, Any] | None]:
    with file:
        while True:
            for line in whole:
                yield json.loads(line)
            if not whole:
                yield None
            rest += file.read()
            *whole, rest = rest.split("\n")
