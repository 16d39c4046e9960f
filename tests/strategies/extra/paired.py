"""All-reduce with two workers in each replica, which compute the same samples twice.

It trains nothing faster. It shows what workers that hold one copy of the model together rely on: the same
samples, the same random numbers, and whole replicas in every view.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from manyhands.contract import Context, Joined, Learner, StepReport
from manyhands.strategies.allreduce import AllReduce, AllReduceLearner

if TYPE_CHECKING:
    from manyhands.collectives.group import Group
    from manyhands.compute.feed import Share
    from manyhands.hosts.view import View


@dataclass(frozen=True)
class Paired(AllReduce):
    name: ClassVar[str] = "paired"

    def replica_size(self, workers: int) -> int:
        return 2

    def build(self, context: Context) -> Learner:
        return PairedLearner(self, context)


class PairedLearner(AllReduceLearner):
    _pair: Group

    def on_view(self, view: View) -> Joined:
        joined = super().on_view(view)
        first = 2 * self.me.replica
        with self._view_change_on_lost_peer():
            self._pair = self._group.split([first, first + 1])
        return joined

    def step(self, share: Share) -> StepReport:
        report = super().step(replace(share, total=2 * share.total))  # it is added up twice
        self._compare(report)
        return report

    def _compare(self, report: StepReport) -> None:
        """Check that both workers of the replica have computed the same."""
        import torch

        mine = torch.tensor([float(report.loss), float(report.weight)], dtype=torch.float64)
        largest = mine.clone()
        with self._view_change_on_lost_peer():
            self._pair.all_reduce(largest, op="max")
            self._pair.all_reduce(mine, op="min")
        assert torch.equal(mine, largest), f"step {report.step}: {mine} and {largest}"
