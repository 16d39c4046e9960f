"""Linear layers that compute the gradient of their weight before that of their input.

Both are matrix products, and torch computes that of the input first, because the layers below need it. But
the gradient of the weight has to go over the network: in the other order, sending begins earlier by the
time of one product.

Only on the CPU and for large matrices, where the detour through Python costs little.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor, nn

LARGE = 1 << 16
"""Elements of a matrix from which the detour pays."""


class Destination(Protocol):
    """Receiver of the gradients of weights."""

    def expects(self, weight: Tensor) -> bool:
        """Return true if it wants the gradient of this weight now."""
        ...

    def multiply(self, weight: Tensor, left: Tensor, right: Tensor) -> Tensor | None:
        """Compute left @ right, a part of the weight's gradient. Return it for torch to accumulate, or None
        if it is stored already."""
        ...


class Soon:
    """Leaves gradients to torch, but computes them first."""

    def __init__(self) -> None:
        self.on = False

    def expects(self, weight: Tensor) -> bool:
        return self.on

    def multiply(self, weight: Tensor, left: Tensor, right: Tensor) -> Tensor:
        return left @ right


def weights_first(model: nn.Module, destination: Destination) -> None:
    """Change the forward of every large linear layer of the model."""
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
        # Two autograd nodes, so that the weight's gradient is done before that of the input starts.
        way = _OfInput.apply(input, weight.detach()) if input.requires_grad else None
        result: Tensor = _OfWeight.apply(way, weight, module.bias, input.detach(), destination)
        return result


class _OfInput(torch.autograd.Function):
    """Autograd node of the input: computes nothing forward, and the input's gradient backward."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(weight)
        return input.new_empty(()).expand(*input.shape[:-1], weight.shape[0])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (weight,) = ctx.saved_tensors
        return gradient @ weight, None


class _OfWeight(torch.autograd.Function):
    """Autograd node of the weight: nn.functional.linear forward. Passes the output's gradient on to `way`."""

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
        # torch would return a view, which an in-place layer must not change.
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
