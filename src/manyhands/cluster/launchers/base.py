"""A launcher starts members somewhere and can end them; it knows nothing of training.

Lifecycle: `start(start)` for each member, in any order, returns a Handle; `Handle.wait()` returns the
exit code when the process is gone; `close()` ends whatever is left. A launcher must see to it that
its members can't outlive the coordinator, also when that is killed with SIGKILL.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Start:
    """What a launcher needs to start one member."""

    name: str
    entry: str
    """The Python module that is the member's program."""
    invitation: Mapping[str, Any]
    """How to reach the coordinator and what to do. Holds secrets: never on a command line."""
    log: Path
    threads: int
    """Compute threads of this member."""


class Handle(ABC):
    """A started member."""

    name: str
    pid: int
    host: str

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

    @abstractmethod
    def start(self, start: Start) -> Handle: ...

    @abstractmethod
    def close(self) -> None:
        """End every member that is left. Idempotent."""
