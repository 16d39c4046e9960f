"""Seeing a run: one stream of typed events, and the sinks that make something of it."""

from __future__ import annotations

from manyhands.watch.console import Console, make_console
from manyhands.watch.jsonl import JsonlSink, committed_steps, read_events
from manyhands.watch.sinks import Queued, Sink, Stream
from manyhands.watch.tensorboard import TensorBoardSink

__all__ = [
    "Console",
    "JsonlSink",
    "Queued",
    "Sink",
    "Stream",
    "TensorBoardSink",
    "committed_steps",
    "make_console",
    "read_events",
]
