"""The interface of launchers: they start and end members, and know nothing of training.

Lifecycle: `attach(context)` once there is a coordinator; `complete()` until it is true; `start(request)` for
each member, in any order, returns a Handle; `Handle.wait()` returns the exit code when the process is gone;
`close()` ends the rest. A launcher must ensure that its members can't outlive the coordinator, even if the
coordinator is killed with SIGKILL.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from manyhands.hosts.invitation import Invitation
from manyhands.hosts.timeouts import Timeouts
from manyhands.threads import OnError, fail_process
from manyhands.transport import Link

if TYPE_CHECKING:
    from manyhands.hosts.agent_messages import AgentHello

AGENT = "agent-"
"""Prefix of the names in agents' certificates."""


@dataclass(frozen=True)
class LauncherContext:
    """The coordinator that a launcher starts members for."""

    address: str
    """Address of the coordinator."""
    scratch: Path
    """The run's private folder on the coordinator's host."""
    logs: Path
    timeouts: Timeouts
    notify: Callable[[str], None]
    """Prints a notice of the run; may be called from any thread."""
    on_error: OnError = fail_process
    """Ends the run with an error of one of the launcher's threads."""
    interrupt: Callable[[int], None] = lambda number: None
    """Asks the run to stop, as a signal with this number does."""


@dataclass(frozen=True)
class StartRequest:
    """One member to start."""

    name: str
    entry: str
    """The Python module that is the member's program."""
    invitation: Invitation
    log: Path | None
    """File for its output; None: the output is read from the handle's `output`."""
    threads: int
    """Compute threads of this member; 0: its share of the host's cores."""
    role: str = "worker"


class Handle(ABC):
    """A started member."""

    name: str
    pid: int
    host: str
    sees_run: bool = True
    """If true, the run folder is visible on its host."""
    gone: bool = False
    """If true, the process has ended, and `wait` has returned once."""
    why: str = ""
    """Reason why it ended, if the exit code does not show it."""

    @abstractmethod
    def wait(self) -> int:
        """Block until the process is gone; its exit code, negative for a signal."""

    @abstractmethod
    def terminate(self) -> None:
        """Send it SIGTERM."""

    @abstractmethod
    def kill(self) -> None:
        """Kill it and everything it started."""


class Launcher(ABC):
    kind: str
    """As in `--on KIND`."""
    again: str = ""
    """The flag that makes `resume` use the same place."""
    shares_cores: bool = False
    """If true, all members are on this machine and no scheduler divides its cores among them."""
    spans_hosts: bool = False
    """If true, members may run on several hosts, now or later. Known once `complete()` is true."""

    def attach(self, context: LauncherContext) -> None:  # noqa: B027 - most need not know
        """Called once the coordinator listens."""

    def complete(self) -> bool:
        """Return whether the announced hosts have joined. Raises if they can't."""
        return True

    def slots(self, role: str) -> int:
        """Return the number of members of this role that could be started now."""
        return sys.maxsize

    def has_room(self, workers: int, servers: int) -> bool:
        """Return whether all of these could be started now. Raises if they never can."""
        return True

    def want(self, workers: int) -> None:  # noqa: B027 - most have a fixed number of slots
        """Make room for this number of workers, if possible."""

    def accept_agent(self, link: Link, hello: AgentHello) -> None:
        """Handle a connection that began with an agent's hello. Returns when the agent is gone."""
        link.close()

    @abstractmethod
    def start(self, request: StartRequest) -> Handle: ...

    @abstractmethod
    def close(self) -> None:
        """End every member that is left. Idempotent."""

    def end(self, code: int) -> None:  # noqa: B027 - most have nothing but members
        """End the processes that outlive the coordinator, with the run's exit code."""
