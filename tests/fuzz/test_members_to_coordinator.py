"""A run whose members send anything to the coordinator: each is ended, and the others train on.

The members are threads here, each with a real link; the coordinator and its driver are real. The member in
the first place does what it should, all others send one message of the fuzz each, and are replaced.
"""

from __future__ import annotations

import contextlib
import queue
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from generator import Variant
from test_ps_workers import NONSENSE
from variants import (
    ANSWER_S,
    Dialect,
    Watched,
    sample,
    send,
    send_bytes,
    strange_frames,
    variants,
    watching,
)

from manyhands.control.messages import (
    FROM_MEMBER,
    TO_MEMBER,
    CheckpointOrder,
    JobFields,
    LeaveOrder,
    Left,
    Ready,
    Saved,
    Saving,
    StepRow,
    StepsReport,
    StopOrder,
    Stopped,
    TrainOrder,
    ViewJoined,
    WorkerFacts,
)
from manyhands.coordinator.context import RunContext
from manyhands.coordinator.coordinator import FIRST, Coordinator
from manyhands.coordinator.driver import Driver
from manyhands.coordinator.options import RunOptions
from manyhands.errors import Interrupted, LinkError, WeightsLost
from manyhands.events.sinks import Stream
from manyhands.hosts.invitation import Invitation
from manyhands.hosts.launchers.base import Handle, Launcher, StartRequest
from manyhands.hosts.messages import Beat, Bye, Hello, ViewFormed
from manyhands.hosts.timeouts import Timeouts
from manyhands.hosts.view import Seat
from manyhands.runs.folder import RunFolder
from manyhands.strategies.registry import make_strategy
from manyhands.transport import Link, connect

MEMBERS = Dialect.of("member to coordinator", FROM_MEMBER)
CONNECTIONS = Dialect.of("first messages to the coordinator", FIRST)
FACTS = WorkerFacts(
    job="Fuzzed",
    fields=JobFields(8, 10**6, 1, "loss", None),
    all_fields={},
    device="cpu",
    torch="2",
    parameters=10,
    train_samples=10**6,
    eval_samples=0,
    unit=("samples", 1.0),
    tables={},
)
BEGUN = 10
"""The step from which on members are hostile."""
STAGES = ("hello", "ready", "joined", "training")


class ThreadMember(Handle):
    """A member that is a thread."""

    def __init__(self, invitation: Invitation, hostile: Hostile | None) -> None:
        self.name, self.pid, self.host = invitation.member, 1, "here"
        self._invitation = invitation
        self._hostile = hostile
        self._link: Link | None = None
        self._ended = threading.Event()
        self._code = 0
        threading.Thread(target=self._run, daemon=True).start()

    def wait(self) -> int:
        self._ended.wait()
        self.gone = True
        return self._code

    def terminate(self) -> None:
        self.kill()

    def kill(self) -> None:
        self._code = -signal.SIGKILL
        self._ended.set()
        if self._link is not None:
            self._link.close()

    def _run(self) -> None:
        try:
            with connect(self._invitation.address, timeout_s=ANSWER_S) as link:
                self._link = link
                with contextlib.suppress(LinkError):
                    self._live(link)
        except LinkError as error:
            print(self.name, error)
        self._ended.set()

    def _live(self, link: Link) -> None:
        stage = self._hostile.stage if self._hostile is not None else ""
        if stage == "hello":
            self._attack(link)
            return
        link.send(Hello(self.name, 1, "here", "3"))
        if stage == "ready":
            self._attack(link)
            return
        link.send(Ready(Seat(self.name, "here"), FACTS))
        view, beat = 0, time.monotonic()
        while not self._ended.is_set():
            match link.recv(TO_MEMBER).message:
                case ViewFormed(formed):
                    view = formed.number
                    link.send(ViewJoined(view, "none"))
                    if stage == "joined":
                        self._attack(link, view)
                        return
                case TrainOrder(portions):
                    if self._hostile is not None and portions[0].step > BEGUN:
                        self._hostile.begun = True
                        self._attack(link, view)
                        return
                    for portion in portions:
                        time.sleep(0.002)
                        row = StepRow(
                            portion.step,
                            portion.samples,
                            1.0,
                            0.1,
                            0.01,
                            0.01,
                            0.0,
                            9,
                            portion.part,
                        )
                        link.send(StepsReport(view, [row]))
                    if time.monotonic() - beat > 0.5:
                        beat = time.monotonic()
                        link.send(Beat("training", 0.0, int(beat * 1000)))
                case CheckpointOrder(step):
                    link.send(Saving(view, step))
                    link.send(Saved(view, step, error="nothing is saved in a fuzz test"))
                case StopOrder():
                    link.send(Stopped(view))
                case LeaveOrder():
                    link.send(Left(view))
                    link.send(Bye())
                    return

    def _attack(self, link: Link, view: int = 0) -> None:
        assert self._hostile is not None
        self._hostile.attack(link, view)
        self._ended.wait(ANSWER_S)


class Hostile:
    """What the hostile members send, and what came of it."""

    def __init__(self, these: list[Variant | bytes]) -> None:
        self._waiting: queue.SimpleQueue[Variant | bytes] = queue.SimpleQueue()
        for each in these:
            self._waiting.put(each)
        self.open = len(these)
        self.failures: list[str] = []
        self.over = threading.Event()
        self.begun = False
        """Before any step is trained, a member that fails ends the run, as it should."""
        self._lock = threading.Lock()
        self._count = 0

    @property
    def stage(self) -> str:
        self._count += 1
        return STAGES[-1] if self._count % 4 or not self.begun else STAGES[self._count // 4 % 4]

    def attack(self, link: Link, view: int) -> None:
        try:
            variant = self._waiting.get_nowait()
        except queue.Empty:
            link.close()
            return
        began = time.monotonic()
        try:
            with contextlib.suppress(LinkError):
                if isinstance(variant, bytes):
                    send_bytes(link, variant)
                else:
                    if not variant.flaw and "view" in variant.head:
                        variant.head["view"] = view
                    send(link, variant)
                send(link, NONSENSE)
            with contextlib.suppress(LinkError):
                while True:
                    link.recv(timeout_s=ANSWER_S)
        finally:
            with self._lock:
                if time.monotonic() - began > ANSWER_S:
                    self.failures.append(str(variant))
                self.open -= 1
                if not self.open:
                    self.over.set()


class ThreadLauncher(Launcher):
    kind = "local"

    def __init__(self, hostile: Hostile) -> None:
        self._hostile = hostile
        self._members: list[ThreadMember] = []

    def start(self, request: StartRequest) -> Handle:
        good = request.invitation.local_rank == 0
        member = ThreadMember(request.invitation, None if good else self._hostile)
        self._members.append(member)
        return member

    def close(self) -> None:
        for member in self._members:
            member.kill()


class FuzzedRun:
    def __init__(self, folder: Path, hostile: Hostile, strategy: str, watched: Watched) -> None:
        self._run = RunFolder.create("fuzzed", path=folder / "run")
        self._hostile, self._watched = hostile, watched
        self._options = RunOptions(
            "job.py", strategy, 5, make_strategy(strategy), max_restarts=10**9, max_bad_steps=0
        )
        self._drivers: list[Driver] = []
        self.error: BaseException | None = None

    @property
    def steps(self) -> int:
        plan = self._drivers[-1].plan if self._drivers else None
        return plan.committed_step if plan is not None else 0

    def execute(self) -> None:
        timeouts = Timeouts(hello_s=5.0, kill_s=0.1, settle_s=0.05)
        with Coordinator(
            ThreadLauncher(self._hostile), logs=self._run.logs, timeouts=timeouts
        ) as coordinator:
            driving = threading.Thread(target=self._drive, args=(coordinator,))
            driving.start()
            deadline = time.monotonic() + 240.0
            while driving.is_alive() and not self._hostile.over.wait(0.1):
                assert time.monotonic() < deadline, f"{self._hostile.open} messages are left"
            if driving.is_alive():
                self._train_on()
            coordinator.interrupt(signal.SIGINT)
            coordinator.interrupt(signal.SIGINT)
            driving.join(2 * ANSWER_S)
            assert not driving.is_alive(), "the run does not stop"
            coordinator.stop()

    def _train_on(self) -> None:
        """The good member still trains."""
        before, deadline = self.steps, time.monotonic() + ANSWER_S
        while self.steps <= before:
            assert self.error is None, self.error
            assert time.monotonic() < deadline, "nothing is trained any more"
            time.sleep(0.05)

    def _drive(self, coordinator: Coordinator) -> None:
        context = RunContext(coordinator, self._options, self._run, Stream())
        while True:
            before = self._drivers[-1] if self._drivers else None
            self._drivers.append(Driver(context, before=before))
            try:
                self._drivers[-1].drive()
                return
            except WeightsLost:
                self._hostile.begun = False
                coordinator.end_members()
            except BaseException as error:
                if not isinstance(error, Interrupted):
                    self.error = error
                    self._watched.fail(error)
                return


def may_be_sent(variant: Variant) -> bool:
    """A member that reports a failure of the job ends the run, as it should. Unknown fields are no flaw."""
    refused = variant.flaw and "unknown field" not in variant.flaw
    return variant.kind != "Failed" or bool(refused)


VOCABULARY: dict[str, Any] = {
    "view": (1, 2),
    "role": ("worker",),
    "member": ("worker-1", "worker-2"),
    "name": ("worker-1",),
    "host": ("here",),
    "step": (1, 2, 3, 50),
    "part": (0, 1, 2),
    "peer": ("worker-1", "worker-2", "worker-7"),
}


def fuzz(folder: Path, these: list[Variant | bytes], strategy: str) -> None:
    hostile = Hostile(these)
    with watching() as watched:
        run = FuzzedRun(folder, hostile, strategy, watched)
        run.execute()
        assert run.error is None, repr(run.error)
        assert not hostile.failures, hostile.failures


@pytest.mark.parametrize(
    "strategy", ["allreduce", pytest.param("ps:async", marks=pytest.mark.long)]
)
def test_members_send_anything(strategy: str, tmp_path: Path) -> None:
    these: list[Variant | bytes] = list(
        filter(may_be_sent, sample(variants(MEMBERS, vocabulary=VOCABULARY), each=2))
    )
    these += sample(variants(CONNECTIONS, vocabulary=VOCABULARY), each=2)
    these += [data for _, data in strange_frames()][::3]
    fuzz(tmp_path, these, strategy)


@pytest.mark.long
@pytest.mark.parametrize("strategy", ["allreduce", "ps:async"])
@pytest.mark.parametrize("seed", range(3))
def test_members_send_everything(strategy: str, seed: int, tmp_path: Path) -> None:
    everything = list(variants(MEMBERS, seed=seed, vocabulary=VOCABULARY, examples=40))
    these: list[Variant | bytes] = list(filter(may_be_sent, sample(everything, each=25, seed=seed)))
    these += [data for _, data in strange_frames()]
    fuzz(tmp_path, these, strategy)
