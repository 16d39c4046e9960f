"""One stream of typed events per run, and the sinks that record or show them."""

from __future__ import annotations

from manyhands.events.console import Console, make_console
from manyhands.events.jsonl import JsonlSink, committed_steps, read_events
from manyhands.events.sinks import Queued, Sink, Stream
from manyhands.events.tensorboard import TensorBoardSink

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
