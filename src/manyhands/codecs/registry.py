"""All codecs by name."""

from __future__ import annotations

from manyhands.codecs.codec import Codec
from manyhands.codecs.int8 import Int8

CODECS: dict[str, type[Codec]] = {cls.name: cls for cls in (Int8,)}

PLANNED = {
    "fp8": "int8",
    "fp16": "int8",
    "bf16": "int8",
    "topk": "int8",
    "randomk": "int8",
    "powersgd": "int8",
    "signsgd": "int8",
    "onebit": "int8",
}
"""Codecs that don't exist yet, and for each the nearest one that does."""
