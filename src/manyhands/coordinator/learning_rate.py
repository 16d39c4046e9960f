"""The factor of the learning rate and the batch size of each step. Pure.

One factor for all workers, decided by the coordinator and sent with the order of each step: that of
the number of workers (batch_scaling.py) times that of the plateau rule (plateau.py). Without either it
is 1 and is not sent.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from manyhands.coordinator.batch_scaling import Ramp, Scaling
from manyhands.coordinator.plateau import Plateau, PlateauWatch


@dataclass(frozen=True)
class RateChange:
    """Change of the factor on the learning rate, from a step on."""

    step: int
    """The first step with it."""
    factor: float
    """The factor after the warm-up."""
    over: int
    """Steps of warm-up; 0: none."""
    reason: str


class LearningRate:
    def __init__(
        self,
        batch_size: int,
        scaling: Scaling,
        plateau: Plateau | None,
        state: Mapping[str, Any] | None = None,
    ) -> None:
        state = state or {}
        self.scaling = scaling
        self.batch_size = scaling.batch(batch_size, scaling.reference)
        """Samples of the next step."""
        self.watch = PlateauWatch(plateau, state.get("plateau"))
        self.ticks = 0
        """Steps of the job's schedule that were dispatched, if it follows samples. The plan counts them."""
        self._job_batch = batch_size
        self._ramp = Ramp(**state["ramp"]) if scaling.on and "ramp" in state else Ramp()
        self._started = False
        self._changes: list[RateChange] = []

    @property
    def counts_losses(self) -> bool:
        return self.watch.rule is not None and self.watch.rule.counts_losses

    def factor(self, step: int) -> float:
        return self._ramp.at(step) * self.watch.factor

    def set_world(self, world: int, *, step: int) -> None:
        """Follow the number of workers after this step."""
        first, self._started = not self._started, True
        self.batch_size = self.scaling.batch(self._job_batch, world)
        end = self.scaling.factor(world)
        turned = end != self._ramp.end
        if turned:
            self._ramp = self._ramp.turn(end, step=step, over=self.scaling.warmup)
        if turned or (first and (self._ramp.end != 1.0 or self.watch.factor != 1.0)):
            workers = f"{world} {'worker' if world == 1 else 'workers'}"
            self._changed(step, workers if self.scaling.on else "lowered earlier in this run")

    def committed(self, loss: float, samples: int) -> None:
        if self.counts_losses:
            self.watch.add(loss, samples)

    def evaluated(self, metrics: Mapping[str, float], *, step: int) -> None:
        rule = self.watch.rule
        if rule is not None and not rule.counts_losses and rule.metric.name in metrics:
            self._lowered(self.watch.judge(metrics[rule.metric.name]), step)

    def mean_due(self, *, num_open: int, epoch_over: bool) -> bool:
        """Return whether the mean of losses is complete, or will be when the open steps are committed."""
        if not self.counts_losses:
            return False
        assert self.watch.rule is not None
        num_steps = self.watch.num_steps + num_open
        every = self.watch.rule.every
        return num_steps >= every if every else epoch_over and num_steps > 0

    def close_mean(self, *, step: int) -> None:
        self._lowered(self.watch.close(), step)

    def take_changes(self) -> list[RateChange]:
        """Return the changes since the last call."""
        changes, self._changes = self._changes, []
        return changes

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint; empty while there is none."""
        state: dict[str, Any] = {}
        if self.scaling.on:
            state["ramp"] = dataclasses.asdict(self._ramp)
        if self.watch.rule is not None or self.watch.factor != 1.0:
            state["plateau"] = self.watch.state()
        return state

    def _lowered(self, why: str, step: int) -> None:
        if why:
            self._changed(step, why)

    def _changed(self, step: int, reason: str) -> None:
        factor, over = self._ramp.end * self.watch.factor, self._ramp.left(step)
        self._changes.append(RateChange(step + 1, factor, over, reason))
