"""Forward, loss and backward of one worker's part of a step, in micro-batches; the same for every strategy.

Each micro-batch counts by its weight (its samples, or the job's own weight, such as tokens) relative to the
weight of the whole step over all workers. So the gradient is that of the mean over the global batch, however
unequal the shares are. With `mean_of="share"` it is that of the mean over this worker's share alone.

A loss is computed only in `_loss` and becomes a gradient only in `_backward`.

`WeightsFirst` is for gradients that go over a network. The backward of a linear layer is two matrix products,
and torch computes the gradient of the input first, because the layers below need it. In the other order,
the gradient of the weight can be sent earlier, by the time of one product.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from manyhands.compute.feed import Share
from manyhands.compute.seeds import derive, seed_compute
from manyhands.compute.train_state import TrainState, checked_weight, evaluating
from manyhands.embeddings.modules import RowModel
from manyhands.hosts.activity import COMPUTING
from manyhands.job import collecting

LARGE = 1 << 16
"""Elements of a matrix for which the detour of WeightsFirst through Python pays."""

Memory = Callable[[Tensor], Tensor | None]
"""memory(weight): where to compute the gradient of a weight, in its shape; None: in new memory."""


class DeviceTime:
    """Computing time of a GPU by its own clock: the host finishes a step before the GPU does."""

    def __init__(self) -> None:
        self._began, self._ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._began.record()

    def stop(self) -> None:
        self._ended.record()

    def seconds(self) -> float:
        """Return the time; waits for the GPU."""
        self._ended.synchronize()
        return float(self._began.elapsed_time(self._ended)) / 1000


Sum = Callable[[float | Tensor], float | Tensor]
"""Adds a number up over all workers."""


def gradients(
    train_state: TrainState,
    share: Share,
    *,
    mean_of: Literal["batch", "share"] = "batch",
    total: Sum | None = None,
    local: Callable[[], AbstractContextManager[object]] = nullcontext,
    ahead: Callable[[float | Tensor, float | Tensor], None] = lambda weight, loss: None,
) -> tuple[float | Tensor, float | Tensor]:
    """Compute the gradients of a share; return its weight and the weighted sum of its losses.

    Args:
        mean_of: What the gradient is the mean of: the batch of the whole step over all workers, or the share.
        total: Adds a weight up over workers, for the mean of a batch of a job with its own weights.
        local: Returns a context in which the gradients of a backward pass are not shared yet.
        ahead: Called with the results before the last backward pass.
    """
    train_state.measures.take()  # of an abandoned step
    train_state.tables.now = share.step
    if isinstance(train_state.model, RowModel):
        return _touch(train_state, train_state.model, share)
    own = train_state.weight
    weights: list[float | Tensor] = [
        float(samples) if own is None or not samples else checked_weight(own(batch))
        for batch, samples in share.batches
    ]
    mine = sum(weights[1:], weights[0])
    if mean_of == "share":
        denominator = mine
    elif own is None:
        denominator = float(share.total)
    else:
        denominator = mine if total is None else total(mine)
    losses: float | Tensor = 0.0
    last = len(share.batches) - 1
    for index, ((batch, _), weight) in enumerate(zip(share.batches, weights, strict=True)):
        with local() if index < last else nullcontext(), train_state.activity.during(COMPUTING):
            if index == 0:  # here, so that a step draws the same numbers in every strategy
                seed_compute(train_state.device, train_state.seed, "step", share.step, share.part)
            loss = None
            if weight != 0:
                train_state.tables.batch = batch
                loss = _loss(train_state, batch, weight)
                losses = losses + loss.detach() * weight
            if index == last:
                ahead(mine, losses)
            if loss is not None:
                _backward(loss, weight / denominator)
            elif share.uniform:
                _pass_through(train_state, batch)
            else:
                _take_part(train_state)
        train_state.activity.ticks += 1
    train_state.tables.batch = None
    return mine, losses


def rehearse(train_state: TrainState, share: Share) -> dict[str, float]:
    """Run forward, loss and backward of a share and discard the result. Returns, for each table, the distinct
    rows that a sample looks up."""
    tables, model = train_state.tables, train_state.model
    batch, samples = share.batches[0]
    if isinstance(model, RowModel):
        needed = model.ids(batch, seed=row_seed(train_state, share, 0))
        rows = {name: len(set(ids.tolist())) for name, ids in needed.items()}
    else:
        _backward(_loss(train_state, batch, 1.0), 1.0)
        rows = {name: len(grads.ids) for name, grads in tables.take().items()}
    train_state.optimizer.zero_grad(set_to_none=True)
    tables.forget()
    return {name: number / samples for name, number in rows.items()}


def _loss(train_state: TrainState, batch: Any, weight: float | Tensor) -> Tensor:
    """Run the forward pass of a micro-batch. Autocast, where it is wanted, belongs around this."""
    with train_state.measures.weighted(weight):
        return train_state.loss(train_state.model, batch)


def _backward(loss: Tensor, part: float | Tensor) -> None:
    """Add the gradients of this part of the mean loss to those of the parameters. A loss scale, where it is
    wanted, is one more factor of the part."""
    (loss if isinstance(part, float) and part == 1.0 else loss * part).backward()


def row_seed(train_state: TrainState, share: Share, index: int) -> int:
    """Return the seed of a RowModel for one micro-batch; known ahead of time."""
    return derive(train_state.tables.stores.seed, "rows", share.step, share.part, index)


def _touch(
    train_state: TrainState, model: RowModel, share: Share
) -> tuple[float | Tensor, float | Tensor]:
    """Train a model that changes rows itself: there are no gradients."""
    weight = losses = 0.0
    for index, (batch, samples) in enumerate(share.batches):
        if samples:
            seed = row_seed(train_state, share, index)
            lent = train_state.tables.lend(model, batch, seed)
            with train_state.activity.during(COMPUTING), lent as rows:
                loss, counted = model.touch(batch, rows, lr=train_state.lr, seed=seed)
            losses, weight = losses + loss, weight + counted
            train_state.activity.ticks += 1
    return weight, losses


def _take_part(train_state: TrainState) -> None:
    """Make gradients of zero for an empty share, or for samples without weight, without a forward.

    Its loss may be NaN (a mean over nothing), so the gradients come from the parameters themselves.
    """
    nothing = [(p * 0.0).sum() for p in train_state.model.parameters() if p.requires_grad]
    torch.stack(nothing).sum().backward()


def _pass_through(train_state: TrainState, batch: Any) -> None:
    """Make gradients of zero for samples without weight by a forward and a backward, because layouts such as
    FSDP exchange tensors in them.

    In evaluation mode: running statistics stay as they are, and dropout draws nothing. The loss may be NaN,
    so the gradients of the model's outputs are replaced by zeros.
    """
    model = train_state.model
    handle = model.register_forward_hook(
        lambda module, inputs, output: tree_map_only(Tensor, _ZeroGradient.apply, output)
    )
    with evaluating(model):
        try:
            with collecting():
                loss = train_state.loss(model, batch)
        finally:
            handle.remove()
        _backward(loss, 0.0)  # also for an output that is no tree of tensors


class _ZeroGradient(torch.autograd.Function):
    """Return the tensor as it is, and a gradient of zero whatever arrives."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return torch.zeros_like(gradient)


def _new_memory(weight: Tensor) -> None:
    """Let torch allocate the gradient. Not a lambda, so that the model can still be pickled."""


class WeightsFirst:
    """Make large linear layers on the CPU compute the gradient of their weight before that of their input."""

    def __init__(self, model: nn.Module, *, memory: Memory = _new_memory) -> None:
        self._layers = [
            layer
            for layer in model.modules()
            if type(layer) is nn.Linear
            and layer.weight.numel() >= LARGE
            and layer.weight.device.type == "cpu"
        ]
        for layer in self._layers:
            layer.forward = partial(_linear, layer, memory)  # type: ignore[method-assign]

    def remove(self) -> None:
        for layer in self._layers:
            del layer.forward


def _linear(layer: nn.Linear, memory: Memory, input: Tensor) -> Tensor:
    weight = layer.weight
    plain = not torch.is_grad_enabled() or torch.is_autocast_enabled("cpu")
    if plain or not weight.requires_grad or input.dtype != weight.dtype:
        return nn.functional.linear(input, weight, layer.bias)
    rows = input.reshape(-1, input.shape[-1])
    # Two autograd nodes, so that the weight's gradient is complete before that of the input begins. A second
    # edge from the weight would make it wait, so each node gets the other's operand without its history.
    link = _InputGradient.apply(rows, weight.detach(), [weight]) if input.requires_grad else None
    place = partial(memory, weight)
    output: Tensor = _WeightGradient.apply(link, weight, layer.bias, rows.detach(), [rows], place)
    return output.view(*input.shape[:-1], -1)


class _InputGradient(torch.autograd.Function):
    """Compute nothing forward, and the gradient of the input backward."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor, tracked: list[Tensor]) -> Tensor:
        ctx.save_for_backward(weight)
        ctx.tracked = tracked
        return input.new_empty(()).expand(len(input), len(weight))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return gradient @ _operand(ctx), None, None


class _WeightGradient(torch.autograd.Function):
    """Compute the layer forward, and the gradients of weight and bias backward."""

    @staticmethod
    def forward(
        ctx: Any,
        link: Tensor | None,
        weight: Tensor,
        bias: Tensor | None,
        input: Tensor,
        tracked: list[Tensor],
        place: Callable[[], Tensor | None],
    ) -> Tensor:
        ctx.save_for_backward(input)
        ctx.tracked, ctx.place = tracked, place
        return nn.functional.linear(input, weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        passed_on = gradient if ctx.needs_input_grad[0] else None
        of_bias = gradient.sum(0) if ctx.needs_input_grad[2] else None
        out = None if torch.is_grad_enabled() else ctx.place()
        of_weight = torch.mm(gradient.t(), _operand(ctx), out=out)
        return passed_on, of_weight, of_bias, None, None, None


def _operand(ctx: Any) -> Tensor:
    """Return what was saved; with its history if the gradient itself is differentiated (create_graph)."""
    (saved,) = ctx.saved_tensors
    return ctx.tracked[0] if torch.is_grad_enabled() else saved
