"""Members of a run as threads of one process, for fast tests: everything but the processes is real.

A `ThreadLauncher` starts a member as a thread that runs what the process of a member runs: the same loop
with the same learner, over the same links to the same coordinator. Two things are different:

- The group of a view's workers is a `ThreadGroup`, which sums in rank order.
- One worker at a time computes or loads data (`Baton`), because torch has one generator of random numbers per
  process. A worker that waits for others in a group hands the baton on.

Killing a member breaks its link to the coordinator, cuts its groups and makes each of its waits raise, as a
view change does. Its thread ends at the next message, group operation or step, and then it counts as dead. So
a killed member never leaves half of an update behind, as a killed process may: only real processes show that.
"""

from __future__ import annotations

import functools
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch

from manyhands.collectives.group import Group
from manyhands.collectives.reachability import check_view
from manyhands.control.messages import TO_MEMBER, Assignment
from manyhands.hosts.activity import COMPUTING, EVALUATING, LOADING, WAITING, Activity
from manyhands.hosts.invitation import Invitation
from manyhands.hosts.launchers.base import Handle, Launcher, LauncherContext, StartRequest
from manyhands.hosts.me import Me
from manyhands.hosts.member import Member
from manyhands.hosts.view import WORKER, Seat, View
from manyhands.strategies.registry import make_strategy
from manyhands.testing.thread_group import ThreadGroup, ThreadWorld
from manyhands.threads import start_thread
from manyhands.transport.fields import read
from manyhands.worker.loop import Worker
from manyhands.worker.program import run_to_end
from manyhands.worker.server import ServerProgram

BEGIN, COMPUTE, EXCHANGE = "begin", "compute", "exchange"
MOMENTS = (BEGIN, COMPUTE, EXCHANGE)
"""When in a step a worker can be made to die: before its forward, after its backward, when it next waits for
the others in a group, or for servers that have its gradients."""
SLOW_S = 0.05
"""Time that each step takes in a run that a test is about to interfere with."""
END_S = 20.0
"""Time in which a member that was killed has ended."""


class Killed(BaseException):
    """This member was killed: its thread ends."""


@dataclass(frozen=True)
class Death:
    """Kill a worker at a chosen moment."""

    member: str
    step: int
    """The first step in which it may die: without lockstep it does not take part in all."""
    moment: str = BEGIN
    """One of MOMENTS."""


class Baton:
    """Lets one thread at a time compute, with random numbers of its own."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._local = threading.local()

    @contextmanager
    def held(self) -> Iterator[None]:
        if self._is_held:
            yield
            return
        self._take()
        try:
            yield
        finally:
            self._give()

    @contextmanager
    def released(self) -> Iterator[None]:
        """Give it to others for a while, if this thread has it."""
        if not self._is_held:
            yield
            return
        self._give()
        try:
            yield
        finally:
            self._take()

    @property
    def _is_held(self) -> bool:
        return getattr(self._local, "held", False)

    def _take(self) -> None:
        self._lock.acquire()
        self._local.held = True
        if (state := getattr(self._local, "random_state", None)) is not None:
            torch.set_rng_state(state)

    def _give(self) -> None:
        self._local.random_state = torch.get_rng_state()
        self._local.held = False
        self._lock.release()


class ThreadGroups:
    """The groups of all views of a run."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._worlds: dict[tuple[int, int], ThreadWorld] = {}
        self._num_joined: dict[tuple[int, str], int] = {}

    def join(self, member: str, view: View) -> ThreadWorld:
        """Return what the workers of a view share: the n-th that this member joins is the n-th of all."""
        with self._lock:
            number = self._num_joined.get((view.number, member), 0)
            self._num_joined[view.number, member] = number + 1
            key = view.number, number
            if key not in self._worlds:
                self._worlds[key] = ThreadWorld(view.world)
            return self._worlds[key]


class ThreadActivity(Activity):
    """The activity of a member that is a thread: it computes and loads only with the baton."""

    def __init__(self, baton: Baton, on_moment: Callable[[str, int], None]) -> None:
        """`on_moment`: called at BEGIN and COMPUTE of a step, and at EXCHANGE with servers, with its
        number."""
        super().__init__()
        self._baton = baton
        self._on_moment = on_moment
        self._computed = 0
        """The last step whose gradients are complete."""

    @contextmanager
    def during(self, doing: str) -> Iterator[None]:
        if doing == WAITING and self.step and self._computed:
            self._on_moment(EXCHANGE, self._computed)
        if doing not in (COMPUTING, EVALUATING, LOADING):
            with super().during(doing):
                yield
            return
        with self._baton.held(), super().during(doing):
            yield
        if doing == COMPUTING and self.step:
            self._on_moment(COMPUTE, self.step)
            self._computed = self.step

    @contextmanager
    def in_step(self, step: int) -> Iterator[None]:
        with super().in_step(step):
            self._on_moment(BEGIN, step)
            yield


class ThreadMember(Member):
    """A member that is a thread of the coordinator's process."""

    def __init__(self, invitation: Invitation, launcher: ThreadLauncher) -> None:
        self.exit_code: int | None = None
        """Set when it is killed or has failed: its thread is about to end."""
        self._launcher = launcher
        self._me: Me | None = None
        self._worlds: list[ThreadWorld] = []
        self._deaths = [d for d in launcher.deaths if d.member == invitation.member]
        activity = ThreadActivity(launcher.baton, self._on_moment)
        super().__init__(invitation, TO_MEMBER, activity=activity)

    def me(self, seat: Seat) -> Me:
        self._me = me = super().me(seat)
        me.make_group = self._join
        return me

    @property
    def newest_view(self) -> int:
        return super().newest_view if self.exit_code is None else sys.maxsize

    def next_message(self, *, timeout_s: float | None = None) -> Any:
        message = super().next_message(timeout_s=timeout_s)
        self._check()
        return message

    def has_message(self) -> bool:
        self._check()
        return super().has_message()

    def end(self, code: int) -> None:
        """End this member, from any thread: its own ends when it next waits or begins a step."""
        if self.exit_code is not None or self._leaving.is_set():
            return
        self.exit_code = code
        self._link.close()
        self.on_view()  # each wait of its learner raises ViewChanging
        for world in self._worlds:
            world.cut()
        self._received.put(None)

    def close(self) -> None:
        self._link.close()

    def _check(self) -> None:
        if self.exit_code is not None:
            raise Killed

    def _join(self, view: View) -> Group:
        self._check()
        me = self._me
        assert me is not None, "a learner has it"
        world = self._launcher.groups.join(self.name, view)
        self._worlds.append(world)
        return ThreadGroup(world, me.rank, check=lambda: check_view(me), waiting=self._waiting)

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        if self.activity.step:
            self._on_moment(EXCHANGE, self.activity.step)
        with self._launcher.baton.released():
            yield

    def _on_moment(self, moment: str, step: int) -> None:
        self._check()
        if moment == BEGIN:
            self._launcher.hold_back(step)
            self._check()
        for death in self._deaths:
            if death.moment == moment and death.step <= step:
                self.end(-signal.SIGKILL)
                raise Killed


class ThreadHandle(Handle):
    """A member that was started as a thread."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.pid = os.getpid()
        self.host = socket.gethostname()
        self.member: ThreadMember | None = None
        self.code = 0
        self.ended = threading.Event()
        self._killed_by = 0

    def wait(self) -> int:
        self.ended.wait()
        self.gone = True
        return self.code

    def terminate(self) -> None:
        self._kill(signal.SIGTERM)

    def kill(self) -> None:
        self._kill(signal.SIGKILL)

    def connected(self, member: ThreadMember) -> None:
        self.member = member
        if self._killed_by:
            member.end(-self._killed_by)

    def _kill(self, number: signal.Signals) -> None:
        self._killed_by = self._killed_by or number
        if self.member is not None:
            self.member.end(-self._killed_by)


class ThreadLauncher(Launcher):
    """Starts members as threads of this process."""

    kind = "threads"

    def __init__(self, deaths: tuple[Death, ...] = (), *, slow_after: int | None = None) -> None:
        """`slow_after`: the step after which workers are slow until `hurry`, so that a test can interfere."""
        self.deaths = deaths
        self._slow_after = sys.maxsize if slow_after is None else slow_after
        self._hurry = threading.Event()
        self.baton = Baton()
        self.groups = ThreadGroups()
        self.handles: dict[str, ThreadHandle] = {}
        self.interrupt: Callable[[int], None] = lambda number: None
        """Gives the coordinator a signal, once it has started."""
        self._threads = torch.get_num_threads()

    def hurry(self) -> None:
        """Let workers be as fast as they can from now on."""
        self._hurry.set()

    def hold_back(self, step: int) -> None:
        """Called by each worker before a step."""
        if step > self._slow_after:
            self._hurry.wait(SLOW_S)

    def attach(self, context: LauncherContext) -> None:
        self.interrupt = context.interrupt

    def start(self, request: StartRequest) -> ThreadHandle:
        handle = self.handles[request.name] = ThreadHandle(request.name)

        def end(error: BaseException) -> None:
            sys.excepthook(type(error), error, error.__traceback__)
            handle.code = handle.code or 1
            handle.ended.set()

        start_thread(self._run, request, handle, name=request.name, on_error=end)
        return handle

    def _run(self, request: StartRequest, handle: ThreadHandle) -> None:
        torch.set_num_threads(1)
        member = ThreadMember(request.invitation, self)
        handle.connected(member)
        live = self._live_as_worker if request.role == WORKER else self._live_as_server
        code = run_to_end(member, functools.partial(_until_killed, live))
        handle.code = code if member.exit_code is None else member.exit_code
        member.close()
        handle.ended.set()

    def _live_as_worker(self, member: Member) -> None:
        strategy = make_strategy(read(Assignment, member.assignment).strategy)
        with self.baton.held():
            worker = Worker(member, strategy)
        try:
            worker.run()
        except BaseException:
            # What its process would take along when it ends.
            with suppress(Exception):
                worker.learner.close()
            worker.saver.finish()
            raise

    def _live_as_server(self, member: Member) -> None:
        with self.baton.held():
            program = ServerProgram(member)
        try:
            program.run()
        except BaseException:
            with suppress(Exception):
                program.server.close()
            raise

    def close(self) -> None:
        for handle in self.handles.values():
            handle.kill()
        late = [name for name, each in self.handles.items() if not each.ended.wait(END_S)]
        torch.set_num_threads(self._threads)
        assert not late, f"{', '.join(late)} did not end within {END_S:.0f} s"


def _until_killed(live: Callable[[Member], None], member: Member) -> None:
    """Run a member until it ends or is killed: then whatever its waits raised is no failure of its own."""
    assert isinstance(member, ThreadMember)
    try:
        live(member)
    except BaseException:
        if member.exit_code is None:
            raise
