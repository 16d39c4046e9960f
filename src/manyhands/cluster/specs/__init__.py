"""Readers of cluster descriptions, one file a source; `detect` tells which one applies."""

from manyhands.cluster.specs.detect import alone, detect, look
from manyhands.cluster.specs.table import describe

__all__ = ["alone", "describe", "detect", "look"]
