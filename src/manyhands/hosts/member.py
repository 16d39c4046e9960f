"""A member's end of the control link.

A member starts with an invitation, which its launcher writes to a pipe. It connects and sends Hello. From
then on one thread reads the coordinator's messages, and another sends a Beat every second.

If the link closes before the member has sent Bye, the coordinator is gone: the member ends itself at once,
with everything it started.
"""

from __future__ import annotations

import bdb
import ctypes
import faulthandler
import os
import platform
import queue
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn

from manyhands.errors import (
    LinkError,
    ManyhandsError,
    PeerLost,
    UsageError,
    WeightsLost,
)
from manyhands.hosts import tracebacks
from manyhands.hosts.activity import Activity
from manyhands.hosts.board_copy import BoardCopy
from manyhands.hosts.invitation import Invitation
from manyhands.hosts.me import Me
from manyhands.hosts.messages import (
    Beat,
    BoardPost,
    Bye,
    Failed,
    Hello,
    Posted,
    ViewFormed,
    WriteStacks,
)
from manyhands.hosts.view import Seat, View
from manyhands.job import find_job
from manyhands.threads import start_thread
from manyhands.transport import Limits, Link, connect
from manyhands.transport.fields import MessageSet

PR_SET_PDEATHSIG = 1
LIMITS = Limits(head_bytes=16 << 20, payload_bytes=0)
ORPHANED = 70
"""Exit code of a member whose coordinator is gone."""


class Member:
    """This process as a member: its control link, its phase, its failure."""

    def __init__(
        self, invitation: Invitation, messages: MessageSet, *, activity: Activity | None = None
    ) -> None:
        """`messages`: what the coordinator may send."""
        self.invitation = invitation
        self.name = invitation.member
        self.host = invitation.host or socket.gethostname()
        self.assignment = invitation.assignment
        self.timeouts = invitation.timeouts
        self.on_view: Callable[[], None] = lambda: None
        """Called in the control thread when a view arrives, before `next_message` returns it."""
        self._link: Link = connect(
            invitation.address,
            credentials=invitation.credentials if invitation.secured else None,
            timeout_s=self.timeouts.hello_s,
            peer="coordinator",
            limits=LIMITS,
        )
        if invitation.secured and self._link.peer != "coordinator":
            self._link.close()
            raise LinkError(f"{self._link.peer} answers where the coordinator should.")
        self._messages = messages
        self._received: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._board = BoardCopy(self.name)
        self._leaving = threading.Event()
        self._phase = ("starting", time.monotonic())
        self.activity = activity or Activity()
        """While it changes, this member does not count as stuck."""
        self.before_exit: Callable[[], None] = lambda: None
        """Called when this member has reported its failure, before its process ends."""
        self.on_stacks: Callable[[], None] = lambda: None
        """Called in the control thread after the stacks of this process were written to its log."""
        self.send(Hello(self.name, os.getpid(), self.host, platform.python_version()))
        start_thread(self._listen, name="control", on_error=self.fail_and_end)
        start_thread(self._beat, name="beat", on_error=self.fail_and_end)

    @classmethod
    def from_launcher(cls, messages: MessageSet) -> Member:
        """Read the invitation that this process was started with, and join."""
        invitation = Invitation.from_launcher()
        die_with(invitation.parent)
        # Ctrl-C and a scheduler's warning are handled by the coordinator, which tells members what to do.
        for number in (signal.SIGINT, signal.SIGUSR1):
            signal.signal(number, signal.SIG_IGN)
        member = cls(invitation, messages)
        if member.debugged:
            sys.breakpointhook = _breakpoint
        return member

    @property
    def debugged(self) -> bool:
        """If true, this member has the terminal."""
        return bool(self.assignment.get("debug"))

    def me(self, seat: Seat) -> Me:
        """Describe this member, before it has joined a view."""
        return Me(
            self.name,
            self.host,
            seat.device,
            Path(self.invitation.scratch),
            View(0, (seat,)),
            board=self,
            timeouts=self.timeouts,
            credentials=self.invitation.credentials,
            secret=self.invitation.secret,
            trust_network=self.assignment.get("trust_network", False),
            address=self.invitation.reach,
            spans_hosts=self.assignment.get("spans_hosts", False),
        )

    @property
    def newest_view(self) -> int:
        """The number of the newest view that has arrived, whether or not `next_message` has returned it."""
        return self._board.newest_view

    def send(self, message: object) -> None:
        self._link.send(message)

    def next_message(self, *, timeout_s: float | None = None) -> Any:
        """Return the next view or order, or None if none arrives in time."""
        try:
            message = self._received.get(timeout=timeout_s)
        except queue.Empty:
            return None
        if isinstance(message, ViewFormed):
            self._board.taken_view = message.view.number
        return message

    def has_message(self) -> bool:
        return not self._received.empty()

    def post(self, key: str, value: str) -> None:
        """Post a small fact for all members."""
        self.send(BoardPost(key, value))

    def fetch(self, key: str, *, timeout_s: float) -> str:
        """Wait for a fact that some member posts. ViewChanging if a new view arrives meanwhile."""
        return self._board.fetch(key, timeout_s=timeout_s)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Name what this member is doing, for the message that explains why all members wait."""
        before, self._phase = self._phase, (name, time.monotonic())
        try:
            yield
        finally:
            self._phase = (before[0], time.monotonic())

    def fail(self, error: BaseException) -> int:
        """Report to the coordinator what ended this member; return the exit code to end with."""
        usage = isinstance(error, UsageError)
        if isinstance(error, SystemExit):
            code = error.code if isinstance(error.code, int) else int(error.code is not None)
        else:
            code = getattr(error, "exit_code", 1)
        trace = "".join(traceback.format_exception(error))
        if isinstance(error, bdb.BdbQuit) and self.debugged:
            self._quit()
        if self.debugged:
            log = Path(self.assignment["run"]) / "logs" / f"{self.name}.log"
            log.write_text(trace)
        elif not usage:
            print(trace, file=sys.stderr, flush=True)
        known = isinstance(error, ManyhandsError)
        with suppress(LinkError):
            self.send(
                Failed(
                    reason=(str(error) if known else f"{type(error).__name__}: {error}")[:4000],
                    # Errors of manyhands explain themselves; the log has the traceback.
                    traceback="" if known else self._shown(error)[-20_000:],
                    usage=usage,
                    consequence=isinstance(error, PeerLost),
                    weights_lost=isinstance(error, WeightsLost),
                    exit_code=code,
                )
            )
        return code

    def fail_and_end(self, error: BaseException) -> None:
        """Report that a thread of this process has failed, and end at once."""
        self.end(self.fail(error))

    def end(self, code: int) -> None:
        """End this member at once."""
        end_now(code)

    def _shown(self, error: BaseException) -> str:
        """Return the traceback from the job's own code on."""
        try:
            job = find_job(self.assignment["job"]).path
        except (ManyhandsError, KeyError):
            job = None
        return tracebacks.shown(error, job)

    def _quit(self) -> NoReturn:
        """End the run because a debugger was told to quit: send the coordinator a Ctrl-C."""
        os.kill(os.getppid(), signal.SIGINT)
        while True:
            time.sleep(60)

    def leave(self) -> None:
        """Send Bye, after which the coordinator may close the link."""
        self._leaving.set()
        with suppress(LinkError):
            self.send(Bye())

    def _listen(self) -> None:
        while True:
            try:
                message = self._link.recv(self._messages).message
            except LinkError as error:
                if not self._leaving.is_set():
                    print(f"{self.name}: the coordinator is gone ({error}); ending.", flush=True)
                    self.end(ORPHANED)
                return
            match message:
                case Posted(key, value):
                    self._board.add(key, value)
                    continue
                case WriteStacks():
                    self._write_stacks()
                    continue
                case ViewFormed(view):
                    self._board.on_view(view.number)
                    self.on_view()
            self._received.put(message)

    def _write_stacks(self) -> None:
        """Write the stacks of all threads to the log."""
        print(f"{time.strftime('%F %T')} {self.name} seems to hang. Its stacks:", file=sys.stderr)
        sys.stderr.flush()
        faulthandler.dump_traceback(all_threads=True)
        self.on_stacks()

    def _beat(self) -> None:
        activity, used, looked = self.activity, time.process_time(), time.monotonic()
        while not self._leaving.wait(self.timeouts.beat_s):
            name, since = self._phase
            used_before, used = used, time.process_time()
            looked_before, looked = looked, time.monotonic()
            try:
                self.send(
                    Beat(
                        phase=name,
                        since_s=round(looked - since, 1),
                        busy=used - used_before > 0.5 * (looked - looked_before),
                        ticks=activity.ticks,
                        step=activity.step,
                        doing=activity.doing,
                        cpu_s=used - used_before,
                        updates=activity.updates,
                    )
                )
            except LinkError:
                return  # the reading thread acts on it


def _breakpoint(*arguments: Any, **options: Any) -> Any:
    """Enter the debugger as Python's own hook does, but leave Ctrl-C to the coordinator."""
    import pdb

    if os.environ.get("PYTHONBREAKPOINT"):
        return sys.__breakpointhook__(*arguments, **options)
    pdb.Pdb(nosigint=True).set_trace(sys._getframe(1))
    return None


def die_with(parent: int | None, by: signal.Signals = signal.SIGKILL) -> None:
    """Have the kernel send this process a signal when the parent ends (Linux)."""
    if parent is None or not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, by)
    if os.getppid() != parent:  # it died before the call above
        os._exit(ORPHANED)


def end_now(code: int) -> None:
    """End this process and, where it leads its process group, everything that it started."""
    if os.getpgid(0) == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(code)
