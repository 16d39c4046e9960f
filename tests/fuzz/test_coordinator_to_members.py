"""A coordinator that sends anything to a worker: the worker goes on, or reports what was wrong and ends."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import member_program
import pytest
from generator import Variant
from test_ps_workers import NONSENSE, say
from variants import (
    ANSWER_S,
    Dialect,
    Watched,
    answered,
    sample,
    variants,
    watching,
)

from manyhands.control.messages import (
    FROM_MEMBER,
    TO_MEMBER,
    Assignment,
    Portion,
    Ready,
    StepsReport,
    TrainOrder,
    ViewJoined,
)
from manyhands.errors import LinkError
from manyhands.hosts.invitation import Invitation
from manyhands.hosts.messages import Failed, Hello, ViewFormed
from manyhands.hosts.timeouts import Timeouts
from manyhands.hosts.view import Seat, View
from manyhands.testing import jobs
from manyhands.transport import Link, Listener
from manyhands.transport.fields import to_json, write

ORDERS = Dialect.of("coordinator to member", TO_MEMBER)
SEAT = Seat("worker-0", "here")
TASK = Assignment(f"{jobs.__file__}:Regression", {}, "single", "cpu", "")
VOCABULARY: dict[str, Any] = {
    "step": (1, 2, 3),
    "epoch": (0, 1),
    "number": (2, 3),
    "name": ("worker-0",),
    "role": ("worker",),
    "part": ([0.0, 1.0, 1.0],),
    "ranges": ([[0, 8]], [[0, 4], [8, 12]]),
    "total": (8,),
}


class Workers:
    """Real workers, each in a process of its own."""

    def __init__(self, folder: Path, watched: Watched) -> None:
        self._folder, self._watched = folder, watched
        self._listener = Listener(f"unix:{folder}/control")
        self._process = subprocess.Popen(
            [sys.executable, member_program.__file__, str(folder / "out")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    @property
    def out(self) -> str:
        path = self._folder / "out"
        return path.read_text(errors="replace")[-3000:] if path.exists() else ""

    @contextlib.contextmanager
    def worker(self, assignment: dict[str, Any]) -> Iterator[tuple[Link, int]]:
        """A worker and its control link."""
        invitation = Invitation(
            "worker-0", self._listener.address, str(self._folder), assignment, Timeouts()
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(to_json(invitation) + "\n")
        self._process.stdin.flush()
        pid = int(self._process.stdout.readline())
        try:
            with self._listener.accept(timeout_s=3 * ANSWER_S) as link:
                assert isinstance(link.recv(FROM_MEMBER, timeout_s=ANSWER_S).message, Hello)
                self._watched.add(pid)
                yield link, pid
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()
        self._listener.close()


def wait_for(link: Link, kind: type[Any]) -> Any:
    deadline = time.monotonic() + ANSWER_S
    while True:
        message = link.recv(FROM_MEMBER, timeout_s=max(0.0, deadline - time.monotonic())).message
        if isinstance(message, kind):
            return message
        assert not isinstance(message, Failed), message


def begin(link: Link) -> None:
    """Bring a worker to where it trains."""
    wait_for(link, Ready)
    link.send(ViewFormed(View(1, (SEAT,))))
    wait_for(link, ViewJoined)
    link.send(TrainOrder([Portion(1, 0, 8, ((0, 8),))]))
    wait_for(link, StepsReport)


def reported(link: Link, variant: Variant, workers: Workers) -> None:
    """The worker ends soon, and says why, unless it was told to leave."""
    last: object = None
    with answered(variant), contextlib.suppress(LinkError):
        while True:
            last = link.recv(FROM_MEMBER, timeout_s=ANSWER_S).message
    deadline = time.monotonic() + ANSWER_S
    # After a frame that is broken it can only assume that the coordinator is gone.
    while not isinstance(last, Failed) and "the coordinator is gone" not in workers.out:
        if variant.kind == "LeaveOrder":
            return
        assert time.monotonic() < deadline, f"{last} after {variant}: {workers.out}"
        time.sleep(0.01)


def attack(these: list[Variant], folder: Path) -> None:
    with watching() as watched:
        workers = Workers(folder, watched)
        try:
            for variant in these:
                with workers.worker(write(replace(TASK, run=str(folder)))) as (link, _):
                    begin(link)
                    say(link, variant, NONSENSE)
                    reported(link, variant, workers)
                watched.check(variant)
        finally:
            workers.close()


def test_a_coordinator_sends_anything_to_a_worker(tmp_path: Path) -> None:
    attack(sample(variants(ORDERS, vocabulary=VOCABULARY), each=2), tmp_path)


@pytest.mark.long
def test_a_coordinator_sends_everything_to_a_worker(tmp_path: Path) -> None:
    attack(sample(variants(ORDERS, vocabulary=VOCABULARY, examples=40), each=30), tmp_path)
