"""Members as processes of this machine: the embedded default.

Each member is a fresh Python (never a fork of one that has loaded torch), in a process group of its
own so that Ctrl-C reaches only the coordinator, with its output in its own log. It reads its invitation
from a pipe, whose descriptor is its last argument. A member asks the kernel to kill it when its parent
dies, and ends itself when the control link closes (hosts/member.py): two independent reasons why none is
ever left over.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import termios
import threading
from contextlib import ExitStack, suppress
from dataclasses import replace
from typing import Any

from manyhands.hosts.key import VARIABLE
from manyhands.hosts.launchers.base import Handle, Launcher, StartRequest
from manyhands.transport.fields import to_json

NOT_THEIRS = (VARIABLE, "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "TF_CONFIG")
"""Variables that members do not get."""


class LocalHandle(Handle):
    def __init__(
        self, name: str, process: subprocess.Popen[bytes], *, own_group: bool = True
    ) -> None:
        self.name = name
        self._own_group = own_group
        self.pid = process.pid
        self.host = socket.gethostname()
        self.output = process.stdout
        """Its output, if no log was given; the reader closes it."""
        self._process = process
        # Popen.wait() from two threads at once may lose the exit code of the loser.
        self._lock = threading.Lock()

    def wait(self) -> int:
        with self._lock:
            code = self._process.wait()
            # Once, right after the leader: its data loaders must not outlive it, and later the id may
            # belong to another process group.
            if not self.gone:
                self.kill()
                self.gone = True
            return code

    def terminate(self) -> None:
        self.signal(signal.SIGTERM)

    def kill(self) -> None:
        self.signal(signal.SIGKILL)

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to it and everything it started, if it still runs."""
        if not self.gone:
            with suppress(ProcessLookupError, PermissionError):
                (os.killpg if self._own_group else os.kill)(self.pid, number)


class LocalLauncher(Launcher):
    kind = "local"
    shares_cores = True

    def __init__(self, interface: str = "lo", *, terminal: bool = False) -> None:
        self.interface = interface
        """The network interface over which members of other hosts are reached."""
        self.terminal = terminal
        """If true, members use our terminal, for a debugger. They are in our process group then: another
        group could not read from it."""
        self._modes = termios.tcgetattr(sys.stdin) if terminal and sys.stdin.isatty() else None
        self._handles: list[LocalHandle] = []

    def start(self, request: StartRequest) -> LocalHandle:
        with ExitStack() as stack:
            output: Any = subprocess.PIPE
            if request.log is not None:
                # Appended to: a resumed run keeps what was logged before.
                output = stack.enter_context(open(request.log, "ab"))
            redirected: dict[str, Any] = {
                "stdin": subprocess.DEVNULL,
                "stdout": output,
                "stderr": subprocess.STDOUT,
                "process_group": 0,
                "bufsize": 0,
            }
            reading, writing = os.pipe()
            # No buffer: the invitation must be on its way when write() returns.
            pipe = stack.enter_context(open(writing, "wb", buffering=0))
            try:
                process = subprocess.Popen(
                    [sys.executable, "-m", request.entry, str(reading)],
                    pass_fds=(reading,),
                    env=self._environment(request),
                    **({} if self.terminal else redirected),
                )
            finally:
                os.close(reading)
            with suppress(BrokenPipeError):  # it died at once: wait() returns its exit code
                invitation = replace(request.invitation, parent=os.getpid())
                pipe.write(to_json(invitation).encode())
        handle = LocalHandle(request.name, process, own_group=not self.terminal)
        self._handles.append(handle)
        return handle

    def _environment(self, request: StartRequest) -> dict[str, str]:
        # The invitation has all secrets and the rank of the member; those in our environment are ours.
        theirs = {name: value for name, value in os.environ.items() if name not in NOT_THEIRS}
        interfaces = {} if self.interface == "lo" else {"NCCL_SOCKET_IFNAME": self.interface}
        ours = {
            "OMP_NUM_THREADS": str(request.threads or cores()),
            "PYTHONFAULTHANDLER": "1",
            "PYTHONUNBUFFERED": "1",
        }
        return {"GLOO_SOCKET_IFNAME": self.interface} | interfaces | theirs | ours

    def close(self) -> None:
        for handle in self._handles:
            handle.kill()
        for handle in self._handles:
            handle.wait()
        self._handles.clear()
        if self._modes is not None:
            # A debugger that was killed at its prompt leaves the terminal without echo.
            termios.tcsetattr(sys.stdin, termios.TCSADRAIN, self._modes)


def cores() -> int:
    """Return the number of cores that this process may use: in a container it may be fewer than the machine
    has."""
    return len(os.sched_getaffinity(0))
