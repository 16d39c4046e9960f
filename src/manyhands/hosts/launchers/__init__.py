"""Where members run: one file a launcher."""

from manyhands.hosts.launchers.base import AGENT, Handle, Launcher, LauncherContext, StartRequest
from manyhands.hosts.launchers.local import LocalHandle, LocalLauncher, cores

__all__ = [
    "AGENT",
    "Handle",
    "Launcher",
    "LauncherContext",
    "LocalHandle",
    "LocalLauncher",
    "StartRequest",
    "cores",
]
