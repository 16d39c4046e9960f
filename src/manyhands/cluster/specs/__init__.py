"""Readers of cluster descriptions, one file a source; `detect` tells which one applies."""

from manyhands.cluster.specs.detect import alone, detect, look

__all__ = ["alone", "detect", "look"]
