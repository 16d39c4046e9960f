"""Runs the real command line for tests as harness.py does, but in this process: its members are threads.

    with in_process.command("train", "job.py", "--workers", "2", run=folder) as running:
        running.wait_for_step(6)
        running.kill("worker-1")
        done = running.wait(code=0)

A run takes a few tenths of a second instead of ten: no process has to start and no torch to be loaded.
Coordinator, loop, learners, links, checkpoints and the run folder are the real ones; what is different is in
thread_members.py. One run at a time: while it lasts, what this process prints goes to its result.
"""

from __future__ import annotations

import io
import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

from manyhands.cli.main import main
from manyhands.coordinator.options import LaunchPlan
from manyhands.events.jsonl import read_events
from manyhands.hosts.timeouts import Timeouts
from manyhands.testing.harness import DEADLINE_S, Finished, resume_arguments, train_arguments
from manyhands.testing.thread_members import Death, ThreadLauncher
from manyhands.threads import start_thread

TIMEOUTS = Timeouts(settle_s=0.1, beat_s=0.2)
"""A thread that ends is noticed at once."""
POLL_S = 0.002
SLOW_S = 0.01
"""As in harness.py: less, because threads take turns, and see events sooner."""
MEMORY = "/dev/shm"
"""A file system in memory, on most Linux systems."""


@contextmanager
def folder_in_memory() -> Iterator[Path]:
    """Create a folder for the runs of a test, in memory if possible; delete it at the end. On a disk, short
    runs mostly wait for their checkpoints."""
    place = MEMORY if os.access(MEMORY, os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="manyhands-test-", dir=place) as folder:
        yield Path(folder)


class RunningThreads:
    """A command that runs in this process; the same interface as harness.RunningCommand."""

    def __init__(
        self,
        arguments: Sequence[str],
        run: Path,
        *,
        deaths: Sequence[Death] = (),
        slow_after: int | None = None,
    ) -> None:
        self.run = run
        self.started = time.monotonic()
        self._launcher = ThreadLauncher(tuple(deaths), slow_after=slow_after)
        self._plan = LaunchPlan("unix", self._launcher, timeouts=TIMEOUTS)
        self._out, self._err = io.StringIO(), io.StringIO()
        self._code: int | None = None
        self._error: BaseException | None = None
        self._thread = start_thread(self._run, arguments, name="run", on_error=self._failed)

    def _run(self, arguments: Sequence[str]) -> None:
        with redirect_stdout(self._out), redirect_stderr(self._err):
            try:
                self._code = main(arguments, launch_plan=self._plan)
            except SystemExit as ended:  # the command line was wrong
                self._code = int(str(ended.code))

    def _failed(self, error: BaseException) -> None:
        self._error = error

    def wait(self, timeout_s: float = DEADLINE_S, *, code: int | None = None) -> Finished:
        """Wait for the end of the command; assert that its exit code is `code`, if given."""
        self._launcher.hurry()
        self._thread.join(timeout_s)
        if self._error is not None:
            raise self._error
        out, err = self._out.getvalue(), self._err.getvalue()
        assert self._code is not None, f"no end after {timeout_s} s:\n{out}\n{err}"
        assert code in (None, self._code), f"exit code {self._code}:\n{out}\n{err}"
        return Finished(self._code, out, err, time.monotonic() - self.started, self.run)

    def events(self) -> list[dict[str, Any]]:
        path = self.run / "events.jsonl"
        return list(read_events(path)) if path.exists() else []

    def wait_for(self, condition: Callable[[list[dict[str, Any]]], bool]) -> None:
        """Wait until the events fulfil a condition."""
        deadline, size = time.monotonic() + DEADLINE_S, -1
        file = self.run / "events.jsonl"
        while True:
            before, size = size, file.stat().st_size if file.exists() else 0
            if size != before and condition(self.events()):
                return
            if not self._thread.is_alive() or time.monotonic() > deadline:
                done = self.wait(0)
                raise AssertionError(f"ended, or waited too long:\n{done.out}\n{done.err}")
            time.sleep(POLL_S)

    def wait_for_step(self, step: int) -> None:
        self.wait_for(
            lambda events: any(e["event"] == "StepCommitted" and e["step"] >= step for e in events)
        )

    def members(self) -> list[str]:
        """Return the members that were started, in this order."""
        return [e["member"] for e in self.events() if e["event"] == "MemberStarted"]

    def all_gone(self) -> bool:
        """Return whether the threads of all members have ended."""
        return all(handle.ended.is_set() for handle in self._launcher.handles.values())

    def kill(self, member: str) -> None:
        self._launcher.handles[member].kill()
        self._launcher.hurry()

    def signal(self, number: signal.Signals) -> None:
        """Give the coordinator a signal, as a scheduler does."""
        self._launcher.interrupt(number)

    def close(self) -> None:
        """End it, if it still runs."""
        if self._thread.is_alive():
            self.signal(signal.SIGTERM)
            self.signal(signal.SIGTERM)
            self._thread.join(DEADLINE_S)
        assert not self._thread.is_alive(), "the run does not end"


@contextmanager
def command(
    *arguments: str, run: Path, deaths: Sequence[Death] = (), slow_after: int | None = None
) -> Iterator[RunningThreads]:
    """Run a command; end it at the end of the block.

    Args:
        deaths: Members to kill at chosen moments.
        slow_after: The step after which workers are slow until a member is killed or the end is waited for.
    """
    running = RunningThreads(arguments, run, deaths=deaths, slow_after=slow_after)
    try:
        yield running
    finally:
        running.close()


def train(job: str | Path, run: Path, *flags: str, **options: Any) -> Finished:
    """Run `manyhands train` to its end, with the arguments of `harness.train_arguments`."""
    with command(*train_arguments(job, run, *flags, **options), run=run) as running:
        return running.wait()


def resume(run: Path, *flags: str) -> Finished:
    """Run `manyhands resume` to its end."""
    with command(*resume_arguments(run, *flags), run=run) as running:
        return running.wait()
