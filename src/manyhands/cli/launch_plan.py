"""What a process needs to be the coordinator of members anywhere."""

from __future__ import annotations

from dataclasses import dataclass

from manyhands.hosts.launchers import Launcher
from manyhands.hosts.timeouts import Timeouts
from manyhands.transport import Authority


@dataclass(frozen=True)
class LaunchPlan:
    control: str
    """Where it listens."""
    launcher: Launcher | None = None
    authority: Authority | None = None
    timeouts: Timeouts | None = None
