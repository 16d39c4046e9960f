"""Runs the real command line for tests: start, watch, kill and read runs.

Runs are started by the command that users type, in processes of their own, and checked by the files in their
run folders.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from manyhands.events.jsonl import committed_steps, read_events
from manyhands.runs.checkpoints import final, steps

JOBS = Path(__file__).parent / "jobs.py"
SLOW_S = 0.1
"""For `pause_s` of a job: slows steps down so that a test can interfere."""
DEADLINE_S = 120.0


@dataclass(frozen=True)
class Finished:
    """The result of a command."""

    code: int
    out: str
    err: str
    seconds: float
    run: Path

    @property
    def events(self) -> list[dict[str, Any]]:
        return list(read_events(self.run / "events.jsonl"))

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [record for record in self.events if record["event"] == kind]

    @property
    def steps(self) -> list[dict[str, Any]]:
        """Committed steps, without those that a restart undid."""
        return committed_steps(self.events)

    @property
    def losses(self) -> list[float]:
        return [record["loss"] for record in self.steps]

    def state(self) -> dict[str, Any]:
        """Read the newest checkpoint: model, optimizer, scheduler, learner."""
        from manyhands.runs.saver import read_state

        return read_state(final(self.run, steps(self.run)[-1]))

    def uses_by_epoch(self) -> dict[int, list[int]]:
        """Return, for each epoch, every position that a committed step used, once for each use."""
        uses: dict[int, list[int]] = {}
        for record in self.steps:
            for ranges in record["shares"].values():
                for start, stop in ranges:
                    uses.setdefault(record["epoch"], []).extend(range(start, stop))
        return uses


class RunningCommand:
    """A running manyhands command."""

    def __init__(self, arguments: Sequence[str], run: Path, environ: dict[str, str] | None = None):
        self.run = run
        self.started = time.monotonic()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "manyhands.cli.main", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"NO_COLOR": "1"} | (environ or {}),
        )

    def wait(self, timeout_s: float = DEADLINE_S, *, code: int | None = None) -> Finished:
        """Wait for the end of the command; assert that its exit code is `code`, if given."""
        try:
            out, err = self.process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            out, err = self.process.communicate()
            raise AssertionError(
                f"no end after {timeout_s} s:\n{out}\n{err}\n{self.logs()}"
            ) from None
        done = self.process.returncode
        assert code in (None, done), f"exit code {done}:\n{out}\n{err}\n{self.logs()}"
        return Finished(done, out, err, time.monotonic() - self.started, self.run)

    def logs(self) -> str:
        return logs_of(self.run)

    def events(self) -> list[dict[str, Any]]:
        path = self.run / "events.jsonl"
        return list(read_events(path)) if path.exists() else []

    def wait_for(self, condition: Callable[[list[dict[str, Any]]], bool]) -> None:
        """Wait until the events fulfil a condition."""
        deadline = time.monotonic() + DEADLINE_S
        while not condition(self.events()):
            if self.process.poll() is not None or time.monotonic() > deadline:
                self.process.kill()
                out, err = self.process.communicate()
                raise AssertionError(f"ended, or waited too long:\n{out}\n{err}\n{self.logs()}")
            time.sleep(0.02)

    def wait_for_step(self, step: int) -> None:
        self.wait_for(
            lambda events: any(e["event"] == "StepCommitted" and e["step"] >= step for e in events)
        )

    def pids(self) -> dict[str, int]:
        """Return the process of each member, of the newest start."""
        return {e["member"]: e["pid"] for e in self.events() if e["event"] == "MemberStarted"}

    def members(self) -> list[str]:
        """Return the members that were started, in this order."""
        return list(self.pids())

    def all_gone(self) -> bool:
        """Return whether all processes of the run have ended, or do so in a few seconds."""
        started = [e["pid"] for e in self.events() if e["event"] == "MemberStarted"]
        return gone([*started, self.process.pid])

    def kill(self, member: str, number: signal.Signals = signal.SIGKILL) -> None:
        os.kill(self.pids()[member], number)

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the coordinator."""
        self.process.send_signal(number)


@contextmanager
def command(
    *arguments: str, run: Path, environ: dict[str, str] | None = None
) -> Iterator[RunningCommand]:
    """Run a command; kill it at the end of the block."""
    running = RunningCommand(arguments, run, environ)
    try:
        yield running
    finally:
        if running.process.poll() is None:
            running.process.kill()
        for pipe in (running.process.stdout, running.process.stderr):
            if pipe is not None:
                pipe.close()
        running.process.wait()


def train(job: str | Path, run: Path, *flags: str, **options: Any) -> Finished:
    """Run `manyhands train` to its end, with the arguments of `train_arguments`."""
    with command(*train_arguments(job, run, *flags, **options), run=run) as running:
        return running.wait()


def train_arguments(
    job: str | Path,
    run: Path,
    *flags: str,
    strategy: str = "single",
    workers: int = 1,
    **fields: Any,
) -> list[str]:
    """Return the arguments of `manyhands train` for a job of testing/jobs.py, by name, or any job, by path.

    `fields` are set with --set.
    """
    reference = f"{JOBS}:{job}" if isinstance(job, str) and job.isidentifier() else str(job)
    settings = [part for name, value in fields.items() for part in ("--set", f"{name}={value}")]
    where = ["--run-dir", str(run), "--device", "cpu"]
    how = ["--strategy", strategy, "--workers", str(workers)]
    return ["train", reference, *where, *how, *settings, *flags]


def logs_of(run: Path) -> str:
    """Return the logs of all members, the end of long ones."""
    files = sorted((run / "logs").glob("*"))
    return "\n".join(f"{file.name}: {file.read_text()[-20_000:]}" for file in files)


def resume(run: Path, *flags: str) -> Finished:
    """Run `manyhands resume` to its end."""
    with command(*resume_arguments(run, *flags), run=run) as running:
        return running.wait()


def resume_arguments(run: Path, *flags: str) -> list[str]:
    return ["resume", str(run), "--device", "cpu", *flags]


def alive(pid: int) -> bool:
    """Return true if a process runs (a zombie does not)."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def gone(pids: Sequence[int], within_s: float = 5.0) -> bool:
    """Wait until all processes are gone; return false if they are not within the time."""
    deadline = time.monotonic() + within_s
    while any(alive(pid) for pid in pids):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True
