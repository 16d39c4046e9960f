"""Tracks checkpoints from order to commit: a written checkpoint counts once every step up to it is committed.

A checkpoint that can't be written is reported and forgotten; training continues, and nothing already saved is
touched. The run fails only if the last one does. A checkpoint with weights that are not finite is not written
at all.

The first worker writes the weights. If each worker holds state that no other has, all of them write: a
checkpoint counts when all have reported, and is void if one of them dies before.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from manyhands.control.messages import Saved, Saving
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
    view: int
    """The view in which it was ordered."""
    writers: Sequence[str]
    """In rank order: the first one writes the weights."""
    workers: int
    copied: set[str] = field(default_factory=set)
    """Writers that have copied the state: they can write it even if the state changes now."""
    reports: dict[str, Saved] = field(default_factory=dict)
    """Reports of the writers that are done."""
    leftovers: set[str] = field(default_factory=set)
    """Writers that were done when it was ordered in an earlier view: their files are there, and they have
    reported them."""
    stats: Mapping[str, Any] = field(default_factory=dict)
    """State of the statistics when the last writer had copied its own."""

    @property
    def started(self) -> bool:
        return self.copied.issuperset(self.writers)

    @property
    def written(self) -> bool:
        return self.reports.keys() >= set(self.writers)

    def can_come(self, members: Collection[str], *, unstarted: bool = False) -> bool:
        """Return whether it can be written if only these members are left. `unstarted`: if true, writers that
        have not copied the state yet count too."""
        return all(
            name in self.reports or (name in members and (unstarted or name in self.copied))
            for name in self.writers
        )


class CheckpointTracker:
    def __init__(
        self,
        run: RunFolder,
        stream: Stream,
        options: RunOptions,
        *,
        newest: Manifest | None,
        stats: Callable[[], Mapping[str, Any]] = dict,
    ) -> None:
        """`stats`: returns what a checkpoint keeps besides the plan."""
        self._stats = stats
        self._run = run
        self._stream = stream
        self._options = options
        self._holds_state = options.config.traits.holds_state
        self._expected: dict[int, ExpectedCheckpoint] = {}
        self._lost: set[int] = set()
        self._void_writers: set[tuple[int, str]] = set()
        """Writers of checkpoints that are void, until they report or die."""
        self.newest = f"checkpoints/{newest.name}" if newest else None
        """Relative to the run folder."""
        self.error = ""
        """The error of the last attempt."""
        self.not_finite: int | None = None
        """The step of the last attempt, if its weights were not finite."""
        self._reported_not_finite = False

    @property
    def unstarted(self) -> bool:
        """If true, some writer of an ordered checkpoint has not copied the state yet."""
        return any(not expected.started for expected in self._expected.values())

    def under_way(self, members: Collection[str], *, unstarted: bool = False) -> list[int]:
        """Return the steps of checkpoints that these members are writing from a copy of the state. If
        `unstarted` is true, include those that are not copied yet."""
        return [
            step
            for step, expected in self._expected.items()
            if not expected.written and expected.can_come(members, unstarted=unstarted)
        ]

    def expect(self, order: Checkpoint, *, view: int, workers: Sequence[str]) -> None:
        writers = workers if self._holds_state else workers[:1]
        expected = ExpectedCheckpoint(order, view, writers, len(workers))
        if (before := self._expected.get(order.step)) is not None:  # ordered again, in another view
            self._remove(order.step, *(n for n in before.writers if n not in writers))
            expected.leftovers |= before.leftovers | before.reports.keys()
        self._expected[order.step] = expected
        self._lost.discard(order.step)

    def started(self, member: str, report: Saving) -> None:
        expected = self._expected.get(report.step)
        if expected is not None and expected.view == report.view:
            expected.copied.add(member)
            expected.stats = self._stats()

    def written(self, member: str, report: Saved) -> None:
        expected = self._expected.get(report.step)
        self._void_writers.discard((report.step, member))
        if expected is None or member not in expected.writers:  # void
            self._remove(report.step, member)
        elif expected.view == report.view:
            expected.reports[member] = report
        else:  # it was void, and is written again, to the same folder
            expected.leftovers.add(member)

    def void_from(self, first: int) -> list[int]:
        """Forget the checkpoints of this step and of later ones: they have samples that were lost. Returns
        their steps."""
        void = [step for step in self._expected if step >= first]
        for step in void:
            # One that still writes reports it, and what it has written is removed then.
            self._remove(step, *self._expected.pop(step).writers)
        self._lost.update(void)
        return void

    def void(self, members: Collection[str]) -> list[int]:
        """Forget the checkpoints that can't be completed with only these members. Returns their steps."""
        void = [
            step
            for step, expected in self._expected.items()
            if not expected.written and not expected.can_come(members)
        ]
        for step in void:
            expected = self._expected.pop(step)
            # Of the others, each still reports, or has written nothing in this view.
            over = [n for n in expected.writers if n in expected.reports or n not in members]
            self._remove(step, *over, *(expected.leftovers - expected.copied))
            self._void_writers |= {(step, n) for n in expected.writers if n not in over}
        for step, name in [each for each in self._void_writers if each[1] not in members]:
            self._void_writers.discard((step, name))
            self._remove(step, name)
        self._lost.update(void)
        return void

    def commit_written(self, plan: TrainingPlan) -> None:
        """Commit the written checkpoints up to the last committed step."""
        for step, expected in list(self._expected.items()):
            if not expected.written or step > plan.committed_step:
                continue
            del self._expected[step]
            bad = [report for report in expected.reports.values() if report.error]
            if bad:
                self._remove(step, *expected.writers)
            if bad and bad[0].not_finite:
                self._skip(step, bad[0].not_finite, plan)
                continue
            try:
                if bad:
                    raise CheckpointError(bad[0].error)
                self._commit(expected)
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

    def _commit(self, expected: ExpectedCheckpoint) -> None:
        order = expected.order
        reports = [expected.reports[name] for name in expected.writers]
        path = checkpoints.commit(
            self._run.path,
            order.step,
            files=[
                {name: vars(facts) for name, facts in report.files.items()} for report in reports
            ],
            training_plan={**order.state, **expected.stats},
            strategy=self._options.strategy,
            workers=expected.workers,
            writers=expected.writers,
            holds_state=self._holds_state,
        )
        self.error, self.not_finite = "", None
        self.newest = f"checkpoints/{path.name}"
        self._stream.emit(
            events.CheckpointSaved(
                step=order.step,
                path=self.newest,
                bytes=sum(report.bytes for report in reports),
                stall_s=max(report.stall_s for report in reports),
                write_s=max(report.write_s for report in reports),
            )
        )

    def _remove(self, step: int, *writers: str) -> None:
        """Delete the files of these writers: the checkpoint does not count."""
        for name in writers:
            shutil.rmtree(checkpoints.partial(self._run.path, step, name), ignore_errors=True)
