"""Tracks checkpoints from order to commit: a written one counts once every step up to it is committed.

A checkpoint that can't be written is reported and forgotten; training continues, and nothing already
saved is touched. The run fails only if the last one does. A checkpoint whose writer dies is void. One
whose weights are not finite is not written at all.
"""

from __future__ import annotations

import shutil
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from manyhands.control.messages import Saved
from manyhands.coordinator.options import RunOptions
from manyhands.coordinator.plan import Checkpoint, TrainingPlan
from manyhands.errors import CheckpointError
from manyhands.events import events
from manyhands.events.sinks import Stream
from manyhands.runs import checkpoints
from manyhands.runs.checkpoints import Manifest
from manyhands.runs.folder import RunFolder


@dataclass
class ExpectedCheckpoint:
    order: Checkpoint
    writer: str
    workers: int
    started: bool = False
    """If true, the writer has copied the state: it can be written whatever happens to the weights now."""
    report: Saved | None = None
    """Set once it is written."""


class CheckpointTracker:
    def __init__(
        self, run: RunFolder, stream: Stream, options: RunOptions, *, newest: Manifest | None
    ) -> None:
        self._run = run
        self._stream = stream
        self._options = options
        self._expected: dict[int, ExpectedCheckpoint] = {}
        self._lost: set[int] = set()
        self.newest = f"checkpoints/{newest.name}" if newest else None
        """Relative to the run folder."""
        self.error = ""
        """The error of the last attempt."""
        self.not_finite: int | None = None
        """The step of the last attempt, if its weights were not finite."""
        self._reported_not_finite = False

    @property
    def unstarted(self) -> bool:
        """If true, a checkpoint was ordered whose writer has not copied the state yet."""
        return any(not expected.started for expected in self._expected.values())

    def under_way(self, members: Collection[str], *, unstarted: bool = False) -> list[int]:
        """Return the steps of checkpoints that these members are writing from a copy of the state. If
        `unstarted` is true, include those that are not copied yet."""
        return [
            step
            for step, expected in self._expected.items()
            if (expected.started or unstarted)
            and expected.report is None
            and expected.writer in members
        ]

    def expect(self, order: Checkpoint, *, writer: str, workers: int) -> None:
        self._expected[order.step] = ExpectedCheckpoint(order, writer, workers)
        self._lost.discard(order.step)

    def started(self, member: str, step: int) -> None:
        expected = self._expected.get(step)
        if expected is not None and expected.writer == member:
            expected.started = True

    def written(self, member: str, step: int, report: Saved) -> None:
        expected = self._expected.get(step)
        if expected is not None and expected.writer == member:
            expected.report = report
        else:  # void
            folder = checkpoints.partial(self._run.path, step, member)
            shutil.rmtree(folder, ignore_errors=True)

    def void(self, members: Collection[str]) -> list[int]:
        """Forget the checkpoints that can't come with only these members left. Returns their steps."""
        void = [
            step
            for step, expected in self._expected.items()
            if expected.report is None and not (expected.started and expected.writer in members)
        ]
        for step in void:
            del self._expected[step]
        self._lost.update(void)
        return void

    def commit_written(self, plan: TrainingPlan) -> None:
        """Make those checkpoints count whose every step is committed."""
        for step, expected in list(self._expected.items()):
            report = expected.report
            if report is None or step > plan.committed_step:
                continue
            del self._expected[step]
            if report.not_finite:
                self._skip(step, report.not_finite, plan)
                continue
            try:
                self._commit(expected, report)
            except CheckpointError as error:
                self.error = f"The checkpoint of step {step} could not be saved: {error}"
                last = f"; the last good one is {self.newest}" if self.newest else ""
                self._stream.notice(f"{self.error}. Training continues{last}.")
                continue
            best = plan.best.evaluation.step if plan.best.evaluation.metrics else None
            there = {*checkpoints.steps(self._run.path), *self._lost}
            if best is None or best in there:  # else its checkpoint is still to come
                checkpoints.prune(self._run.path, keep=self._options.keep, also=best)

    def _skip(self, step: int, names: Sequence[str], plan: TrainingPlan) -> None:
        """Skip a checkpoint whose weights are not finite: it counts neither as the last nor as the best."""
        self.not_finite = step
        if plan.best.evaluation.step == step:
            plan.best.keep(checkpoints.steps(self._run.path))
        if not self._reported_not_finite:
            self._reported_not_finite = True
            where = names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} others"
            last = f"The last good one is {self.newest}" if self.newest else "There is no good one"
            self._stream.notice(
                f"The weights of step {step} are not finite ({where}): they are not saved. {last}"
            )

    def _commit(self, expected: ExpectedCheckpoint, report: Saved) -> None:
        order = expected.order
        if report.error:
            raise CheckpointError(report.error)
        path = checkpoints.commit(
            self._run.path,
            order.step,
            files={name: vars(facts) for name, facts in report.files.items()},
            training_plan=order.state,
            strategy=self._options.strategy,
            workers=expected.workers,
            writer=expected.writer,
        )
        self.error, self.not_finite = "", None
        self.newest = f"checkpoints/{path.name}"
        self._stream.emit(
            events.CheckpointSaved(
                step=order.step,
                path=self.newest,
                bytes=report.bytes,
                stall_s=report.stall_s,
                write_s=report.write_s,
            )
        )
