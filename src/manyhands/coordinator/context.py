"""Objects that all parts of a run share."""

from __future__ import annotations

from dataclasses import dataclass

from manyhands.coordinator.coordinator import Coordinator
from manyhands.coordinator.options import RunOptions
from manyhands.events.sinks import Stream
from manyhands.runs.folder import RunFolder


@dataclass(frozen=True)
class RunContext:
    coordinator: Coordinator
    options: RunOptions
    run: RunFolder
    stream: Stream
