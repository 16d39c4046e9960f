"""What the learning rate of each step is multiplied by, and how large its batch is. Pure.

One factor for all workers, decided by the coordinator and sent with the order of each step: that of
the number of workers (batch_scaling.py) times what the plateau rule has made of it (plateau.py). Without
either it is 1, and nothing is sent.
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
    """From a step on the learning rate is multiplied by another factor."""

    step: int
    """The first one that it holds for."""
    factor: float
    """In the end."""
    over: int
    """Steps until then; 0: at once."""
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
        """Of the next step."""
        self.watch = PlateauWatch(plateau, state.get("plateau"))
        self._job_batch = batch_size
        self._ramp = Ramp(**state["ramp"]) if scaling.on and "ramp" in state else Ramp()
        self._seated = False
        self._news: list[RateChange] = []

    @property
    def counts_losses(self) -> bool:
        return self.watch.rule is not None and self.watch.rule.counts_losses

    def factor(self, step: int) -> float:
        return self._ramp.at(step) * self.watch.factor

    def seat(self, world: int, *, step: int) -> None:
        """After this step there are so many workers."""
        first, self._seated = not self._seated, True
        self.batch_size = self.scaling.batch(self._job_batch, world)
        end = self.scaling.factor(world)
        turned = end != self._ramp.end
        if turned:
            self._ramp = self._ramp.turn(end, step=step, over=self.scaling.warmup)
        if turned or (first and (self._ramp.end != 1.0 or self.watch.factor != 1.0)):
            workers = f"{world} {'worker' if world == 1 else 'workers'}"
            self._tell(step, workers if self.scaling.on else "as it was lowered before")

    def committed(self, loss: float, samples: int) -> None:
        if self.counts_losses:
            self.watch.add(loss, samples)

    def evaluated(self, metrics: Mapping[str, float], *, step: int) -> None:
        rule = self.watch.rule
        if rule is not None and not rule.counts_losses and rule.metric.name in metrics:
            self._lowered(self.watch.judge(metrics[rule.metric.name]), step)

    def mean_due(self, *, num_open: int, epoch_over: bool) -> bool:
        """The mean of losses is complete, or will be when the open steps are committed."""
        if not self.counts_losses:
            return False
        assert self.watch.rule is not None
        num_steps = self.watch.num_steps + num_open
        every = self.watch.rule.every
        return num_steps >= every if every else epoch_over and num_steps > 0

    def room(self, *, num_open: int) -> int | None:
        """So many more steps fit into the mean; None: any number."""
        if not self.counts_losses or self.watch.rule is None or not self.watch.rule.every:
            return None
        return self.watch.rule.every - self.watch.num_steps - num_open

    def close_mean(self, *, step: int) -> None:
        self._lowered(self.watch.close(), step)

    def take_news(self) -> list[RateChange]:
        """What has changed, each told once."""
        news, self._news = self._news, []
        return news

    def state(self) -> dict[str, Any]:
        """Nothing, while there is nothing to remember."""
        state: dict[str, Any] = {}
        if self.scaling.on:
            state["ramp"] = dataclasses.asdict(self._ramp)
        if self.watch.rule is not None or self.watch.factor != 1.0:
            state["plateau"] = self.watch.state()
        return state

    def _lowered(self, why: str, step: int) -> None:
        if why:
            self._tell(step, why)

    def _tell(self, step: int, reason: str) -> None:
        factor, over = self._ramp.end * self.watch.factor, self._ramp.left(step)
        self._news.append(RateChange(step + 1, factor, over, reason))
