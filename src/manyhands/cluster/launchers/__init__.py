"""Where members run: one file a launcher."""

from manyhands.cluster.launchers.base import Handle, Launcher, Start
from manyhands.cluster.launchers.local import LocalHandle, LocalLauncher, cores

__all__ = ["Handle", "Launcher", "LocalHandle", "LocalLauncher", "Start", "cores"]
