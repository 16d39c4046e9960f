"""Run one contender with a deadline, measure its memory, and leave nothing behind.

Memory is the proportional set size, which counts a page that k processes share as 1/k in each: in the sum
over a run's processes, shared memory counts once. The command's own process is left out: for every contender
it only starts the others and waits.
"""

from __future__ import annotations

import ctypes
import os
import re
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

POLL_S = 0.05
SAMPLE_S = 0.5
PR_SET_CHILD_SUBREAPER = 36
ERROR = re.compile(r"Error\b|ERROR|error:")


class Failed(Exception):
    """A contender gave no result; the message says why."""


@dataclass(frozen=True)
class Sample:
    time: float
    processes: int
    total_bytes: int
    file_bytes: int
    """Of these, programs and libraries."""


@dataclass
class Ran:
    output: str
    samples: list[Sample] = field(default_factory=list)

    def memory(self, began: float, ended: float) -> Sample | None:
        """The largest sample of this time: gradients come and go within a step."""
        inside = [s for s in self.samples if began <= s.time <= ended]
        return max(inside, key=lambda s: s.total_bytes, default=None)


def become_reaper() -> None:
    """Processes whose parent ends become children of this one: none can slip away."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def run(
    command: Sequence[str],
    *,
    env: Mapping[str, str],
    deadline_s: float,
    sample: bool = False,
) -> Ran:
    """Run to the end. Raises Failed for a bad exit or a missed deadline."""
    with (
        tempfile.TemporaryFile() as out,
        tempfile.TemporaryFile() as err,
        # Whoever is killed leaves its own temporary files: they lie in here.
        tempfile.TemporaryDirectory(prefix="ps-", ignore_cleanup_errors=True) as folder,
    ):
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            env={**env, "TMPDIR": folder},
            start_new_session=True,
        )
        ran = Ran("")
        until = time.monotonic() + deadline_s
        next_sample = 0.0
        try:
            while process.poll() is None and (now := time.monotonic()) < until:
                if sample and now >= next_sample:
                    ran.samples.append(_sample(process.pid))
                    next_sample = now + SAMPLE_S
                time.sleep(POLL_S)
        finally:
            late = process.poll() is None
            _end_all(process)
        ran.output = _read(out)
        if late:
            raise Failed(f"no result within {deadline_s:.0f} s; {_last_words(_read(err))}")
        if process.returncode != 0:
            raise Failed(_last_words(_read(err) or ran.output))
    return ran


def _end_all(process: subprocess.Popen[bytes]) -> None:
    """Whatever the command started and left behind is a child of this process now, or of such a one."""
    if process.poll() is None:
        process.kill()
    process.wait()
    until = time.monotonic() + 10.0
    while (left := _descendants(os.getpid())) and time.monotonic() < until:
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(POLL_S)


def _sample(root: int) -> Sample:
    total = files = count = 0
    for pid in _descendants(root):
        with suppress(OSError):  # it has just ended
            fields = dict(
                line.split(":", 1)
                for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
            )
            total += _bytes(fields["Pss"])
            files += _bytes(fields.get("Pss_File", "0 kB"))
            count += 1
    return Sample(time.time(), count, total, files)


def _bytes(value: str) -> int:
    return 1024 * int(value.split()[0])


def _descendants(root: int) -> list[int]:
    children: dict[int, list[int]] = {}
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            with suppress(OSError):
                # The name, in brackets, may hold anything: the parent is the second word after it.
                stat = Path(entry.path, "stat").read_text().rpartition(")")[2].split()
                children.setdefault(int(stat[1]), []).append(int(entry.name))
    found = []
    todo = [root]
    while todo:
        below = children.get(todo.pop(), [])
        found += below
        todo += below
    return found


def _read(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode(errors="replace")


def _last_words(text: str) -> str:
    """The line of an output that most likely says what went wrong."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if ERROR.search(line) and not line.startswith("WARNING")]
    return (errors or lines or ["it said nothing"])[-1][:300]
