"""Readers of cluster descriptions, one file a source; `detect` tells which one applies."""

from manyhands.cluster.specs.detect import alone, detect, look
from manyhands.cluster.specs.several import Several, one_of_several
from manyhands.cluster.specs.table import describe

__all__ = ["Several", "alone", "describe", "detect", "look", "one_of_several"]
