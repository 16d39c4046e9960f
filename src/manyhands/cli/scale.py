"""Change the number of workers of a live run. It keeps training; new workers join between two steps."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from manyhands.errors import RunFolderError, UsageError
from manyhands.events.units import plural
from manyhands.runs.folder import EVENTS, RunFolder

HELP = "change the number of workers of a live run"
EXAMPLES = """\
examples:
  manyhands scale runs/digits-20260101-120000 --workers 4
  manyhands scale runs/digits-20260101-120000 --workers 2 --no-wait
"""
POLL_S = 0.1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_folder", type=Path, metavar="RUN", help="the folder of the run")
    parser.add_argument(
        "--workers", type=int, required=True, metavar="N", help="number of workers from now on"
    )
    parser.add_argument(
        "--wait",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="wait until they have joined or left (default)",
    )


def run(arguments: argparse.Namespace) -> int:
    num_workers: int = arguments.workers
    if num_workers < 1:
        raise UsageError(f"--workers {num_workers}: at least 1 worker is needed.")
    folder = RunFolder.open(arguments.run_folder)
    if not folder.locked:
        raise RunFolderError(
            f"{folder.path} is not training. Continue it with this many workers:  "
            f"manyhands resume {folder.path} --workers {num_workers}"
        )
    news = _events(folder.path / EVENTS)
    folder.request(num_workers)
    if not arguments.wait:
        print(f"asked for {plural(num_workers, 'worker')}")
        return 0
    return _wait(folder, num_workers, news)


def _wait(folder: RunFolder, num_workers: int, news: Iterator[dict[str, Any] | None]) -> int:
    """Print events until there are that many workers, or until another request replaces this one. `news`
    begins with the current view."""
    acknowledged = False  # earlier requests are not ours
    workers: list[str] = []
    for event in news:
        match event:
            case None:
                if not folder.locked:
                    raise RunFolderError(
                        f"{folder.path} ended before there were {num_workers} workers."
                    )
                time.sleep(POLL_S)
                continue
            case {"event": "ScaleAnswered", "workers": int(requested), "message": str(message)}:
                if requested != num_workers:
                    if acknowledged:
                        raise UsageError(
                            f"The request for {num_workers} workers was replaced: {message}."
                        )
                    continue
                if not event["accepted"]:
                    raise UsageError(message)
                acknowledged = True
                print(message)
                if len(workers) != num_workers:
                    continue
            case {"event": "Noticed", "message": str(message)} if "free slot" in message:
                if acknowledged:
                    print(message)
                continue
            case {"event": "ViewChanged", "members": list(members), "servers": int(servers)}:
                workers = members[: len(members) - servers]
            case {"event": "RunFinished"}:
                print("the run has ended", file=sys.stderr)
                return 1
            case _:
                continue
        if acknowledged:
            print(f"{plural(len(workers), 'worker')}: {', '.join(workers)}")
            if len(workers) == num_workers:
                return 0
    raise AssertionError("events have no end")


def _events(path: Path) -> Iterator[dict[str, Any] | None]:
    """Yield the current view, then events as they arrive; None when there is none at the moment."""
    file = open(path)  # noqa: SIM115 - closed by the generator
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
