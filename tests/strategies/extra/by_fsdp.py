"""Shards of parameters, gradients and optimizer state by torch's fully_shard (FSDP2), one for each worker."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from manyhands.contract import Context, Joined, Learner, StepReport, Strategy, Traits

if TYPE_CHECKING:
    from torch import Tensor, nn

    from manyhands.collectives.group import Group
    from manyhands.compute.feed import Share
    from manyhands.hosts.view import View


@dataclass(frozen=True)
class ByFsdp(Strategy):
    name: ClassVar[str] = "by-fsdp"

    @property
    def traits(self) -> Traits:
        return Traits(wraps=True, uniform=True, can_shrink=False)

    def build(self, context: Context) -> Learner:
        return FsdpLearner(context)


class FsdpLearner(Learner):
    _group: Group | None = None

    def wrap(self, model: nn.Module) -> nn.Module:
        from torch.distributed.fsdp import FSDPModule, fully_shard

        from manyhands.collectives.join import join_group

        self.close()
        self._group = join_group(self.me, self.me.view)
        mesh = self._group.device_mesh([self._group.size], ["shard"], device=self.me.device)
        for layer in model.children():
            if any(True for _ in layer.parameters()):
                fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                # Losses are divided by the whole batch already. And gloo can't divide.
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)
        return model

    def on_view(self, view: View) -> Joined:
        return Joined(self._group.describe())

    def step(self, share: Share) -> StepReport:
        from manyhands.compute.gradients import gradients

        started, lr, sent = time.perf_counter(), self.train_state.lr, self._group.bytes_sent
        weight, loss = gradients(self.train_state, share, total=self._sum)
        self.train_state.update()
        report = StepReport(share.step, share.samples, weight, loss, lr)
        report.compute_s = time.perf_counter() - started
        report.bytes_sent = self._group.bytes_sent - sent
        return report

    def _sum(self, value: float | Tensor) -> Tensor:
        import torch

        total = torch.as_tensor(value, dtype=torch.float64).clone()
        self._group.all_reduce(total)
        return total

    def close(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            group.close()
