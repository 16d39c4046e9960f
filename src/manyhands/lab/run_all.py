"""Run one command on every host of a lab, with the variables that torchrun sets.

One thread waits for everything: output of the hosts and the end of their processes. When one fails, the
others get SIGTERM, and SIGKILL some seconds later.
"""

from __future__ import annotations

import os
import selectors
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from manyhands.events.units import clean
from manyhands.lab.lab import Lab, LabHost
from manyhands.lab.layout import INTERFACE

MASTER_PORT = 29500
"""Free on every host, since nothing else runs there."""
GRACE_S = 5.0
READ_BYTES = 65_536


def variables(lab: Lab, host: LabHost) -> dict[str, str]:
    """Return what torchrun would set for the only process of a host, and the interface to use."""
    groups = ("", "GROUP_", "ROLE_")
    ranks = {f"{group}RANK": str(host.index) for group in groups}
    sizes = {f"{group}WORLD_SIZE": str(len(lab.hosts)) for group in groups}
    return {
        **ranks,
        **sizes,
        "PYTHONUNBUFFERED": "1",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "ROLE_NAME": "default",
        "MASTER_ADDR": lab.hosts[0].name,
        "MASTER_PORT": str(MASTER_PORT),
        "TORCHELASTIC_RUN_ID": f"lab-{lab.number}",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_USE_AGENT_STORE": "False",
        "GLOO_SOCKET_IFNAME": INTERFACE,
        "NCCL_SOCKET_IFNAME": INTERFACE,
    }


@dataclass(frozen=True)
class Outcome:
    codes: dict[str, int]
    """The exit code of every host's command; 128 + N for signal N."""
    failed: str | None
    """The first host whose command failed."""

    @property
    def code(self) -> int:
        return self.codes[self.failed] if self.failed else 0


def run_on_all_hosts(
    lab: Lab,
    command: Sequence[str],
    *,
    on_line: Callable[[str, str], None],
    env: Mapping[str, str] | None = None,
) -> Outcome:
    """Run a command on every host to its end. `on_line` gets the name of a host and a line of its output."""
    runs: list[_HostCommand] = []
    with selectors.DefaultSelector() as selector:
        try:
            for host in lab.hosts:
                runs.append(
                    _HostCommand(host, command, {**variables(lab, host), **(env or {})}, on_line)
                )
                runs[-1].register(selector)
            _dispatch(selector, lambda: all(run.ended for run in runs) or bool(_failed(runs)))
            first = _failed(runs)
        finally:
            _end(selector, runs)
    return Outcome({run.host.name: run.code for run in runs}, first[0].host.name if first else None)


class _HostCommand:
    """The command on one host."""

    def __init__(
        self,
        host: LabHost,
        command: Sequence[str],
        env: Mapping[str, str],
        on_line: Callable[[str, str], None],
    ) -> None:
        self.host = host
        self.ended = False
        self._on_line = on_line
        self._rest = b""
        self._process = host.start(
            command,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,  # one pipe keeps their order
            bufsize=0,
        )
        assert self._process.stdout is not None
        self._output = self._process.stdout
        os.set_blocking(self._output.fileno(), False)
        self._exit = os.pidfd_open(self._process.pid)

    @property
    def code(self) -> int:
        code = self._process.wait()
        return 128 - code if code < 0 else code

    def register(self, selector: selectors.BaseSelector) -> None:
        """Register output and exit, each with a callback that returns whether to keep it registered."""
        selector.register(self._output, selectors.EVENT_READ, self._read)
        selector.register(self._exit, selectors.EVENT_READ, self._mark_ended)

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the command and its children, if it still runs."""
        if not self.ended:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)

    def close(self) -> None:
        """Wait for its end, and report the rest of its output."""
        self._process.wait()
        while data := self._output.read(READ_BYTES):
            self._take(data)
        if self._rest:
            self._report(self._rest)
        os.close(self._exit)
        self._output.close()

    def _mark_ended(self) -> bool:
        self.ended = True
        return False

    def _read(self) -> bool:
        data = self._output.read(READ_BYTES)
        self._take(data or b"")
        return data != b""  # None: nothing to read right now

    def _take(self, data: bytes) -> None:
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            self._report(line)

    def _report(self, line: bytes) -> None:
        # Of a progress bar that overwrites itself, keep what would be visible.
        text = line.decode(errors="replace").rstrip("\r").rpartition("\r")[2]
        self._on_line(self.host.name, clean(text))


def _failed(runs: list[_HostCommand]) -> list[_HostCommand]:
    return [run for run in runs if run.ended and run.code != 0]


def _dispatch(
    selector: selectors.BaseSelector, enough: Callable[[], bool], within_s: float | None = None
) -> None:
    deadline = None if within_s is None else time.monotonic() + within_s
    while not enough():
        left_s = None if deadline is None else deadline - time.monotonic()
        if left_s is not None and left_s <= 0:
            return
        for key, _ in selector.select(left_s):
            if not key.data():
                selector.unregister(key.fileobj)
            if enough():
                return  # of two that end at once, only the first is the failure


def _end(selector: selectors.BaseSelector, runs: list[_HostCommand]) -> None:
    """Terminate what still runs, kill it after a grace period, and report the rest of the output."""
    for run in runs:
        run.signal(signal.SIGTERM)
    _dispatch(selector, lambda: all(run.ended for run in runs), GRACE_S)
    for run in runs:
        run.signal(signal.SIGKILL)
    for run in runs:
        run.close()
