"""The coordinator's end of what it and the broker (broker.py) tell each other."""

from __future__ import annotations

import importlib.util
import json
import queue
import re
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from manyhands.errors import ManyhandsError, UsageError
from manyhands.hosts.ray.resources import RayNode
from manyhands.threads import describe, start_thread

PROGRAM = "manyhands.hosts.ray.broker"
CONNECT_S = 60.0
"""A cluster has answered, or one was started here."""
END_S = 12.0
"""The broker has given everything back."""


def check_installed() -> None:
    found = importlib.util.find_spec("ray")
    if found is None or found.origin is None:  # a mere folder of that name is no package
        raise UsageError(
            "--on ray needs Ray, which is not installed here. Type:  pip install 'manyhands[ray]'  "
            "(on every node of the cluster)."
        )


class BrokerClient:
    """A broker that is connected to a cluster. `close` gives back what it holds there."""

    def __init__(self, address: str, *, cpus: int, ship: str | None = None) -> None:
        """`cpus`: so many a cluster has that must be started first."""
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - as long as the process
        # A process group of its own: Ctrl-C is for the coordinator, which ends it.
        self._process = subprocess.Popen(
            [sys.executable, "-m", PROGRAM],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            process_group=0,
        )
        self._lock = threading.Lock()
        self._said: queue.SimpleQueue[Mapping[str, Any] | None] = queue.SimpleQueue()
        self._hear: Callable[[Mapping[str, Any] | None], object] = self._said.put
        self._closing = False
        self._trouble = ""
        self._reader = start_thread(self._read, name="ray", on_error=self._fail)
        try:
            self.say("connect", address=address, cpus=cpus, ship=ship)
            hello = self._first(address)
        except BaseException:
            self.close()
            raise
        self.address: str = hello["address"]
        self.host: str = hello["host"]
        """The address of this machine by which the other nodes know it."""
        self.started: bool = hello["started"]
        """The cluster is there for this run alone."""
        self.none_found: bool = hello["none_found"]
        self.nodes = [RayNode.of(node) for node in hello["nodes"]]

    def _first(self, address: str) -> Mapping[str, Any]:
        where = f" at {address}" if address else ""
        try:
            said = self._said.get(timeout=CONNECT_S)
        except queue.Empty:
            raise UsageError(
                f"The Ray cluster{where} has not answered within {CONNECT_S:.0f} s. Does  ray status  show "
                "it?  --on ray=local  starts one of this machine for the run."
            ) from None
        if said is None:
            raise ManyhandsError(f"Ray can't be used{where}: {self.last_words()}")
        if said["kind"] == "failed":
            raise UsageError(said["text"])
        return said

    def listen(self, hear: Callable[[Mapping[str, Any] | None], None]) -> None:
        """From now on call this with what the broker says, in a thread; None: it is gone."""
        self._hear = hear
        while not self._said.empty():
            hear(self._said.get())

    def say(self, kind: str, **fields: Any) -> None:
        with self._lock, suppress(BrokenPipeError, ValueError):  # its reader sees the same
            assert self._process.stdin is not None
            self._process.stdin.write(json.dumps({"kind": kind, **fields}) + "\n")
            self._process.stdin.flush()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._hear(json.loads(line))
        if not self._closing:
            self._hear(None)

    def _fail(self, error: BaseException) -> None:
        """What the broker says is not understood any more: as good as gone."""
        self._trouble = describe(error)
        self._process.kill()
        if not self._closing:
            self._hear(None)

    def last_words(self) -> str:
        """What the broker or Ray in it has said last, without the time and place that Ray puts before it."""
        if self._trouble:
            return self._trouble
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").strip().splitlines()
        last = lines[-1] if lines else "its process ended without a word"
        return re.sub(r"^\[[^]]*\] \S+:\d+: ", "", last).partition(". ")[0]

    def close(self) -> None:
        self._closing = True
        self.say("end")
        with self._lock, suppress(BrokenPipeError):
            assert self._process.stdin is not None
            self._process.stdin.close()
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()  # Ray takes back what it held
            self._process.wait()
        self._reader.join()
        assert self._process.stdout is not None
        self._process.stdout.close()
        self._errors.close()
