"""A strategy that never updates the weights, and does everything else right."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from manyhands.contract import Context, Learner, StepReport, Traits
from manyhands.strategies.allreduce import AllReduce, AllReduceLearner

if TYPE_CHECKING:
    from manyhands.compute.feed import Share


@dataclass(frozen=True)
class Unmoved(AllReduce):
    name: ClassVar[str] = "unmoved"

    @property
    def traits(self) -> Traits:
        return replace(super().traits, equals_single=False)

    def build(self, context: Context) -> Learner:
        return UnmovedLearner(self, context)


class UnmovedLearner(AllReduceLearner):
    def step(self, share: Share) -> StepReport:
        import torch

        before = [parameter.detach().clone() for parameter in self.train_state.model.parameters()]
        report = super().step(share)
        with torch.no_grad():
            for parameter, value in zip(self.train_state.model.parameters(), before, strict=True):
                parameter.copy_(value)
        return report
