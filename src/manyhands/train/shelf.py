"""The coordinator's side of checkpoints: a written one counts once every step up to it is on record.

A checkpoint that can't be written is told and forgotten; training goes on, and nothing already saved
is touched. Only when the last one fails does the run.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from manyhands.errors import CheckpointError
from manyhands.state import checkpoints
from manyhands.state.checkpoints import Manifest
from manyhands.state.runs import Run
from manyhands.train.course import Checkpoint, Course
from manyhands.train.options import Options
from manyhands.watch import events
from manyhands.watch.sinks import Stream


class Shelf:
    def __init__(
        self, run: Run, stream: Stream, options: Options, *, newest: Manifest | None
    ) -> None:
        self._run = run
        self._stream = stream
        self._options = options
        self._expected: dict[int, Checkpoint] = {}
        self._written: dict[int, Mapping[str, Any]] = {}
        self.newest = f"checkpoints/{newest.name}" if newest else None
        """Relative to the run folder."""
        self.error = ""
        """What was wrong with the last attempt."""

    def expect(self, order: Checkpoint) -> None:
        self._expected[order.step] = order

    def written(self, step: int, report: Mapping[str, Any]) -> None:
        self._written[step] = report

    def settle(self, course: Course) -> None:
        """Make those count whose every step is committed."""
        for step in [s for s in self._written if s <= course.committed_step]:
            report, order = self._written.pop(step), self._expected.pop(step)
            try:
                self._commit(order, report)
            except CheckpointError as error:
                self.error = f"The checkpoint of step {step} could not be saved: {error}"
                last = f"; the last good one is {self.newest}" if self.newest else ""
                self._stream.emit(events.Noticed(message=f"{self.error}. Training goes on{last}."))
                continue
            best = course.best.step if course.best.metrics else None
            if best is None or best in checkpoints.steps(self._run.path):  # else it is on its way
                checkpoints.prune(self._run.path, keep=self._options.keep, also=best)

    def _commit(self, order: Checkpoint, report: Mapping[str, Any]) -> None:
        if "error" in report:
            raise CheckpointError(report["error"])
        path = checkpoints.commit(
            self._run.path,
            order.step,
            files=report["files"],
            course=order.state,
            strategy=self._options.strategy,
            workers=self._options.workers,
        )
        self.error = ""
        self.newest = f"checkpoints/{path.name}"
        self._stream.emit(
            events.CheckpointSaved(
                step=order.step,
                path=self.newest,
                bytes=report["bytes"],
                stall_s=report["stall_s"],
                write_s=report["write_s"],
            )
        )
