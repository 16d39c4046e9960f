"""Trainings whose workers are killed, by manyhands and by torchrun, read from the records that they write.

Both write a line per step, with the wall-clock time at which the step counts, so both are measured alike.
The records are read only 20 times a second: on a machine with few cores, a busy observer would slow the
training down.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any

from against import Tree

from manyhands.testing import harness

HERE = Path(__file__).parent
DEADLINE_S = 120.0
"""A limit for what hangs, not a promise."""
LOOK_EVERY_S = 0.05
LAST_WORDS = 2000
MANY = 1000
"""Restarts that nobody needs in one run."""

Record = dict[str, Any]
Moments = dict[str, float]
"""When what happened after a kill, by the wall clock."""


class Stuck(Exception):
    """A training that ended or does not go on."""


class Training(ABC):
    """A training that runs until it is stopped."""

    def __init__(self, path: Path, *, workers: int) -> None:
        self.workers = workers
        self.records: list[Record] = []
        self._path = path
        self._offset = 0

    def look(self) -> None:
        """Read what is new in the record."""
        if not self._path.exists():
            return
        with self._path.open("rb") as file:
            file.seek(self._offset)
            whole, newline, _ = file.read().rpartition(b"\n")
        self._offset += len(whole) + len(newline)
        self.records += [json.loads(line) for line in whole.splitlines()]

    def wait(self, done: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while not done():
            if not self.runs():
                raise Stuck(f"ended while waited for {what}:\n{self.last_words()}")
            if time.monotonic() > deadline:
                raise Stuck(f"no {what} within {DEADLINE_S:.0f} s:\n{self.last_words()}")
            time.sleep(LOOK_EVERY_S)
            self.look()

    @property
    def num_steps(self) -> int:
        """That were done so far, those done twice included."""
        return sum(self.is_step(record) for record in self.records)

    @abstractmethod
    def runs(self) -> bool: ...

    @abstractmethod
    def is_step(self, record: Record) -> bool: ...

    @abstractmethod
    def pids(self) -> dict[str, int]:
        """The workers of this moment."""

    @abstractmethod
    def after_kill(self, victim: str, since: int) -> Moments | None:
        """What happened, once all has, by the records from number `since` on:

        seen    the death is noticed
        agreed  those who go on know what is in the weights
        first   a step is done, of any kind
        new     a step is done that nobody had done before the kill
        whole   as many workers as before take part
        """

    @abstractmethod
    def last_words(self) -> str:
        """What its logs end with."""

    @abstractmethod
    def stop(self) -> None: ...


class Ours(Training):
    """`manyhands train`, by its events."""

    def __init__(
        self, strategy: str, folder: Path, *, workers: int, threads: int, tree: Tree
    ) -> None:
        run = folder / "run"
        super().__init__(run / "events.jsonl", workers=workers)
        arguments = harness.train_arguments(
            tree.benchmark("recovery_job.py"),
            run,
            *("--threads", str(threads), "--max-restarts", str(MANY), "--quiet"),
            strategy=strategy,
            workers=workers,
        )
        self._command = harness.RunningCommand(arguments, run, tree.environ())

    def runs(self) -> bool:
        return self._command.process.poll() is None

    def is_step(self, record: Record) -> bool:
        return record["event"] == "StepCommitted"

    def pids(self) -> dict[str, int]:
        started = {r["member"]: r["pid"] for r in self.records if r["event"] == "MemberStarted"}
        views = [r["members"] for r in self.records if r["event"] == "ViewChanged"]
        return {name: started[name] for name in views[-1]}

    def after_kill(self, victim: str, since: int) -> Moments | None:
        # In the order of the file. What was done before the kill and is reported after it is committed
        # before ViewChanged; all that stands below was handed out to those who were left.
        wanted: list[tuple[str, Callable[[Record], bool]]] = [
            ("seen", lambda r: r["event"] == "MemberLost" and r["member"] == victim),
            ("agreed", lambda r: r["event"] == "ViewChanged" and victim not in r["members"]),
            ("new", self.is_step),
            ("whole", self._is_whole),
        ]
        moments: Moments = {}
        for record in self.records[since:]:
            if wanted and wanted[0][1](record):
                moments[wanted.pop(0)[0]] = record["time"]
        if wanted:
            return None
        return {**moments, "first": moments["new"]}

    def last_words(self) -> str:
        return self._command.logs()[-LAST_WORDS:]

    def stop(self) -> None:
        if self.runs():
            self._command.signal(signal.SIGINT)
        self._command.wait()

    def _is_whole(self, record: Record) -> bool:
        return record["event"] == "ViewChanged" and len(record["members"]) == self.workers


class Torchrun(Training):
    """torchrun with a DDP script, by the script's record. All workers start again after a death."""

    def __init__(self, folder: Path, *, workers: int, threads: int) -> None:
        super().__init__(folder / "record.jsonl", workers=workers)
        self._log = folder / "log"
        command = [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nnodes=1"),
            *(f"--nproc-per-node={workers}", f"--max-restarts={MANY}"),
            *(str(HERE / "recovery_ddp.py"), str(folder)),
        ]
        environ = os.environ | {
            "OMP_NUM_THREADS": str(threads),
            "GLOO_SOCKET_IFNAME": "lo",
            # Otherwise a new round may find the addresses of the last one, and fail, over and over.
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        }
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                command, stdout=log, stderr=subprocess.STDOUT, env=environ
            )

    def runs(self) -> bool:
        return self._process.poll() is None

    def is_step(self, record: Record) -> bool:
        return "step" in record

    def pids(self) -> dict[str, int]:
        newest = self._round()
        return {
            f"rank-{r['rank']}": r["pid"]
            for r in self.records
            if "pid" in r and r["round"] == newest
        }

    def after_kill(self, victim: str, since: int) -> Moments | None:
        before = max(r["round"] for r in self.records[:since] if "step" in r)
        last = max(r["step"] for r in self.records if "step" in r and r["round"] <= before)
        again = [r for r in self.records[since:] if "step" in r and r["round"] > before]
        new = next((r for r in again if r["step"] > last), None)
        if new is None:
            return None
        first = again[0]["time"]
        return {"first": first, "new": new["time"], "whole": first}

    def last_words(self) -> str:
        return self._log.read_text()[-LAST_WORDS:]

    def stop(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(DEADLINE_S)
        finally:
            self._process.kill()
            self._process.wait()
            self.look()
            for pid in [r["pid"] for r in self.records if "pid" in r and harness.alive(r["pid"])]:
                os.kill(pid, signal.SIGKILL)

    def _round(self) -> int:
        return max(r["round"] for r in self.records)
