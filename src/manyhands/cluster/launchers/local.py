"""Members as processes of this machine: the embedded default.

Each member is a fresh Python (never a fork of one that has loaded torch), in a process group of its
own so that Ctrl-C reaches only the coordinator, with its output in its own log. The invitation goes
through standard input. A member asks the kernel to kill it when its parent dies and ends itself when
the control link closes (see cluster/member.py): two independent reasons why none is ever left over.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from contextlib import suppress

from manyhands.cluster.launchers.base import Handle, Launcher, Start


class LocalHandle(Handle):
    def __init__(self, name: str, process: subprocess.Popen[bytes]) -> None:
        self.name = name
        self.pid = process.pid
        self.host = socket.gethostname()
        self._process = process
        # Popen.wait() from two threads at once may lose the exit code of the loser.
        self._lock = threading.Lock()
        self._gone = False

    def wait(self) -> int:
        with self._lock:
            code = self._process.wait()
            # Once, right after the leader: its data loaders must not outlive it, and later on the
            # number may belong to somebody else.
            if not self._gone:
                self.kill()
                self._gone = True
            return code

    def terminate(self) -> None:
        self.signal(signal.SIGTERM)

    def kill(self) -> None:
        self.signal(signal.SIGKILL)

    def signal(self, number: signal.Signals) -> None:
        """To it and everything it started, if it is still there."""
        if not self._gone:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, number)


class LocalLauncher(Launcher):
    kind = "local"

    def __init__(self) -> None:
        self._handles: list[LocalHandle] = []

    def start(self, start: Start) -> Handle:
        # Appended to: a resumed run keeps what was logged before.
        with open(start.log, "ab") as log:
            # No bufsize: the invitation must be on its way when write() returns.
            process = subprocess.Popen(
                [sys.executable, "-m", start.entry],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                process_group=0,
                bufsize=0,
                env=os.environ
                | {
                    "OMP_NUM_THREADS": str(start.threads),
                    "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo"),
                    "PYTHONFAULTHANDLER": "1",
                    "PYTHONUNBUFFERED": "1",
                },
            )
        assert process.stdin is not None
        invitation = {**start.invitation, "parent": os.getpid()}
        with suppress(BrokenPipeError):  # it died at once: wait() tells
            process.stdin.write(json.dumps(invitation).encode())
            process.stdin.close()
        handle = LocalHandle(start.name, process)
        self._handles.append(handle)
        return handle

    def close(self) -> None:
        for handle in self._handles:
            handle.kill()
        for handle in self._handles:
            handle.wait()
        self._handles.clear()


def cores() -> int:
    """The cores that this process may use, which a container may have fewer of than the machine."""
    return len(os.sched_getaffinity(0))
