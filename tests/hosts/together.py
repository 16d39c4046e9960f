"""Several processes of the command line that stand for hosts, on this machine.

Whoever has temporary files of his own counts as another host, so no right is needed to have several.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from manyhands.events.jsonl import read_events

KEY = "the key of a run in these tests"
LONG_S = 60.0


class Process:
    """One process, with its output in a file."""

    def __init__(
        self, command: Sequence[str], out: Path, environ: Mapping[str, str], tmp: Path | None
    ) -> None:
        if tmp is not None:
            tmp.mkdir(exist_ok=True)
            environ = {**environ, "TMPDIR": str(tmp)}
        self._out = out
        with open(out, "wb") as file:
            self.process = subprocess.Popen(
                command,
                stdout=file,
                stderr=subprocess.STDOUT,
                env=os.environ | {"NO_COLOR": "1"} | environ,
            )

    @property
    def out(self) -> str:
        return self._out.read_text()

    def wait(self, timeout_s: float = LONG_S) -> int:
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"no end after {timeout_s} s:\n{self.out}") from None

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)


class Together:
    """Processes that are ended with the test."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._started: list[Process] = []

    def start(
        self, command: Sequence[str], *, environ: Mapping[str, str], own_host: bool = True
    ) -> Process:
        number = len(self._started)
        tmp = self._folder / f"tmp-{number}" if own_host else None
        process = Process(command, self._folder / f"out-{number}", environ, tmp)
        self._started.append(process)
        return process

    def close(self) -> None:
        for one in self._started:
            one.process.kill()
        for one in self._started:
            one.process.wait()


@contextmanager
def together(folder: Path) -> Iterator[Together]:
    made = Together(folder)
    try:
        yield made
    finally:
        made.close()


def manyhands(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "manyhands.cli.main", *arguments]


def place(rank: int, world: int, port: int, **more: str) -> dict[str, str]:
    """The variables of one process of several."""
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "MANYHANDS_KEY": KEY,
        **more,
    }


def until(condition: Callable[[], object], timeout_s: float = LONG_S) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "that did not come"
        time.sleep(0.01)


def step_reached(run: Path, step: int) -> bool:
    path = run / "events.jsonl"
    events = read_events(path) if path.exists() else []
    return any(e["event"] == "StepCommitted" and e["step"] >= step for e in events)
