"""The plan of a run: which order comes next. Pure: no clock, no process, no torch.

    for each epoch:
        TrainSteps*       until every sample of the epoch is dispatched
        Wait?             if losses decide what comes next: until what was dispatched is committed
        Evaluate?         every `eval_steps` steps, or every `eval_every` epochs; and at the end of the
                          training, which may be in the middle of an epoch. The plan waits for the result
        Checkpoint?       every `checkpoint_every` steps, if asked for; and if the evaluation was the best
        Checkpoint        after each epoch
    Stop                  at the end of the training or of the patience, at the limit or the target of this
                          start, or on request

Nothing is dispatched across an evaluation, a checkpoint or an end, so each is exact in steps. Steps may be
committed in any order. Samples are counted, not steps: the state of a plan is the epoch, what is committed of
it, and the step number, so training can continue with any number of workers. So the batch may also change in
the middle of an epoch (learning_rate.py). The job's schedule then follows samples: it is stepped as often as
it would have been with the reference number of workers, and a training of N `steps` has as many samples.

In a training in rounds, a round ends after each step whose number is a multiple of `round_steps`. It ends
early before a `Wait`, an evaluation, the end of an epoch and the end of this start, which are thus exact in
steps. A checkpoint on the way and a stop wait for the end of the round instead: when they come must not
change the weights. After a death a part of a step may be lost. The step is committed without it, and its
samples are free again, so that an epoch may have a few steps more; the schedule follows samples then, too.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from manyhands.coordinator.batch_scaling import FIXED, Scaling
from manyhands.coordinator.best_model import BestModel, numbers
from manyhands.coordinator.learning_rate import LearningRate, RateChange
from manyhands.coordinator.leases import Leases
from manyhands.coordinator.metric_monitor import LOSS, Monitor, saved_monitor
from manyhands.coordinator.plateau import Plateau
from manyhands.errors import CheckpointError
from manyhands.ranges import Range, Ranges, shares, split

LIMIT = "limit"
"""The reason of a stop at the limit of this start: the training is not over."""
TARGET = "target"
"""The reason of a stop at the target of this start: the training is not over."""


@dataclass(frozen=True)
class PlanConfig:
    """What a plan is made from."""

    num_samples: int
    batch_size: int
    epochs: int = 1
    steps: int | None = None
    """Steps of the training, instead of `epochs`."""
    eval_every: int = 1
    """Epochs between evaluations."""
    eval_steps: int = 0
    """Steps between evaluations, instead of `eval_every`; 0: none."""
    has_eval: bool = True
    checkpoint_every: int = 0
    """Steps between checkpoints besides those after each epoch; 0 for none."""
    max_step: int | None = None
    """The last step of this start, wherever the training ends."""
    monitor: Monitor = LOSS
    patience: int | None = None
    scaling: Scaling = FIXED
    """How the batch and the learning rate follow the number of workers."""
    plateau: Plateau | None = None
    round_steps: int | None = None
    """Steps of a round; None: each step is in the weights of all workers when it is done."""

    @property
    def by_samples(self) -> bool:
        """If true, the job's schedule follows samples: not every step is one batch of the job."""
        return self.scaling.on or (self.round_steps is not None and self.steps is None)

    @property
    def steps_per_epoch(self) -> int:
        """With batches of the job's own size."""
        return math.ceil(self.num_samples / self.batch_size)

    @property
    def num_steps(self) -> int:
        return self.steps_per_epoch * self.epochs if self.steps is None else self.steps

    @property
    def last_step(self) -> int | None:
        """The step at which training ends; None if it ends at a sample (see `end`)."""
        return None if self.scaling.on else self.steps

    @property
    def end(self) -> tuple[int, int]:
        """The sample before which training ends: its epoch, and how many of that epoch are before it."""
        if self.steps is None:
            return self.epochs, 0
        epoch, steps = divmod(self.steps, self.steps_per_epoch)
        return epoch, steps * self.batch_size


@dataclass(frozen=True)
class StepPlan:
    """One global step: which samples of which epoch."""

    step: int
    epoch: int
    ranges: tuple[Range, ...]
    lr_factor: float = 1.0
    """Factor of the learning rate."""
    ticks: int = 1
    """How often the job's schedule is stepped after this step."""

    @property
    def samples(self) -> int:
        return sum(stop - start for start, stop in self.ranges)

    def share_out(self, weights: Sequence[float], *, least: int = 0) -> list[list[Range]]:
        """The ranges of each worker, in rank order and in proportion to the weights; at least `least` samples
        for each that has a weight, if there are enough."""
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
    """The state of the plan at this step."""


@dataclass(frozen=True)
class Wait:
    """Nothing more until every step so far is committed."""

    step: int


@dataclass(frozen=True)
class Stop:
    reason: str


Order = TrainSteps | Evaluate | Checkpoint | Wait | Stop


class TrainingPlan:
    def __init__(self, config: PlanConfig, state: Mapping[str, Any] | None = None) -> None:
        state = state or {}
        self.config = config
        self.epoch: int = state.get("epoch", 0)
        self.step: int = state.get("step", 0)
        before = saved_monitor(state, config.monitor.name)
        turned = before is not None and before != config.monitor  # the best is the worst now
        self.best = BestModel(config.monitor, None if turned else state.get("best"))
        self.last_metrics = numbers(state.get("last_metrics", {}))
        _check_samples(config, state)
        self._leases = Leases(
            config.num_samples, [(start, stop) for start, stop in state.get("committed", ())]
        )
        rates = state.get("rates", {})
        self._rates = LearningRate(config.batch_size, config.scaling, config.plateau, rates)
        self._rates.ticks = self._ticks_due + rates.get("ticks_ahead", 0)
        self._open: dict[int, StepPlan] = {}
        self._evaluated_step = self.step if state.get("evaluated") else -1
        """The step of the last evaluation."""
        self._awaiting = False
        self._saved = self.step if state else -1
        self._round_closed = self.step
        """The step at which a round was last ended early."""
        self._checkpoint_lost = False
        self._stop: str | None = None
        """Why it ends, unless that is the end of the training."""
        self._saves_last = True

    def next(self, max_steps: int) -> Order | None:
        """The next order, at most `max_steps` of training in it; None while an evaluation is awaited."""
        if self._awaiting:
            return None
        order: Order | None = None
        if self._checkpoint_lost:
            order = self._checkpoint()
        elif self._stop is None or self.steps_to_save:
            order = self._continue(max_steps)
        if not isinstance(order, TrainSteps):
            self._round_closed = self.step  # all else comes between two rounds
        if order is not None:
            return order
        if self._saves_last and self._saved != self.step:
            return self._checkpoint()
        return Stop("finished" if self._finished else self._stop or LIMIT)

    def _continue(self, max_steps: int) -> Order | None:
        """The next order of the training; None at its end, and at the limit of this start."""
        epoch_over = self._leases.exhausted
        if self._rates.mean_due(num_open=len(self._open), epoch_over=epoch_over):
            if self._open:
                return Wait(self.step)
            self._rates.close_mean(step=self.step)
        evaluates = self._evaluation_due
        if (evaluates or epoch_over) and self._open and self._rates.counts_losses:
            return Wait(self.step)
        if evaluates:
            self._awaiting = True
            return Evaluate(self.step, self.epoch)
        if epoch_over:
            self._next_epoch()
            return self._checkpoint()
        if self._finished or self.limited:
            return None
        return self._checkpoint() if self._checkpoint_due else self._steps(max_steps)

    @property
    def steps_to_save(self) -> int:
        """Return how many more steps there are, at most, before a checkpoint on the way or a stop: those that
        are left of the round."""
        every = self.config.round_steps
        closed = self._round_closed == self.step or self._evaluation_due or self._leases.exhausted
        if every is None or closed or self._finished or self.limited:
            return 0
        return -self.step % every

    def end_round(self) -> None:
        """End the round after the last step that was dispatched."""
        self._round_closed = self.step

    def set_world(self, world: int) -> None:
        """Follow the number of workers."""
        self._rates.set_world(world, step=self.step)

    def commit(self, step: int, *, loss: float = math.nan, lost: Sequence[Range] = ()) -> None:
        """Commit an open step: it is in the weights, except for samples that are `lost` and come again. The
        caller then takes back what is open."""
        assert step in self._open, f"step {step} is committed and not open"
        plan = self._open[step]
        if lost:
            self._return_to(plan.epoch)
        del self._open[step]
        num_lost = sum(stop - start for start, stop in lost)
        if plan.epoch == self.epoch:
            self._leases.give_back(lost)
            kept = Ranges(plan.ranges)
            for piece in lost:
                kept.remove(piece)
            self._leases.commit(kept.to_list())
        self._rates.committed(loss, plan.samples - num_lost)

    def take_back(self) -> None:
        """Void the open steps: the plan orders them again, with the same samples unless the batch size
        changes. Only for steps that are committed in order. An awaited evaluation is ordered again, too.
        """
        self._awaiting = False
        if plans := list(self._open.values()):
            first = plans[0]
            assert len(plans) == self.step - first.step + 1, "a later step is committed"
            self._return_to(first.epoch)
            for plan in plans:
                if plan.epoch == self.epoch:
                    self._leases.give_back(plan.ranges)
            self._open.clear()
            self._rates.ticks -= sum(plan.ticks for plan in plans)
            self.step = first.step - 1
            if self._saved > self.step:
                self._saved = -1
        self._round_closed = self.step

    def _return_to(self, epoch: int) -> None:
        """Return to an epoch whose last steps were dispatched and are not all committed. Nothing of later
        epochs is committed."""
        if epoch >= self.epoch:
            return
        leased = [r for p in self._open.values() if p.epoch == epoch for r in p.ranges]
        committed = Ranges([(0, self.config.num_samples)])
        for piece in leased:
            committed.remove(piece)
        self.epoch, self._saved = epoch, -1
        self._leases = Leases(self.config.num_samples, committed.to_list())
        self._leases.take(self.config.num_samples)

    def repeat_checkpoint(self) -> None:
        """Make the next order a checkpoint: one that was ordered is lost."""
        self._checkpoint_lost = True

    def evaluated(self, metrics: Mapping[str, float], *, on_target: bool = False) -> bool:
        """Take in the awaited evaluation; True if it is the best so far. `on_target`: it reaches the target
        of this start."""
        assert self._awaiting
        self._awaiting, self._evaluated_step = False, self.step
        self._saved = -1  # a checkpoint of this step, if there is one, lacks the result
        self.last_metrics = dict(metrics)
        self._rates.evaluated(metrics, step=self.step)
        is_best = self.best.add(metrics, step=self.step)
        patience = self.config.patience
        if not is_best and patience is not None and self.best.evaluation.waited >= patience:
            self._stop = self._stop or "early-stopped"
        elif on_target:
            self._stop = self._stop or TARGET
        if self._stop is not None and self._leases.exhausted:
            self._next_epoch()
        return is_best

    def stop(self, reason: str, *, save: bool = True) -> None:
        """End at the next step boundary, with a checkpoint unless there is nothing worth saving."""
        self._stop = self._stop or reason
        self._awaiting = False
        self._saves_last &= save

    @property
    def stopping(self) -> bool:
        """If true, it was asked to stop, or is past the last step."""
        return self._stop is not None or self._finished or self.limited

    @property
    def limited(self) -> bool:
        """If true, the last step of this start is dispatched."""
        return self.config.max_step is not None and self.step >= self.config.max_step

    @property
    def awaiting(self) -> bool:
        """If true, an evaluation was ordered, and the plan waits for its result."""
        return self._awaiting

    @property
    def batch_size(self) -> int:
        """Samples of the next step, unless it is the last of an epoch."""
        return self._rates.batch_size

    @property
    def num_steps(self) -> int:
        """Steps of the whole run, if the batch stays the same."""
        if (last_step := self.config.last_step) is not None:
            return max(self.step, last_step)
        (epoch, samples), batch = self.config.end, self.batch_size
        if self.epoch >= epoch:
            return self.step + math.ceil(max(0, self._samples_left or 0) / batch)
        left = math.ceil(len(self._leases.free) / batch) + math.ceil(samples / batch)
        whole = epoch - self.epoch - 1
        return self.step + left + whole * math.ceil(self.config.num_samples / batch)

    def take_changes(self) -> list[RateChange]:
        """Changes of the learning rate and the batch since the last call."""
        return self._rates.take_changes()

    @property
    def samples_used(self) -> int:
        """Committed samples of all epochs."""
        before = sum(plan.samples for plan in self._open.values() if plan.epoch < self.epoch)
        return self.epoch * self.config.num_samples - before + len(self._leases.committed)

    @property
    def committed_step(self) -> int:
        """The highest step up to which all are committed."""
        return next(iter(self._open)) - 1 if self._open else self.step

    def state(self) -> dict[str, Any]:
        """The state of the plan once all that was dispatched is committed."""
        done = Leases(self.config.num_samples, self._leases.committed.to_list())
        for piece in self._leases.leased.to_list():
            done.committed.add(piece)
        rates = self._rates.state()
        if self.config.by_samples:
            rates["ticks_ahead"] = self._rates.ticks - self._ticks_due
        return {
            "epoch": self.epoch,
            "step": self.step,
            "num_samples": self.config.num_samples,
            "committed": [list(piece) for piece in done.committed.to_list()],
            "evaluated": self._evaluated_step == self.step,
            "monitor": str(self.config.monitor),
            "best": self.best.state(),
            "last_metrics": self.last_metrics,
            **({"rates": rates} if rates else {}),
        }

    @property
    def _checkpoint_due(self) -> bool:
        step, every = self.step, self.config.checkpoint_every
        if self._saved == step or self.steps_to_save:
            return False
        is_best = self.best.evaluation.metrics is not None and self.best.evaluation.step == step
        length = self.config.round_steps or 1
        before = (step - 1) // length * length
        return is_best or bool(every and step and step // every > before // every)

    @property
    def _finished(self) -> bool:
        """If true, all of the training is dispatched and evaluated."""
        if (last_step := self.config.last_step) is not None:
            return self.step >= last_step and not self._evaluation_due
        return self._position >= self.config.end and not self._evaluation_due

    @property
    def _position(self) -> tuple[int, int]:
        """The epoch, and how many of its samples are dispatched."""
        return self.epoch, self.config.num_samples - len(self._leases.free)

    @property
    def _samples_left(self) -> int | None:
        """Samples of this epoch until the end of the training; None if that is not in this epoch."""
        epoch, samples = self.config.end
        if self.config.last_step is not None or self.epoch < epoch:
            return None
        return samples - self._position[1] if self.epoch == epoch else 0

    def _steps(self, max_steps: int) -> TrainSteps:
        plans: list[StepPlan] = []
        while not plans or (len(plans) < max_steps and not self._interrupted):
            self.step += 1
            left = self._samples_left
            samples = self.batch_size if left is None else min(self.batch_size, left)
            ranges = tuple(self._leases.take(samples))
            factor = self._rates.factor(self.step)
            plan = StepPlan(self.step, self.epoch, ranges, factor, self._tick())
            plans.append(plan)
            self._open[plan.step] = plan
        return TrainSteps(tuple(plans))

    @property
    def _interrupted(self) -> bool:
        """If true, something other than a step comes next."""
        over = self._leases.exhausted or self._finished or self.limited or self._evaluation_due
        return (
            over
            or self._checkpoint_due
            or self._rates.mean_due(num_open=len(self._open), epoch_over=False)
            or (self._stop is not None and not self.steps_to_save)
        )

    def _tick(self) -> int:
        """How often the schedule is stepped after the step that was just dispatched."""
        if not self.config.by_samples:
            return 1
        ticks = max(0, self._ticks_due - self._rates.ticks)
        self._rates.ticks += ticks
        return ticks

    @property
    def _ticks_due(self) -> int:
        """Steps of the schedule for what was dispatched: whole batches of the job's own size."""
        config, left = self.config, len(self._leases.free)
        whole = (config.num_samples - left) // config.batch_size
        return self.epoch * config.steps_per_epoch + (whole if left else config.steps_per_epoch)

    @property
    def _evaluation_due(self) -> bool:
        config, step = self.config, self.step
        if not config.has_eval or not step or self._evaluated_step == step:
            return False
        if self._at_end:
            return True
        if config.eval_steps:
            return step % config.eval_steps == 0
        return self._leases.exhausted and (self.epoch + 1) % config.eval_every == 0

    @property
    def _at_end(self) -> bool:
        """If true, the last step of the training was just dispatched."""
        if (last_step := self.config.last_step) is not None:
            return self.step == last_step
        epoch, samples = self._position
        if self._leases.exhausted:
            return (epoch + 1, 0) == self.config.end
        return samples > 0 and (epoch, samples) == self.config.end

    def _next_epoch(self) -> None:
        self.epoch += 1
        self._leases = Leases(self.config.num_samples)

    def _checkpoint(self) -> Checkpoint | Wait:
        if self._open and self._rates.counts_losses:
            return Wait(self.step)  # the losses of what is open belong to its state
        self._saved, self._checkpoint_lost = self.step, False
        return Checkpoint(self.step, self.state())


def _check_samples(config: PlanConfig, state: Mapping[str, Any]) -> None:
    """Refuse other data in the middle of an epoch: positions are meaningful only in the same data."""
    before = state.get("num_samples", config.num_samples)
    if state.get("committed") and before != config.num_samples:
        raise CheckpointError(
            f"The checkpoint is from the middle of an epoch of {before:,} samples, and data() has "
            f"{config.num_samples:,} now. Restore the old data, or start a new run."
        )
