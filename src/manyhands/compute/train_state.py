"""The state that a learner trains: a model, its optimizer and schedule, and the loss function.

Built from a Job, or by `mh.join()` from the objects of a user's own loop. The results of a job's methods are
checked here, so that an error names the method that made the mistake.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from numbers import Real
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from manyhands.compute import schedule
from manyhands.compute.measures import Measures, declared_by
from manyhands.compute.param_groups import build_optimizer, check_optimizer
from manyhands.compute.schedule_hints import TrainingLength, schedule_hint
from manyhands.embeddings.local_tables import LocalTables
from manyhands.embeddings.modules import ANCHOR, add_anchor
from manyhands.errors import JobError
from manyhands.hosts.activity import LOADING, Activity
from manyhands.job import Job

Loss = Callable[[nn.Module, Any], Tensor]


@dataclass
class TrainState:
    model: nn.Module
    optimizer: Optimizer
    """Built for the model as the strategy has laid it out; before that, None."""
    loss: Loss
    """Returns the mean loss of a batch, from (model, batch)."""
    device: str = "cpu"
    seed: int = 0
    """The job's: the random numbers of a step, such as those of dropout, are derived from it."""
    scheduler: Any = None
    """A torch scheduler, or None."""
    clip_norm: float | None = None
    weight: Callable[[Any], float | Tensor | None] | None = None
    """Weight of a batch in the mean over workers; None: its number of samples."""
    schedule_of: schedule.MakeSchedule = lambda optimizer, num_steps: None
    """Makes the job's schedule for an optimizer and a number of steps."""
    plan: schedule.SchedulePlan = field(default_factory=schedule.SchedulePlan)
    """The steps that the schedule was made for."""
    settings: schedule.Settings = field(default_factory=list)
    """Settings of the optimizer's groups as the job made them, before there was a schedule."""
    notes: list[str] = field(default_factory=list)
    """Notes for the user."""
    tables: LocalTables = field(default_factory=lambda: LocalTables({}, seed=0))
    """The sparse tables of the model; without specs if it has none."""
    measures: Measures = field(default_factory=Measures)
    """Measures that the job declares, and what it logs in the current step."""
    lr_factor: float = 1.0
    """Factor on the learning rate of the next step; sent by the coordinator with each step."""
    ticks: int = 1
    """Number of times that the schedule is stepped after the next step; likewise."""
    activity: Activity = field(default_factory=Activity)
    """Current activity of the worker, to explain a hang."""

    @classmethod
    def of(
        cls, job: Job, *, device: str, num_steps: int, steps_per_epoch: int | None = None
    ) -> TrainState:
        """Build the model, its optimizer and its schedule, where no strategy lays the model out in
        between."""
        train_state = cls.of_model(job, device=device)
        train_state.build_optimizer(job, num_steps=num_steps, steps_per_epoch=steps_per_epoch)
        return train_state

    @classmethod
    def of_model(cls, job: Job, *, device: str) -> TrainState:
        """Build the model. The optimizer and the schedule follow in `build_optimizer`."""
        model, tables = _build_model(job, device)
        return cls(
            model=model,
            optimizer=cast(Optimizer, None),
            loss=lambda model, batch: job_loss(job, model, batch)[0],
            device=device,
            seed=job.seed,
            clip_norm=job.clip_norm,
            weight=job.weight if type(job).weight is not Job.weight else None,
            schedule_of=job.schedule,
            tables=tables,
            measures=Measures(declared_by(job)),
        )

    def renew_model(self, job: Job) -> None:
        """Build the model again, as it was at first."""
        with self.activity.during(LOADING):
            self.model, self.tables = _build_model(job, self.device)

    def build_optimizer(
        self, job: Job, *, num_steps: int, steps_per_epoch: int | None = None
    ) -> None:
        """Build the optimizer and the schedule for the model as it is now."""
        optimizer = build_optimizer(job, self.model)
        if not isinstance(optimizer, Optimizer):
            raise wrong(job, "optimizer", "a torch.optim.Optimizer", optimizer)
        check_optimizer(job, self.model, optimizer)
        self.optimizer, self.settings = optimizer, schedule.settings_of(optimizer)
        self.scheduler = _schedule(job, optimizer, num_steps)
        if isinstance(self.scheduler, ReduceLROnPlateau):
            raise JobError(
                f"{type(job).__name__}.schedule() returned ReduceLROnPlateau, which each worker would step "
                "by its own metrics. Set the field  plateau  instead, which covers all workers:  "
                'plateau: str = "factor=0.1; patience=10".'
            )
        if not isinstance(self.scheduler, LRScheduler | None):
            raise wrong(job, "schedule", "a torch LRScheduler, or None", self.scheduler)
        total = getattr(self.scheduler, "total_steps", None)
        if isinstance(total, int) and total < num_steps:
            raise JobError(
                f"{type(job).__name__}.schedule() returned {type(self.scheduler).__name__} for {total} "
                f"steps, and the training has {num_steps}: it would fail at the end. Give it  "
                "total_steps=num_steps."
            )
        twin = schedule.twin_of(optimizer, self.settings)
        length = TrainingLength.of(
            job, num_steps=num_steps, steps_per_epoch=steps_per_epoch or num_steps
        )
        hint = schedule_hint(job.schedule(twin, num_steps), twin, length)
        self.notes = [hint] if hint else []
        self.plan = schedule.SchedulePlan(
            num_steps,
            num_steps,
            made_of=schedule.describe(optimizer, self.settings, self.scheduler),
        )

    @property
    def lr(self) -> float:
        """Learning rate of the next step."""
        return float(self.optimizer.param_groups[0]["lr"]) * self.lr_factor

    @property
    def base_lr(self) -> float:
        """Learning rate at the start of the schedule."""
        group = self.optimizer.param_groups[0]
        return float(group.get("initial_lr", group["lr"]))

    @property
    def schedule_state(self) -> dict[str, Any]:
        """State of the schedule for a checkpoint, besides its position."""
        return asdict(self.plan)

    def make_scheduler(self, optimizer: Optimizer) -> Any:
        """Make the schedule, at its start, for an optimizer with the same groups."""
        scheduler = self.schedule_of(optimizer, self.plan.steps)
        if scheduler is not None and self.plan.holds:
            return schedule.HeldSchedule(scheduler, self.plan.steps)
        return scheduler

    def resume(self, state: Mapping[str, Any], *, step: int, num_steps: int, mode: str) -> None:
        """Continue after a checkpoint was loaded: take the optimizer's settings from the job as it is now,
        and continue the schedule as `mode` says (schedule.py)."""
        saved = schedule.saved_plan(state.get("schedule", {}), state["scheduler"], num_steps)
        at = step - saved.began
        if state["scheduler"]:
            at = schedule.position(self.scheduler) + state["scheduler"].get(schedule.OVERTIME, 0)
        loaded, rate = schedule.settings_of(self.optimizer), self.lr
        how = schedule.Resuming(
            self.optimizer, self.settings, self.schedule_of, num_steps=num_steps
        )
        self.plan = how.decide(saved, at, mode)
        same = (
            self.plan.made_of == saved.made_of
            if saved.made_of
            else schedule.same_rates(self.settings, loaded)
        )
        schedule.put_settings(self.optimizer, self.settings)
        self.scheduler = self.make_scheduler(self.optimizer)
        if same and mode not in (schedule.STRETCH, schedule.RESTART):
            if self.scheduler is not None and state["scheduler"]:
                self.scheduler.load_state_dict(state["scheduler"])
            schedule.put_settings(self.optimizer, loaded)
        elif self.scheduler is not None:
            self.optimizer._opt_called = True  # type: ignore[attr-defined]  # it was, before the checkpoint
            for _ in range(at if mode != schedule.RESTART else 0):
                self.scheduler.step()
        if self.lr != rate:
            self.notes.append(
                f"the learning rate is {self.lr:.4g} from step {step + 1} on; it was saved at {rate:.4g}"
            )

    def schedule_for(self, other: Optimizer) -> Any:
        """Make the schedule, at its current position, for an optimizer with the same groups."""
        scheduler = self.make_scheduler(other)
        if scheduler is not None and self.scheduler is not None:
            scheduler.load_state_dict(self.scheduler.state_dict())
        for theirs, ours in zip(other.param_groups, self.optimizer.param_groups, strict=True):
            own = ("params", "param_names", "fused", "foreach")
            theirs.update({k: v for k, v in ours.items() if k not in own})
        return scheduler

    def update(self) -> None:
        """Apply complete gradients: clip, step the optimizer and the schedule, clear the gradients."""
        if self.clip_norm is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.clip_norm)
        with multiplied_lr(self.optimizer, self.lr_factor):
            self.optimizer.step()
        self.skip_update()

    def skip_update(self) -> None:
        """Step the schedule and clear the gradients, without a step of the optimizer."""
        for _ in range(self.ticks):
            if self.scheduler is not None:
                self.optimizer._opt_called = True  # type: ignore[attr-defined]  # or torch would warn
                self.scheduler.step()
        self.optimizer.zero_grad(set_to_none=True)


def _build_model(job: Job, device: str) -> tuple[nn.Module, LocalTables]:
    """Build the job's model and its tables. It is the same on every worker and device: built on the CPU from
    the seed."""
    torch.manual_seed(job.seed)
    model = job.model()
    if not isinstance(model, nn.Module):
        raise wrong(job, "model", "a torch.nn.Module", model)
    tables = LocalTables.of(model, seed=job.seed)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        if not tables.specs:
            raise JobError(f"The model of {type(job).__name__} has no parameter to train.")
        add_anchor(model)
    return model.to(device), tables


@contextmanager
def multiplied_lr(optimizer: Optimizer, factor: float) -> Iterator[None]:
    """Multiply the learning rate for one step. Restored afterwards: a schedule may compute the next one
    from it."""
    rates = [group["lr"] for group in optimizer.param_groups]
    if factor != 1.0:
        for group in optimizer.param_groups:
            group["lr"] = group["lr"] * factor
    try:
        yield
    finally:
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate


def _schedule(job: Job, optimizer: Optimizer, num_steps: int) -> Any:
    try:
        return job.schedule(optimizer, num_steps)
    except TypeError as error:
        if job.epochs is not None or "None" not in str(error):
            raise
        raise JobError(
            f"{type(job).__name__}.schedule() failed: {error}. The job trains for steps={job.steps}, so "
            "self.epochs is None. Count in  num_steps, the steps of the whole training."
        ) from error


def begin_with(checkpoint: str, train_state: TrainState, job: Job) -> None:
    """Start from the weights of a checkpoint, with a new optimizer and schedule."""
    from manyhands.embeddings import from_run

    name = type(job).__name__
    from_run.begin_with(checkpoint, train_state.model, train_state.tables, model_of=name)


def job_loss(job: Job, model: nn.Module, batch: Any) -> tuple[Tensor, Any]:
    """Return the job's loss of a batch, and the model's output."""
    output = call(model, job.inputs(batch))
    loss = job.loss(output, batch)
    anchor = getattr(getattr(model, "module", model), ANCHOR, None)
    if isinstance(loss, Tensor) and isinstance(anchor, Tensor):
        loss = loss + 0.0 * anchor.sum()
    if not isinstance(loss, Tensor) or loss.dim() != 0:
        raise wrong(job, "loss", "a scalar tensor, the mean over the batch", loss)
    if torch.is_grad_enabled() and not loss.requires_grad:
        raise JobError(
            f"{type(job).__name__}.loss() must be computed from the model's output; its result does not "
            "depend on any parameter (was it detached, or computed with argmax, .item() or NumPy?)."
        )
    return loss, output


def checked_weight(weight: Any) -> float | Tensor:
    """Check the result of a job's weight()."""
    if isinstance(weight, Real) or (isinstance(weight, Tensor) and weight.dim() == 0):
        return weight if isinstance(weight, Tensor) else float(weight)
    a = "None" if weight is None else _describe(weight)
    raise JobError(f"weight() must return a number for each batch; it returned {a}.")


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Switch the model to evaluation mode, then restore each module: some may stay frozen."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


def call(model: nn.Module, inputs: Any) -> Any:
    if isinstance(inputs, tuple | list):
        return model(*inputs)
    if isinstance(inputs, Mapping):
        return model(**inputs)
    return model(inputs)


def to_device(batch: Any, device: str) -> Any:
    """Move every tensor of a nested batch to the device."""
    if isinstance(batch, Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, Mapping):
        return {key: to_device(value, device) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(to_device(value, device) for value in batch))
    if isinstance(batch, tuple | list):
        return type(batch)(to_device(value, device) for value in batch)
    return batch


def wrong(job: Job, method: str, wanted: str, got: Any) -> JobError:
    a = _describe(got) if got is not None else "None (is a return missing?)"
    return JobError(f"{type(job).__name__}.{method}() must return {wanted}; it returned {a}.")


def _describe(value: Any) -> str:
    shape = f" of shape {tuple(value.shape)}" if isinstance(value, Tensor) else ""
    return f"{type(value).__name__}{shape}"
