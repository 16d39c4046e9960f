"""Dispatches work: which order goes to which member, what is still open, and what a view change voids.

`LockstepDispatcher`: every replica gets a share of every step, in proportion to its speed, and orders are
sent in the order of the plan. All workers of a replica get the same.
`WorkQueueDispatcher`: a step is cut into parts, and each part goes to the next free worker. If the learners
want no parts, a step is one part. What all workers do together (an evaluation, a checkpoint, the stop) is a
barrier: it waits until nothing is open. When only a barrier is left, each worker is ordered to rest.

In a training in rounds, steps are in the weights only when the round has ended. So in lockstep, how far ahead
orders are sent depends on what is computed (computed.py), and where the plan ends a round early, the workers
are ordered to rest, which makes them end it.

When the members change, `mark_applied` marks the open parts that are in the weights; `redispatch` then
dispatches the rest again among the members that are left.
"""

from __future__ import annotations

import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence

from manyhands.contract import Strategy
from manyhands.control import messages
from manyhands.coordinator.checkpoint_tracker import CheckpointTracker
from manyhands.coordinator.computed import ComputedPortions
from manyhands.coordinator.plan import (
    Checkpoint,
    Evaluate,
    StepPlan,
    Stop,
    TrainingPlan,
    TrainSteps,
    Wait,
)
from manyhands.coordinator.progress import CommittedStep, PartKey, StepProgress, StepRow, Sums
from manyhands.coordinator.straggler_trial import Meter
from manyhands.coordinator.throughput import Throughput
from manyhands.coordinator.work_queue import (
    AHEAD_S,
    MAX_AHEAD,
    SHORT_AHEAD_S,
    QueuedPart,
    WorkQueue,
    cut,
)
from manyhands.errors import ProtocolError
from manyhands.hosts.view import View
from manyhands.ranges import Range

PROBE_EVERY = 50
"""Interval, in steps, at which a worker that is too slow for a share gets one sample, to measure it again."""

LONG_ROUND_S = 20.0
"""A stop ends the round early if the rest of it would take longer."""

Send = Callable[[str, messages.Order], None]
"""Sends an order to the member of that name."""


def make_dispatcher(
    config: Strategy,
    plan: TrainingPlan,
    checkpoint_tracker: CheckpointTracker,
    send: Send,
    *,
    equal: bool = False,
) -> Dispatcher:
    """`equal`: in lockstep, shares ignore the workers' speed."""
    if config.traits.lockstep:
        uniform = config.traits.uniform
        return LockstepDispatcher(plan, checkpoint_tracker, send, equal=equal, uniform=uniform)
    return WorkQueueDispatcher(plan, checkpoint_tracker, send, config.parts)


class Dispatcher(ABC):
    def __init__(
        self, plan: TrainingPlan, checkpoint_tracker: CheckpointTracker, send: Send
    ) -> None:
        self.plan = plan
        self.progress = StepProgress()
        self._view = 0
        self.workers: tuple[str, ...] = ()
        self.replicas: tuple[tuple[str, ...], ...] = ()
        """The workers of each replica."""
        self.members: tuple[str, ...] = ()
        """The workers, then the servers."""
        self.catching_up: set[str] = set()
        """Workers that are new: they get samples once they have the weights."""
        self.whole_steps = False
        """If true, a step is one part, without lockstep."""
        self.finishing: str | None = None
        """The outcome, once all members were ordered to stop."""
        self.throughput = Throughput()
        self.meter = Meter()
        self._checkpoint_tracker = checkpoint_tracker
        self._send = send

    @abstractmethod
    def dispatch_ahead(self, *, pause: bool = False, short: bool = False) -> None:
        """Dispatch orders until enough is ahead. `pause`: no new work, because a view change is due; `short`:
        one comes soon, so less is dispatched ahead."""

    @property
    @abstractmethod
    def idle(self) -> bool:
        """If true, nothing that was dispatched is unfinished."""

    @abstractmethod
    def add(self, member: str, row: StepRow) -> None:
        """Take in a worker's report of one part of a step."""

    def note_computed(self, member: str, num: int, seconds: float) -> None:
        """Note how many portions a worker has computed in this view, and the time that they took."""
        return

    @abstractmethod
    def mark_applied(self, applied: Mapping[PartKey, Sums | None]) -> None:
        """Mark the parts that are in the weights. All other unreported parts are not."""

    @abstractmethod
    def redispatch(self, view: View) -> int:
        """Take back what is open, to dispatch it again among the members of this view. Returns its number of
        steps."""

    def committed(self) -> Iterator[CommittedStep]:
        """Return the steps that are complete now."""
        for step in self.progress.committed():
            self.plan.commit(step.event.step, loss=step.event.loss, lost=step.lost)
            self.meter.note(step.event.samples)
            yield step
        self.meter.busy(len(self.progress) > 0)

    def saving(self, member: str, report: messages.Saving) -> None:
        """Note that a writer has copied the state of a checkpoint."""
        self._checkpoint_tracker.started(member, report)

    def evaluated(self) -> None:
        """Called when all workers have evaluated."""
        return

    def finish(self, reason: str) -> None:
        self.finishing = reason
        self.send_all(messages.StopOrder())

    def send_all(self, order: messages.Order) -> None:
        for name in self.members:
            self._send(name, order)

    def send_workers(self, order: messages.Order) -> None:
        for name in self.workers:
            self._send(name, order)

    def _time(self, member: str, row: StepRow) -> None:
        samples = self.progress.samples((row.step, row.part))
        if row.compute_s is not None and samples:
            self.throughput.note(member, samples, row.compute_s)

    def _set_members(self, view: View) -> None:
        self._view = view.number
        self.members = view.names
        self.workers = tuple(seat.name for seat in view.workers)
        self.replicas = tuple(tuple(seat.name for seat in each) for each in view.replicas)
        self.finishing = None
        self.meter.busy(False)

    def _count(self) -> None:
        """Tell the plan how many workers get samples: the batch may follow their number."""
        ready = sum(len(each) for each in self.replicas if not self._catches_up(each))
        self.plan.set_world(max(1, ready))

    def _catches_up(self, replica: Sequence[str]) -> bool:
        """Return whether one of its workers has no weights yet."""
        return not self.catching_up.isdisjoint(replica)

    def _dispatch_barrier(self, order: Evaluate | Checkpoint | Stop) -> None:
        match order:
            case Evaluate(step, epoch):
                self._dispatch_evaluation(step, epoch)
            case Checkpoint(step):
                self._checkpoint_tracker.expect(order, view=self._view, workers=self.workers)
                self.send_workers(messages.CheckpointOrder(step))
            case Stop(reason):
                self.finish(reason)

    def _dispatch_evaluation(self, step: int, epoch: int) -> None:
        """Give each replica a part of the data."""
        weights = self._evaluation_weights()
        ends = list(itertools.accumulate(weights, initial=0.0))
        for replica, (start, stop) in zip(self.replicas, itertools.pairwise(ends), strict=True):
            for name in replica:
                self._send(name, messages.EvaluateOrder(step, epoch, (start, stop, ends[-1])))

    def _weights(self) -> list[float]:
        """Return how much each replica should get, in proportion to its speed."""
        return self.throughput.weights(self.replicas)

    def _evaluation_weights(self) -> list[float]:
        """Return how much of an evaluation each replica should get."""
        return self._weights()


class LockstepDispatcher(Dispatcher):
    """Every worker does every step."""

    def __init__(
        self,
        plan: TrainingPlan,
        tracker: CheckpointTracker,
        send: Send,
        *,
        equal: bool,
        uniform: bool,
    ) -> None:
        """`equal`: shares ignore the workers' speed. `uniform`: all workers make equally many forwards."""
        super().__init__(plan, tracker, send)
        self._equal = equal
        self._uniform = uniform
        self._in_rounds = plan.config.round_steps is not None
        self._computed: dict[str, ComputedPortions] = {}
        self._num_dispatched = 0
        """Steps dispatched in this view."""
        self._resting = False
        """If true, the workers were ordered to end the round."""
        self._lost_checkpoints: list[int] = []
        """Steps of checkpoints that have samples which were lost, in a view that is over."""

    def dispatch_ahead(self, *, pause: bool = False, short: bool = False) -> None:
        if self.finishing is not None:
            return
        if pause:
            self._end_round()
            return
        ahead_s = SHORT_AHEAD_S if short else AHEAD_S
        step_s = max((each.step_s for each in self._computed.values()), default=0.0)
        self._count()
        if self.plan.stopping and self.plan.steps_to_save * step_s > LONG_ROUND_S:
            self.plan.end_round()
        while self.finishing is None:
            ahead = self._num_ahead
            if ahead >= 2 and ahead * step_s >= ahead_s:
                return
            room = int(ahead_s / step_s) if step_s else 1
            order = self.plan.next(max(1, min(room, MAX_AHEAD)))
            if isinstance(order, Wait):
                self._end_round()
            if order is None or isinstance(order, Wait):
                return
            if not isinstance(order, TrainSteps):
                self._dispatch_barrier(order)
                continue
            self._dispatch(order)
            if not step_s and ahead:
                return

    @property
    def idle(self) -> bool:
        return (
            not len(self.progress)
            and not self.plan.awaiting
            and not self._checkpoint_tracker.unstarted
        )

    def add(self, member: str, row: StepRow) -> None:
        if row.dropped:
            raise ProtocolError(f"it dropped its share of step {row.step}, in lockstep")
        self._time(member, row)
        self.progress.add(member, row)
        if member in self._computed:
            self._computed[member].note_row(row.step_s)

    def note_computed(self, member: str, num: int, seconds: float) -> None:
        if num > self._num_dispatched:
            raise ProtocolError(f"it has computed {num} steps of {self._num_dispatched}")
        if member in self._computed:
            self._computed[member].note(num, seconds)

    def committed(self) -> Iterator[CommittedStep]:
        for step in super().committed():
            if step.lost:
                self._lost_checkpoints += self._checkpoint_tracker.void_from(step.event.step)
            yield step

    def mark_applied(self, applied: Mapping[PartKey, Sums | None]) -> None:
        if self._in_rounds:
            self.progress.settle_rounds(applied)
        else:
            self.progress.settle(applied, whole=True)

    def redispatch(self, view: View) -> int:
        redone = len(self.progress)
        self.progress.clear()
        self.plan.take_back()
        lost = self._lost_checkpoints + self._checkpoint_tracker.void(view.names)
        if any(step <= self.plan.step for step in lost):  # later ones are ordered again by the plan
            self.plan.repeat_checkpoint()
        self._set_members(view)
        self._computed = {
            name: self._computed.get(name, ComputedPortions()) for name in self.workers
        }
        for each in self._computed.values():
            each.begin_view()
        self._num_dispatched, self._resting, self._lost_checkpoints = 0, False, []
        return redone

    @property
    def _num_ahead(self) -> int:
        """Steps that were dispatched, and that the slowest worker has not computed."""
        return self._num_dispatched - min(each.num for each in self._computed.values())

    def _end_round(self) -> None:
        """Have the workers end the round, if steps of it are open: nothing follows before."""
        if self._in_rounds and len(self.progress) and not self._resting:
            self._resting = True
            self.send_workers(messages.RestOrder())

    def _dispatch(self, order: TrainSteps) -> None:
        portions: list[list[messages.Portion]] = [[] for _ in self.replicas]
        weights = self._weights()
        if self.catching_up:
            pairs = zip(self.replicas, weights, strict=True)
            weights = [0.0 if self._catches_up(replica) else weight for replica, weight in pairs]
        for plan in order.plans:
            probe = plan.step % PROBE_EVERY == 0
            shares = dict(enumerate(plan.share_out(weights, least=1 if probe else 0)))
            self.progress.expect(plan, shares, dict(enumerate(self.replicas)))
            first = next(index for index, ranges in shares.items() if ranges)
            for index, ranges in shares.items():
                portions[index].append(_portion(plan, ranges, index, first=first))
        for replica, own_portions in zip(self.replicas, portions, strict=True):
            for name in replica:
                self._send(name, messages.TrainOrder(own_portions))
        self._num_dispatched += len(order.plans)
        self._resting = False
        self.meter.busy(True)

    def _weights(self) -> list[float]:
        return [1.0] * len(self.replicas) if self._equal else super()._weights()

    def _evaluation_weights(self) -> list[float]:
        # With equal parts, each worker knows how many forwards the others make.
        return [1.0] * len(self.replicas) if self._uniform else self._weights()


class WorkQueueDispatcher(Dispatcher):
    """Each part of a step goes to the next free worker."""

    def __init__(
        self,
        plan: TrainingPlan,
        tracker: CheckpointTracker,
        send: Send,
        parts: Callable[[int], int],
    ) -> None:
        super().__init__(plan, tracker, send)
        self._parts = parts
        self._queue = WorkQueue()
        self._barrier: Evaluate | Checkpoint | Wait | Stop | None = None
        self._dispatched = False
        """If true, the barrier was dispatched and is not done yet."""
        self._resting: set[str] = set()

    def dispatch_ahead(self, *, pause: bool = False, short: bool = False) -> None:
        self._queue.ahead_s = SHORT_AHEAD_S if short else AHEAD_S
        if self.finishing is not None:
            return
        if not pause:
            self._count()
            self._deal()
        if pause or (self._barrier is not None and not len(self._queue)):
            self._rest()
        if (
            self._barrier is not None
            and not self._dispatched
            and not pause
            and not len(self.progress)
        ):
            if isinstance(self._barrier, Wait):
                self._lift()
                self.dispatch_ahead()
                return
            self._dispatched = True
            self._dispatch_barrier(self._barrier)

    @property
    def idle(self) -> bool:
        return not self._queue.num_assigned and not self._dispatched

    def add(self, member: str, row: StepRow) -> None:
        # Only parts that this member holds count: a part that was assigned again counts for its new holder.
        if self._queue.done(member, (row.step, row.part), row.step_s, again=row.dropped):
            self._time(member, row)
            self.progress.add(member, row)

    def saving(self, member: str, report: messages.Saving) -> None:
        super().saving(member, report)
        barrier = self._barrier
        if (
            isinstance(barrier, Checkpoint)
            and barrier.step == report.step
            and not self._checkpoint_tracker.unstarted
        ):
            self._lift()

    def evaluated(self) -> None:
        if isinstance(self._barrier, Evaluate):
            self._lift()

    def mark_applied(self, applied: Mapping[PartKey, Sums | None]) -> None:
        self.progress.settle(applied, whole=False)

    def redispatch(self, view: View) -> int:
        back = self._queue.take_back(self.progress.is_open)
        lost = self._checkpoint_tracker.void(view.names)
        again = self._barrier.step if isinstance(self._barrier, Checkpoint) else None
        if any(step != again for step in lost):
            self.plan.repeat_checkpoint()
            if isinstance(self._barrier, Stop):
                self._lift()  # the stop is ordered again, after the checkpoint
        self._dispatched = False
        self._resting.clear()
        assert view.replica_size == 1, (
            "the workers of a replica do the same steps: in lockstep only"
        )
        self._set_members(view)
        self._queue.set_workers(self.workers)
        self.progress.width = len(self.workers)
        return len({part.plan.step for part in back})

    def _deal(self) -> None:
        if isinstance(self._barrier, Evaluate) and not self._dispatched and not self.plan.awaiting:
            self._lift()  # a stop was requested meanwhile
        while self._barrier is None and (lacking := self._queue.room() - len(self._queue)) > 0:
            self._fetch(lacking)
        portions: dict[str, list[messages.Portion]] = {}
        for name, part in self._queue.deal():
            plan = part.plan
            self.progress.assign(part.key, name)
            portions.setdefault(name, []).append(_portion(plan, part.ranges, part.number))
        for name, own_portions in portions.items():
            self._resting.discard(name)
            self._send(name, messages.TrainOrder(own_portions))
            self.meter.busy(True)

    def _fetch(self, lacking: int) -> None:
        """Put the next steps of the plan into the queue, or the barrier before them."""
        number = 1 if self.whole_steps else max(1, self._parts(len(self.workers)))
        order = self.plan.next(min(MAX_AHEAD, math.ceil(lacking / number)))
        assert order is not None, "the plan awaits an evaluation that was never ordered"
        if not isinstance(order, TrainSteps):
            self._barrier, self._dispatched = order, False
            return
        for plan in order.plans:
            parts: list[QueuedPart] = cut(plan, number)
            self.progress.expect(plan, {part.number: part.ranges for part in parts})
            self._queue.extend(parts)

    def _rest(self) -> None:
        for name in self.workers:
            if name not in self._resting:
                self._resting.add(name)
                self._send(name, messages.RestOrder())

    def _lift(self) -> None:
        self._barrier, self._dispatched = None, False


def _portion(
    plan: StepPlan, ranges: Sequence[Range], part: int, *, first: int = 0
) -> messages.Portion:
    return messages.Portion(
        plan.step, plan.epoch, plan.samples, tuple(ranges), part, plan.lr_factor, plan.ticks, first
    )
