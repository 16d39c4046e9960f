"""Shards of parameters, gradients and optimizer state: a strategy that lays the model out before the
optimizer exists.

Each worker trains one flat parameter, its shard of all parameters. The forward gathers the others' shards;
the backward sums gradients and leaves each worker those of its shard. Checkpoints hold one shard only.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from manyhands.contract import Context, Joined, Learner, StepReport, Strategy, Traits

if TYPE_CHECKING:
    from torch import Tensor, nn

    from manyhands.collectives.group import Group
    from manyhands.compute.feed import Share
    from manyhands.hosts.view import View


@dataclass(frozen=True)
class ShardedByHand(Strategy):
    name: ClassVar[str] = "sharded-by-hand"

    @property
    def traits(self) -> Traits:
        return Traits(wraps=True, can_shrink=False)

    def build(self, context: Context) -> Learner:
        return ShardedLearner(context)


class ShardedLearner(Learner):
    def __init__(self, context: Context) -> None:
        super().__init__(context)
        assert self.train_state.optimizer is None, "it would train the whole model"
        self._clip_norm, self.train_state.clip_norm = self.train_state.clip_norm, None
        self._group: Group | None = None

    def wrap(self, model: nn.Module) -> nn.Module:
        from manyhands.collectives.join import join_group

        self.close()
        self._group = join_group(self.me, self.me.view)
        return sharded(model, self._group)

    def on_view(self, view: View) -> Joined:
        (shard,) = self.train_state.model.parameters()
        assert self.train_state.optimizer.param_groups[0]["params"] == [shard]
        return Joined(self._group.describe(), placement=f"{shard.numel()} numbers each")

    def step(self, share: Share) -> StepReport:
        from manyhands.compute.gradients import gradients

        started, lr = time.perf_counter(), self.train_state.lr
        weight, loss = gradients(self.train_state, share)
        (shard,) = self.train_state.model.parameters()
        if self._clip_norm is not None:
            squares = shard.grad.square().sum()
            self._group.all_reduce(squares)
            shard.grad *= (self._clip_norm / (squares.sqrt() + 1e-6)).clamp(max=1.0)
        self.train_state.update()
        seconds = time.perf_counter() - started
        return StepReport(
            share.step, share.samples, weight, loss, lr, compute_s=seconds, wait_s=0.0
        )

    def close(self) -> None:
        if self._group is not None:
            self._group.close()
            self._group = None


def sharded(model: nn.Module, group: Group) -> nn.Module:
    """Return a module with the same output whose only parameter is this worker's shard."""
    import torch
    from torch import nn
    from torch.func import functional_call

    class AllGather(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, shard: Tensor) -> Tensor:
            flat = shard.new_empty(group.size * len(shard))
            group.all_gather(shard.detach(), into=flat)
            return flat

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            own = gradient.new_empty(len(gradient) // group.size)
            group.reduce_scatter(gradient.contiguous(), into=own)
            return own

    class Sharded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self._whole = [model]  # in a list: its parameters are not those of this module
            self._shapes = {name: p.shape for name, p in model.named_parameters()}
            flat = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
            flat = nn.functional.pad(flat, (0, -len(flat) % group.size))
            self.shard = nn.Parameter(flat.chunk(group.size)[group.rank].clone())

        def forward(self, *inputs: Any) -> Any:
            flat = AllGather.apply(self.shard)
            sizes = [shape.numel() for shape in self._shapes.values()]
            parts = flat.split([*sizes, len(flat) - sum(sizes)])
            named = zip(self._shapes.items(), parts, strict=False)
            whole = {name: part.view(shape) for (name, shape), part in named}
            return functional_call(self._whole[0], whole, inputs)

    return Sharded()
