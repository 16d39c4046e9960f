"""Readers of cluster descriptions, one file per source; `detect` picks the one that applies."""

from manyhands.hosts.discovery.detect import detect
from manyhands.hosts.discovery.several import LauncherProcess, one_of_several
from manyhands.hosts.discovery.table import describe

__all__ = ["LauncherProcess", "describe", "detect", "one_of_several"]
