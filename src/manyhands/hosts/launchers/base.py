"""A launcher starts members somewhere and can end them; it knows nothing of training.

Lifecycle: `attach(ground)` once there is a coordinator; `complete()` until it is true; `start(start)` for
each member, in any order, returns a Handle; `Handle.wait()` returns the exit code when the process is
gone; `close()` ends whatever is left. A launcher must see to it that its members can't outlive the
coordinator, also when that is killed with SIGKILL.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from manyhands.hosts.timeouts import Timeouts
from manyhands.threads import OnError, fail_process
from manyhands.transport import Link

AGENT = "agent-"
"""How the names in certificates of agents begin."""


@dataclass(frozen=True)
class LauncherContext:
    """What a launcher is told of the coordinator that it starts members for."""

    address: str
    """Where the coordinator listens."""
    scratch: Path
    """The run's private folder on the coordinator's host."""
    logs: Path
    timeouts: Timeouts
    tell: Callable[[str], None]
    """Says something to whoever watches the run, from any thread."""
    on_error: OnError = fail_process
    """Ends the run with an error of one of the launcher's threads."""


@dataclass(frozen=True)
class StartRequest:
    """What a launcher needs to start one member."""

    name: str
    entry: str
    """The Python module that is the member's program."""
    invitation: Mapping[str, Any]
    """How to reach the coordinator and what to do. Holds secrets: never on a command line."""
    log: Path | None
    """Where its output goes; None: to whoever reads the handle's `output`."""
    threads: int
    """Compute threads of this member; 0: as many as its host has for it."""
    role: str = "worker"


class Handle(ABC):
    """A started member."""

    name: str
    pid: int
    host: str
    sees_run: bool = True
    """The run folder is there, where it runs."""
    gone: bool = False
    """The process has ended, and `wait` has returned once."""
    why: str = ""
    """What its exit code does not tell of its end."""

    @abstractmethod
    def wait(self) -> int:
        """Block until the process is gone; its exit code, negative for a signal."""

    @abstractmethod
    def terminate(self) -> None:
        """Ask it to end."""

    @abstractmethod
    def kill(self) -> None:
        """End it and everything it started, now."""


class Launcher(ABC):
    kind: str
    """As in `--on KIND`."""
    again: str = ""
    """What `resume` has to be given to find the same place."""
    shares_cores: bool = False
    """All members are on this machine, whose cores nobody counts for them."""
    spans_hosts: bool = False
    """Members may run on several hosts, now or later. It is known once `complete()` is true."""

    def attach(self, ground: LauncherContext) -> None:  # noqa: B027 - most need not know
        """There is a coordinator now."""

    def complete(self) -> bool:
        """Whether the hosts are there that were announced. Raises when they won't be."""
        return True

    def slots(self, role: str) -> int:
        """How many members of this role could be started now."""
        return sys.maxsize

    def room(self, workers: int, servers: int) -> bool:
        """Whether all of these could be started now. Raises when they never could."""
        return True

    def want(self, workers: int) -> None:  # noqa: B027 - most have room or have not
        """So many workers are wanted from now on: make room for them, if that can be done."""

    def welcome(self, link: Link, hello: Mapping[str, Any]) -> None:
        """Somebody has connected who is no member, and says he is an agent. Returns when he is gone."""
        link.close()

    @abstractmethod
    def start(self, start: StartRequest) -> Handle: ...

    @abstractmethod
    def close(self) -> None:
        """End every member that is left. Idempotent."""
