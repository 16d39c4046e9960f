"""Two strategies that keep something besides weights: all-reduce with a counter in each worker, and
all-reduce that evaluates the mean of the weights of all steps.

A counter is state that a worker holds alone: it grows by the samples of this worker's shares. The mean is the
same on all workers. The worker named by DIES_IN_HANDOVER kills itself when it begins to send or receive the
counter of a worker that leaves.
"""

from __future__ import annotations

import os
import signal
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from manyhands.contract import Context, Joined, Learner, State, StepReport, Traits
from manyhands.strategies.allreduce import AllReduce, AllReduceLearner

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import nn

    from manyhands.collectives.group import Group
    from manyhands.compute.feed import Share
    from manyhands.hosts.view import View


@dataclass(frozen=True)
class Counted(AllReduce):
    name: ClassVar[str] = "counted"

    @property
    def traits(self) -> Traits:
        return Traits(elastic=True, holds_state=True)

    def build(self, context: Context) -> Learner:
        return CountedLearner(self, context)


class CountedLearner(AllReduceLearner):
    count = 0

    def on_view(self, view: View) -> Joined:
        joined = super().on_view(view)
        if self.me.name == os.environ.get("DIES_IN_HANDOVER"):
            assert joined.group is not None
            joined.group.split = die  # type: ignore[method-assign]
        return joined

    def step(self, share: Share) -> StepReport:
        report = super().step(share)
        self.count += share.samples
        return report

    def snapshot(self) -> State:
        return {"count": self.count}

    def restore(self, states: Sequence[State]) -> None:
        self.count += sum(state["count"] for state in states)


def die(ranks: Sequence[int]) -> Group:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("it lives")


@dataclass(frozen=True)
class Averaged(AllReduce):
    name: ClassVar[str] = "averaged"

    def build(self, context: Context) -> Learner:
        return AveragedLearner(self, context)


class AveragedLearner(AllReduceLearner):
    def __init__(self, config: Averaged, context: Context) -> None:
        super().__init__(config, context)
        self._sums = [p.detach().double() * 0 for p in self.train_state.model.parameters()]
        self._num_steps = 0

    def step(self, share: Share) -> StepReport:
        report = super().step(share)
        for total, parameter in zip(self._sums, self.train_state.model.parameters(), strict=True):
            total += parameter.detach()
        self._num_steps += 1
        return report

    @contextmanager
    def eval_model(self) -> Iterator[nn.Module]:
        import torch

        with super().eval_model() as model, torch.no_grad():
            trained = [parameter.clone() for parameter in model.parameters()]
            for parameter, total in zip(model.parameters(), self._sums, strict=True):
                parameter.copy_(total / self._num_steps)
            try:
                yield model
            finally:
                for parameter, own in zip(model.parameters(), trained, strict=True):
                    parameter.copy_(own)

    def snapshot(self) -> State:
        return {"sums": self._sums, "num_steps": self._num_steps}

    def restore(self, states: Sequence[State]) -> None:
        (state,) = states
        self._num_steps = state["num_steps"]
        for total, saved in zip(self._sums, state["sums"], strict=True):
            total.copy_(saved)
