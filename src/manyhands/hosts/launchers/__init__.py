"""Where members run: one file a launcher."""

from manyhands.hosts.launchers.base import AGENT, Ground, Handle, Launcher, Start
from manyhands.hosts.launchers.local import LocalHandle, LocalLauncher, cores

__all__ = [
    "AGENT",
    "Ground",
    "Handle",
    "Launcher",
    "LocalHandle",
    "LocalLauncher",
    "Start",
    "cores",
]
