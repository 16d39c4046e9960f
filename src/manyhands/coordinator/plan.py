"""The course of a training: which order comes next. Pure: no clock, no process, no torch.

    for each epoch:
        Steps*            until every sample of the epoch is given out
        Checkpoint?       every so many steps, if asked
        Wait?             where losses decide what comes next: until what was given out is committed
        Evaluate?         every `eval_every` epochs and after the last; the course waits for its result
        Checkpoint        after each epoch, so that the best model is always one of them
    Stop                  when the epochs are over, the patience is, or somebody asked

Steps may be committed in any order. Samples are counted, not steps: the state of a course is the
epoch, what is committed of it, and the step number, so it can go on with any number of workers. So
the batch may change in the middle of an epoch, too (learning_rate.py). The job's schedule then goes by
samples: it is stepped as often as it would have been for the reference number of workers.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from manyhands.coordinator.batch_scaling import FIXED, Scaling
from manyhands.coordinator.learning_rate import LearningRate, RateChange
from manyhands.coordinator.leases import Leases
from manyhands.coordinator.monitor import LOSS, Monitor, saved_monitor
from manyhands.coordinator.plateau import Plateau
from manyhands.errors import CheckpointError
from manyhands.ranges import Range, Ranges, shares, split


@dataclass(frozen=True)
class PlanConfig:
    """What a course is made from."""

    num_samples: int
    batch_size: int
    epochs: int
    eval_every: int = 1
    has_eval: bool = True
    checkpoint_every: int = 0
    """Steps between checkpoints besides those after each epoch; 0 for none."""
    checkpoints: bool = True
    monitor: Monitor = LOSS
    patience: int | None = None
    scaling: Scaling = FIXED
    """How the batch and the learning rate follow the number of workers."""
    plateau: Plateau | None = None

    @property
    def by_samples(self) -> bool:
        """The job's schedule goes by samples, for steps are not all of its batch."""
        return self.scaling.on

    @property
    def steps_per_epoch(self) -> int:
        """Of batches of the job's own size."""
        return math.ceil(self.num_samples / self.batch_size)

    @property
    def num_steps(self) -> int:
        return self.steps_per_epoch * self.epochs


@dataclass(frozen=True)
class StepPlan:
    """One global step: which samples of which epoch."""

    step: int
    epoch: int
    ranges: tuple[Range, ...]
    lr_factor: float = 1.0
    """What the learning rate is multiplied by."""
    ticks: int = 1
    """How often the job's schedule is stepped after it."""

    @property
    def samples(self) -> int:
        return sum(stop - start for start, stop in self.ranges)

    def share_out(self, weights: Sequence[float], *, least: int = 0) -> list[list[Range]]:
        """The ranges of each worker, in rank order, in proportion to the weights; `least` samples for each
        that has a weight, if there are as many."""
        counts = shares(self.samples, weights)
        for rank, weight in enumerate(weights):
            largest = counts.index(max(counts))
            if weight and counts[rank] < least < counts[largest]:
                counts[rank], counts[largest] = least, counts[largest] + counts[rank] - least
        return split(self.ranges, counts)


@dataclass(frozen=True)
class TrainSteps:
    plans: tuple[StepPlan, ...]


@dataclass(frozen=True)
class Evaluate:
    step: int
    epoch: int


@dataclass(frozen=True)
class Checkpoint:
    step: int
    state: Mapping[str, Any]
    """The course as it is at this step."""


@dataclass(frozen=True)
class Wait:
    """Nothing more before every step so far is committed."""

    step: int


@dataclass(frozen=True)
class Stop:
    reason: str


Order = TrainSteps | Evaluate | Checkpoint | Wait | Stop


@dataclass
class Best:
    """The best evaluation so far."""

    metrics: dict[str, float] | None = None
    step: int = 0
    waited: int = 0
    """Evaluations since."""


class TrainingPlan:
    def __init__(self, plan_config: PlanConfig, state: Mapping[str, Any] | None = None) -> None:
        state = state or {}
        self.plan_config = plan_config
        self.epoch: int = state.get("epoch", 0)
        self.step: int = state.get("step", 0)
        self.best = Best(**state.get("best", {}))
        before = saved_monitor(state, plan_config.monitor.name)
        if before is not None and before != plan_config.monitor:
            self.best = Best()  # what was best is now the worst
        if self.best.metrics is not None:
            self.best.metrics = _numbers(self.best.metrics)
        self._better_before: list[Best] = []
        """Those that were the best before, oldest first."""
        self.last_metrics = _numbers(state.get("last_metrics", {}))
        _check_samples(plan_config, state)
        self._leases = Leases(
            plan_config.num_samples, [(start, stop) for start, stop in state.get("committed", ())]
        )
        rates = state.get("rates", {})
        self._rates = LearningRate(
            plan_config.batch_size, plan_config.scaling, plan_config.plateau, rates
        )
        self._ticks = self._ticks_due + rates.get("ticks_ahead", 0)
        """Steps of the job's schedule that were given out, where it does not go by steps."""
        self._open: dict[int, StepPlan] = {}
        self._evaluated: bool = state.get("evaluated", False)
        self._awaiting = False
        self._saved = self.step if state else -1
        self._owed = False
        self._stop: str | None = None
        self._saves_last = plan_config.checkpoints
        if self.epoch >= plan_config.epochs:
            self._stop = "finished"

    def next(self, max_steps: int) -> Order | None:
        """The next order, at most `max_steps` of training in it; None while an evaluation is awaited."""
        if self._awaiting:
            return None
        if self._owed:
            return self._checkpoint()
        if self._stop is not None:
            return self._checkpoint() if self._due_at_the_end() else Stop(self._stop)
        if self._mean_due:
            if self._open:
                return Wait(self.step)
            self._rates.close_mean(step=self.step)
        if not self._leases.exhausted:
            if self._checkpoint_due:
                return self._checkpoint()
            if every := self.plan_config.checkpoint_every:
                max_steps = min(max_steps, every - self.step % every)
            return self._steps(max_steps)
        if self._open and self._rates.counts_losses:
            return Wait(self.step)
        if not self._evaluated and self._evaluation_due():
            self._awaiting = True
            return Evaluate(self.step, self.epoch)
        self._next_epoch()
        if self.plan_config.checkpoints:
            return self._checkpoint()
        return self.next(max_steps)

    def seat(self, world: int) -> None:
        """There are so many workers from now on."""
        self._rates.seat(world, step=self.step)

    def commit(self, step: int, *, loss: float = math.nan) -> StepPlan:
        """Record that an open step is in the weights."""
        assert step in self._open, f"step {step} is committed and not open"
        plan = self._open.pop(step)
        if plan.epoch == self.epoch:
            self._leases.commit(plan.ranges)
        self._rates.committed(loss, plan.samples)
        return plan

    def take_back(self) -> None:
        """What is open is void: it is ordered again, step for step and sample for sample (if the batch
        stays as it is).

        For steps that are committed in order. An awaited evaluation is ordered again, too.
        """
        self._awaiting = False
        if not self._open:
            return
        plans = list(self._open.values())
        first = plans[0]
        assert len(plans) == self.step - first.step + 1, "a later step is committed"
        if first.epoch == self.epoch:
            for plan in plans:
                self._leases.give_back(plan.ranges)
        else:
            # The course is ahead of the epoch's last steps; of the next epochs nothing is committed.
            used = Ranges([(0, self.plan_config.num_samples)])
            for piece in (piece for p in plans if p.epoch == first.epoch for piece in p.ranges):
                used.remove(piece)
            self.epoch = first.epoch
            self._leases = Leases(self.plan_config.num_samples, used.to_list())
            if self._stop == "finished":
                self._stop = None
        self._open.clear()
        self._ticks -= sum(plan.ticks for plan in plans)
        self.step = first.step - 1
        self._evaluated = False
        if self._saved > self.step:
            self._saved = -1

    def owe_checkpoint(self) -> None:
        """One that was ordered was lost: the next order is another."""
        self._owed = True

    def evaluated(self, metrics: Mapping[str, float]) -> bool:
        """The awaited evaluation's result; True if it is the best so far."""
        assert self._awaiting
        self._awaiting, self._evaluated = False, True
        self.last_metrics = dict(metrics)
        self._rates.evaluated(metrics, step=self.step)
        value = metrics[self.plan_config.monitor.name]
        if not self._better(value):
            self.best.waited += 1
            if (
                self.plan_config.patience is not None
                and self.best.waited >= self.plan_config.patience
            ):
                self._next_epoch()
                self._stop = self._stop or "early-stopped"
            return False
        if self.best.metrics is not None:
            self._better_before.append(self.best)
        self.best = Best(metrics=dict(metrics), step=self.step)
        return True

    def keep_best(self, saved: Collection[int]) -> None:
        """The best is the best of these steps: no other has a checkpoint, or will have one."""
        while self.best.metrics is not None and self.best.step not in saved:
            waited = self.best.waited + 1
            before = self._better_before.pop() if self._better_before else Best()
            self.best = dataclasses.replace(before, waited=before.waited + waited)

    def stop(self, reason: str, *, save: bool = True) -> None:
        """End at the next step boundary, with a checkpoint unless there is nothing worth saving."""
        self._stop = self._stop or reason
        self._awaiting = False
        self._saves_last &= save

    @property
    def awaiting(self) -> bool:
        """An evaluation was ordered, and the course waits for its result."""
        return self._awaiting

    @property
    def batch_size(self) -> int:
        """Of the next step, unless it is the last of an epoch."""
        return self._rates.batch_size

    @property
    def num_steps(self) -> int:
        """Steps of the whole training, if the batch stays as it is."""
        epochs, batch = self.plan_config.epochs - self.epoch, self.batch_size
        if epochs <= 0:
            return self.step
        left = math.ceil(len(self._leases.free) / batch)
        return self.step + left + (epochs - 1) * math.ceil(self.plan_config.num_samples / batch)

    def take_changes(self) -> list[RateChange]:
        """Of the learning rate and the batch; each told once."""
        return self._rates.take_news()

    @property
    def samples_used(self) -> int:
        """Committed samples of all epochs."""
        before = sum(plan.samples for plan in self._open.values() if plan.epoch < self.epoch)
        return self.epoch * self.plan_config.num_samples - before + len(self._leases.committed)

    @property
    def committed_step(self) -> int:
        """The highest step up to which all are committed."""
        return next(iter(self._open)) - 1 if self._open else self.step

    @property
    def open_steps(self) -> Sequence[StepPlan]:
        """Given out, not yet committed."""
        return tuple(self._open.values())

    def state(self) -> dict[str, Any]:
        """The course as it will be when all that was given out is committed."""
        done = Leases(self.plan_config.num_samples, self._leases.committed.to_list())
        for piece in self._leases.leased.to_list():
            done.committed.add(piece)
        rates = self._rates.state()
        if self.plan_config.by_samples:
            rates["ticks_ahead"] = self._ticks - self._ticks_due
        return {
            "epoch": self.epoch,
            "step": self.step,
            "num_samples": self.plan_config.num_samples,
            "committed": [list(piece) for piece in done.committed.to_list()],
            "evaluated": self._evaluated,
            "monitor": str(self.plan_config.monitor),
            "best": dataclasses.asdict(self.best),
            "last_metrics": self.last_metrics,
            **({"rates": rates} if rates else {}),
        }

    @property
    def _checkpoint_due(self) -> bool:
        every = self.plan_config.checkpoint_every
        return bool(every and self.step and self.step % every == 0 and self._saved != self.step)

    @property
    def _mean_due(self) -> bool:
        """A mean of losses is to be judged before anything else."""
        over = self._leases.exhausted
        return self._rates.mean_due(num_open=len(self._open), epoch_over=over)

    def _steps(self, max_steps: int) -> TrainSteps:
        plans: list[StepPlan] = []
        room = self._rates.room(num_open=len(self._open))
        most = max_steps if room is None else min(max_steps, room)
        while len(plans) < most and not self._leases.exhausted:
            self.step += 1
            ranges = tuple(self._leases.take(self.batch_size))
            factor = self._rates.factor(self.step)
            plans.append(StepPlan(self.step, self.epoch, ranges, factor, self._tick()))
        self._open.update((plan.step, plan) for plan in plans)
        return TrainSteps(tuple(plans))

    def _tick(self) -> int:
        """How often the schedule is stepped after the step that was just given out."""
        if not self.plan_config.by_samples:
            return 1
        ticks = max(0, self._ticks_due - self._ticks)
        self._ticks += ticks
        return ticks

    @property
    def _ticks_due(self) -> int:
        """Steps of the schedule for what was given out: whole batches of the job's own size."""
        plan_config, left = self.plan_config, len(self._leases.free)
        whole = (plan_config.num_samples - left) // plan_config.batch_size
        return self.epoch * plan_config.steps_per_epoch + (
            whole if left else plan_config.steps_per_epoch
        )

    def _evaluation_due(self) -> bool:
        if not self.plan_config.has_eval:
            return False
        number = self.epoch + 1
        return number % self.plan_config.eval_every == 0 or number == self.plan_config.epochs

    def _next_epoch(self) -> None:
        self.epoch += 1
        self._evaluated = False
        self._leases = Leases(self.plan_config.num_samples)
        if self.epoch >= self.plan_config.epochs:
            self._stop = self._stop or "finished"

    def _due_at_the_end(self) -> bool:
        return self._saves_last and self._saved != self.step

    def _checkpoint(self) -> Checkpoint | Wait:
        if self._open and self._rates.counts_losses:
            return Wait(self.step)  # else it would not know the losses of what is open
        self._saved, self._owed = self.step, False
        return Checkpoint(self.step, self.state())

    def _better(self, value: float) -> bool:
        if not math.isfinite(value):
            return False  # infinity too: a model that says so has diverged, and JSON has no name for it
        best = (self.best.metrics or {}).get(self.plan_config.monitor.name)
        if best is None or math.isnan(best):
            return True  # the first one, or the first by this monitor
        if math.isclose(value, best, rel_tol=1e-6):
            return False  # equal, but for the order of sums
        return self.plan_config.monitor.better(value, best)


def _numbers(metrics: Mapping[str, float | None]) -> dict[str, float]:
    """Metrics that have been through JSON, which says None for what is no number."""
    return {name: math.nan if value is None else value for name, value in metrics.items()}


def _check_samples(plan_config: PlanConfig, state: Mapping[str, Any]) -> None:
    """In the middle of an epoch, positions only mean something in the data that they were cut from."""
    before = state.get("num_samples", plan_config.num_samples)
    if state.get("committed") and before != plan_config.num_samples:
        raise CheckpointError(
            f"The checkpoint lies in the middle of an epoch of {before:,} samples, and data() has "
            f"{plan_config.num_samples:,} now. Go on with the data as it was, or start a new run."
        )
