"""A single worker: the reference that every other strategy is tested against. Sends nothing."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from manyhands.contract import Context, Joined, Learner, StepReport, Strategy, Traits
from manyhands.costs import CostFacts, MemoryUse, Transfer, replicated_model
from manyhands.pairs import WORKERS, Unsupported

if TYPE_CHECKING:
    from collections.abc import Sequence

    from manyhands.compute.feed import Share
    from manyhands.hosts.view import View


@dataclass(frozen=True)
class Single(Strategy):
    name: ClassVar[str] = "single"

    @property
    def traits(self) -> Traits:
        return Traits(default_workers=1)

    @property
    def unsupported(self) -> tuple[Unsupported, ...]:
        alone = Unsupported(WORKERS, "it trains with one worker", instead="allreduce")
        return (alone, *super().unsupported)

    def traffic(self, facts: CostFacts, view: View) -> Sequence[Transfer]:
        return ()

    def memory(self, facts: CostFacts) -> Sequence[MemoryUse]:
        return replicated_model(facts)

    def build(self, context: Context) -> Learner:
        return SingleLearner(context)


class SingleLearner(Learner):
    def on_view(self, view: View) -> Joined:
        assert view.world == 1, f"single with {view.world} workers"
        return Joined()

    def step(self, share: Share) -> StepReport:
        from manyhands.compute.gradients import gradients

        started = time.perf_counter()
        lr = self.train_state.lr
        weight, loss = gradients(self.train_state, share)
        self.train_state.tables.step(lr, self.train_state.base_lr, share.step)
        self.train_state.update()
        on_cpu = self.train_state.device == "cpu"
        compute_s = time.perf_counter() - started if on_cpu else None
        return StepReport(
            share.step, share.samples, weight, loss, lr, compute_s=compute_s, wait_s=0.0
        )
