"""Linear layers whose weight gets its gradient before their input does.

Both are a matrix product, and torch makes that of the input first, which the layers below wait for. But the
gradient of the weight has a long way to go, over the network, and that of the input has none: the other way
round the network begins earlier by the time of one product.

On the CPU, for large matrices: there the detour through Python costs little.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor, nn

LARGE = 1 << 16
"""Elements of a matrix from which on the detour is worth it."""


class Destination(Protocol):
    """Where gradients of weights go."""

    def expects(self, weight: Tensor) -> bool:
        """Whether it cares for this one, now."""
        ...

    def multiply(self, weight: Tensor, left: Tensor, right: Tensor) -> Tensor | None:
        """The gradient of the weight is, or is also, left @ right: for torch to deal with, or None if it is
        where it should be."""
        ...


class Soon:
    """Gradients go where torch puts them, but soon."""

    def __init__(self) -> None:
        self.on = False

    def expects(self, weight: Tensor) -> bool:
        return self.on

    def multiply(self, weight: Tensor, left: Tensor, right: Tensor) -> Tensor:
        return left @ right


def weights_first(model: nn.Module, destination: Destination) -> None:
    """From now on, for every linear layer that the destination cares for."""
    for module in model.modules():
        if type(module) is nn.Linear and module.weight.requires_grad and _is_large(module):
            module.forward = _Forward(module, destination)  # type: ignore[method-assign]


class _Forward:
    """The forward of one linear layer."""

    def __init__(self, module: nn.Linear, destination: Destination) -> None:
        self._module = module
        self._destination = destination

    def __call__(self, input: Tensor) -> Tensor:
        module, destination = self._module, self._destination
        weight = module.weight
        plain = torch.is_grad_enabled() and destination.expects(weight)
        plain = plain and input.dtype == weight.dtype
        if not plain or torch.is_autocast_enabled("cpu"):
            return nn.functional.linear(input, weight, module.bias)
        # Two nodes, so that the weight's gradient has arrived before that of the input is begun.
        way = _OfInput.apply(input, weight.detach()) if input.requires_grad else None
        result: Tensor = _OfWeight.apply(way, weight, module.bias, input.detach(), destination)
        return result


class _OfInput(torch.autograd.Function):
    """Stands for what a linear layer makes of its input, without a number in it, on the way back."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(weight)
        return input.new_empty(()).expand(*input.shape[:-1], weight.shape[0])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (weight,) = ctx.saved_tensors
        return gradient @ weight, None


class _OfWeight(torch.autograd.Function):
    """nn.functional.linear, and the gradient of its weight. That of what it makes goes on to `way`."""

    @staticmethod
    def forward(
        ctx: Any,
        way: Tensor | None,
        weight: Tensor,
        bias: Tensor | None,
        input: Tensor,
        destination: Destination,
    ) -> Tensor:
        ctx.save_for_backward(input, weight)
        ctx.destination = destination
        if input.dim() == 2:
            return nn.functional.linear(input, weight, bias)
        # torch would make a view of rows, which a layer that works in place must not change.
        made = input.new_empty(*input.shape[:-1], weight.shape[0])
        rows, columns = made.view(-1, weight.shape[0]), input.reshape(-1, weight.shape[1])
        if bias is None:
            torch.mm(columns, weight.t(), out=rows)
        else:
            torch.addmm(bias, columns, weight.t(), out=rows)
        return made

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        input, weight = ctx.saved_tensors
        rows = gradient.reshape(-1, gradient.shape[-1])
        of_weight = None
        if ctx.needs_input_grad[1]:
            columns = input.reshape(-1, input.shape[-1])
            of_weight = ctx.destination.multiply(weight, rows.t(), columns)
        of_bias = rows.sum(0) if ctx.needs_input_grad[2] else None
        on = gradient if ctx.needs_input_grad[0] else None
        return on, of_weight, of_bias, None, None


def _is_large(module: nn.Linear) -> bool:
    return module.weight.numel() >= LARGE and module.weight.device.type == "cpu"
