"""What a process needs to coordinate members, wherever they run."""

from __future__ import annotations

from dataclasses import dataclass

from manyhands.hosts.launchers import Launcher
from manyhands.hosts.timeouts import Timeouts
from manyhands.transport import Authority


@dataclass(frozen=True)
class LaunchPlan:
    control: str
    """The address that the coordinator listens on."""
    launcher: Launcher
    authority: Authority | None = None
    timeouts: Timeouts | None = None
