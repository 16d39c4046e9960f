"""The coordinator's connection to its broker (broker.py)."""

from __future__ import annotations

import importlib.util
import json
import os
import queue
import re
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from manyhands.errors import ManyhandsError, UsageError
from manyhands.hosts.ray.messages import (
    FROM_BROKER,
    ConnectRay,
    EndBroker,
    RayConnected,
    RayFailed,
)
from manyhands.threads import describe, start_thread
from manyhands.transport.fields import encode

PROGRAM = "manyhands.hosts.ray.broker"
RAY_DEFAULTS = {
    "RAY_gcs_server_request_timeout_seconds": "10",  # else Ray looks for its node here for a minute
    "RAY_USAGE_STATS_ENABLED": "0",
}
CONNECT_S = 60.0
"""Time limit for connecting to a cluster, or starting one."""
END_S = 12.0
"""Time for the broker to release everything."""


def check_installed() -> None:
    found = importlib.util.find_spec("ray")
    if found is None or found.origin is None:  # a mere folder of that name is no package
        raise UsageError(
            "--on ray needs Ray, which is not installed here. Type:  pip install 'manyhands[ray]'  "
            "(on every node of the cluster)."
        )


class BrokerClient:
    """A broker that is connected to a cluster. `close` releases what it holds there."""

    def __init__(self, address: str, *, cpus: int, ship: str | None = None) -> None:
        """`cpus`: CPUs of a cluster that has to be started first."""
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - as long as the process
        # A process group of its own: Ctrl-C is for the coordinator, which ends it.
        self._process = subprocess.Popen(
            [sys.executable, "-m", PROGRAM],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env=RAY_DEFAULTS | os.environ,
            text=True,
            process_group=0,
        )
        self._lock = threading.Lock()
        self._messages: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._handle: Callable[[Any], object] = self._messages.put
        self._closing = False
        self._trouble = ""
        self._reader = start_thread(self._read, name="ray", on_error=self._fail)
        try:
            self.send(ConnectRay(address, cpus, ship))
            self.cluster = self._connected(address)
        except BaseException:
            self.close()
            raise

    def _connected(self, address: str) -> RayConnected:
        where = f" at {address}" if address else ""
        try:
            message = self._messages.get(timeout=CONNECT_S)
        except queue.Empty:
            raise UsageError(
                f"The Ray cluster{where} has not answered within {CONNECT_S:.0f} s. Does  ray status  show "
                "it?  --on ray=local  starts one of this machine for the run."
            ) from None
        if isinstance(message, RayFailed):
            raise UsageError(message.text)
        if not isinstance(message, RayConnected):
            raise ManyhandsError(f"Ray can't be used{where}: {self.last_words()}")
        return message

    def listen(self, handle: Callable[[Any], None]) -> None:
        """Call `handle` with each of the broker's messages, in a thread; with None once the broker is
        gone."""
        self._handle = handle
        while not self._messages.empty():
            handle(self._messages.get())

    def send(self, message: Any) -> None:
        with self._lock, suppress(BrokenPipeError, ValueError):  # the reading thread sees the same
            assert self._process.stdin is not None
            self._process.stdin.write(encode(message) + "\n")
            self._process.stdin.flush()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._handle(FROM_BROKER.read(json.loads(line)))
        if not self._closing:
            self._handle(None)

    def _fail(self, error: BaseException) -> None:
        """End the broker: its messages can't be read any more."""
        self._trouble = describe(error)
        self._process.kill()
        if not self._closing:
            self._handle(None)

    def last_words(self) -> str:
        """Return the last line that the broker or Ray in it printed, without Ray's prefix of time and
        place."""
        if self._trouble:
            return self._trouble
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").strip().splitlines()
        last = lines[-1] if lines else "its process ended without output"
        return re.sub(r"^\[[^]]*\] \S+:\d+: ", "", last).partition(". ")[0]

    def close(self) -> None:
        self._closing = True
        self.send(EndBroker())
        with self._lock, suppress(BrokenPipeError):
            assert self._process.stdin is not None
            self._process.stdin.close()
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()  # Ray releases what it held
            self._process.wait()
        self._reader.join()
        assert self._process.stdout is not None
        self._process.stdout.close()
        self._errors.close()
