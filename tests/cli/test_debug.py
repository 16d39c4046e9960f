"""--debug: the worker has the terminal, and breakpoint() in a job works as in a script."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import select
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from manyhands.testing import harness

JOB = """\
from dataclasses import dataclass
from manyhands.testing.jobs import Regression

@dataclass
class Looked(Regression):
    calls = 0

    def loss(self, output, batch):
        Looked.calls += 1
        if Looked.calls == 3:
            breakpoint()
        return super().loss(output, batch)
"""
DEADLINE_S = 60.0


class Terminal:
    """A command in its own terminal, with a simulated user."""

    def __init__(self, *words: str) -> None:
        self.master, slave = pty.openpty()
        self.modes = termios.tcgetattr(slave)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "manyhands", *words],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
            env=os.environ | {"TERM": "xterm-256color", "PYTHONBREAKPOINT": ""},
        )
        self.slave = slave  # kept open, to see how the terminal is left
        self.shown = ""

    def wait_for(self, text: str) -> None:
        def there() -> bool:
            return text in self.shown

        self._read(there)
        assert there(), self.shown
        self.shown = self.shown.partition(text)[2]

    def type(self, text: str) -> None:
        os.write(self.master, text.encode())

    def end(self) -> int:
        self._read(lambda: self.process.poll() is not None)
        self._read(lambda: not select.select([self.master], [], [], 0.1)[0])
        assert self.process.poll() is not None, self.shown
        return self.process.returncode

    def _read(self, until: Callable[[], bool]) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while not until() and time.monotonic() < deadline:
            if select.select([self.master], [], [], 0.1)[0]:
                self.shown += os.read(self.master, 65536).decode(errors="replace")

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        os.close(self.slave)
        os.close(self.master)


@contextmanager
def at_terminal(tmp_path: Path, *words: str) -> Iterator[Terminal]:
    (tmp_path / "job.py").write_text(JOB)
    flags = ["--run-dir", str(tmp_path / "run"), "--device", "cpu", "--set", "epochs=1", "--debug"]
    terminal = Terminal("train", str(tmp_path / "job.py"), *flags, *words)
    try:
        yield terminal
    finally:
        terminal.close()


def outcome(tmp_path: Path) -> str:
    return str(json.loads((tmp_path / "run" / "summary.json").read_text())["outcome"])


def test_breakpoint_works_in_a_terminal(tmp_path: Path) -> None:
    with at_terminal(tmp_path, "--set", "loader_processes=1") as terminal:
        terminal.wait_for("(Pdb) ")
        terminal.type("p 'the shape is', tuple(output.shape)\n")
        terminal.wait_for("('the shape is', (16, 2))")
        terminal.type("c\n")
        terminal.wait_for("finished in")
        assert terminal.end() == 0, terminal.shown
        assert not re.search(r"step \d+/\d+", terminal.shown), "no live line"
    assert outcome(tmp_path) == "finished"


@pytest.mark.parametrize("typed", ["q\n", "\x03"])
def test_quit_and_ctrl_c_end_the_run_and_restore_the_terminal(tmp_path: Path, typed: str) -> None:
    with at_terminal(tmp_path) as terminal:
        terminal.wait_for("(Pdb) ")
        terminal.type(typed)
        assert terminal.end() == 130, terminal.shown
        assert "Traceback" not in terminal.shown
        assert termios.tcgetattr(terminal.slave)[:4] == terminal.modes[:4]
        assert harness.gone([terminal.process.pid])
    assert outcome(tmp_path) == "interrupted"


@pytest.mark.parametrize(
    "flags", [["--strategy", "allreduce"], ["--workers", "2"], ["--on", "env"]]
)
def test_only_one_worker_can_have_the_terminal(tmp_path: Path, flags: list[str]) -> None:
    arguments = ["train", str(harness.JOBS), "--debug", *flags]
    with harness.command(*arguments, run=tmp_path) as running:
        done = running.wait()
    assert done.code == 2
    assert f"{' '.join(flags)} with --debug: only one worker" in done.err
