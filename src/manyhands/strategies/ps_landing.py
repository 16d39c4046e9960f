"""Where gradients land: in the flat memory that servers read, as soon as the backward has made them.

A parameter has no gradient of its own when a backward begins, so the backward hands over what it made
instead of adding it to something; a hook copies it (it adds, from the second micro-batch on) while it is
still in the cache, and drops it. The large matrices of plain linear layers skip even that: their gradient
is one matrix product, which is told to write where it should land.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from manyhands.ps.memory import Flat

LARGE = 1 << 16
"""Elements of a matrix from which on a copy costs more than a detour through Python."""


class Landing:
    def __init__(self, model: nn.Module, parameters: Mapping[str, nn.Parameter]) -> None:
        self.landed: Callable[[Tensor], None] = lambda parameter: None
        """Told of each parameter whose gradient has landed."""
        self._parameters = dict(parameters)
        self._pieces: dict[int, dict[int, Tensor]] = {}
        self._target: dict[int, Tensor] = {}
        self._written: set[int] = set()
        # Of the node that ends a parameter's part of the graph: it runs once a backward, when all uses
        # of the parameter are done, also if each of them has already put its gradient in place.
        self._nodes = [_last_node(parameter) for parameter in self._parameters.values()]
        for parameter, node in zip(self._parameters.values(), self._nodes, strict=True):
            node.register_hook(partial(self._land, parameter))
        trained = {id(parameter) for parameter in self._parameters.values()}
        for module in model.modules():
            if type(module) is nn.Linear and id(module.weight) in trained and _is_large(module):
                module.forward = _Forward(module, self)  # type: ignore[method-assign]

    def begin(self, flat: Flat) -> None:
        """The next backward, or several, go here."""
        if id(flat) not in self._pieces:
            self._pieces[id(flat)] = {
                id(parameter): flat.piece(name).view_as(parameter)
                for name, parameter in self._parameters.items()
            }
        self._target = self._pieces[id(flat)]
        self._written = set()
        for parameter in self._parameters.values():
            parameter.grad = None

    def finish(self) -> None:
        """What no backward has reached has a gradient of zero."""
        for key, piece in self._target.items():
            if key not in self._written:
                piece.zero_()
        self._target = {}

    def expects(self, parameter: Tensor) -> bool:
        """Whether a gradient of this parameter would land."""
        return id(parameter) in self._target

    def multiply(self, parameter: Tensor, left: Tensor, right: Tensor) -> None:
        """The gradient of a parameter is, or is also, this product."""
        key = id(parameter)
        piece = self._target[key]
        if key in self._written:
            piece.addmm_(left, right)
        else:
            torch.mm(left, right, out=piece)
            self._written.add(key)

    def _land(self, parameter: nn.Parameter, *unused: object) -> None:
        key, gradient = id(parameter), parameter.grad
        if key not in self._target:
            return  # not a step: somebody looks at gradients on their own
        if gradient is not None:
            piece = self._target[key]
            with torch.no_grad():
                if key in self._written:
                    piece.add_(gradient)
                else:
                    piece.copy_(gradient)
                    self._written.add(key)
            parameter.grad = None
        self.landed(parameter)


class _Forward:
    """The forward of one linear layer whose gradients land."""

    def __init__(self, module: nn.Linear, landing: Landing) -> None:
        self._module = module
        self._landing = landing

    def __call__(self, input: Tensor) -> Tensor:
        module, landing = self._module, self._landing
        weight = module.weight
        plain = torch.is_grad_enabled() and landing.expects(weight) and input.dtype == weight.dtype
        if not plain or torch.is_autocast_enabled("cpu"):
            return nn.functional.linear(input, weight, module.bias)
        # Two nodes, so that the weight's gradient has landed, and may leave, before that of the input,
        # which is as much work, is begun.
        way = _OfInput.apply(input, weight.detach()) if input.requires_grad else None
        result: Tensor = _OfWeight.apply(way, weight, module.bias, input.detach(), landing)
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
    """nn.functional.linear, but for where the weight's gradient goes. The gradient of what it makes goes
    on to `way`."""

    @staticmethod
    def forward(
        ctx: Any,
        way: Tensor | None,
        weight: Tensor,
        bias: Tensor | None,
        input: Tensor,
        landing: Landing,
    ) -> Tensor:
        ctx.save_for_backward(input, weight)
        ctx.landing = landing
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
        landing: Landing = ctx.landing
        rows = gradient.reshape(-1, gradient.shape[-1])
        columns = input.reshape(-1, input.shape[-1])
        of_weight = None
        if landing.expects(weight):
            landing.multiply(weight, rows.t(), columns)
        elif ctx.needs_input_grad[1]:
            of_weight = rows.t() @ columns
        of_bias = rows.sum(0) if ctx.needs_input_grad[2] else None
        on = gradient if ctx.needs_input_grad[0] else None
        return on, of_weight, of_bias, None, None


def _last_node(parameter: nn.Parameter) -> Any:
    function = parameter.expand_as(parameter).grad_fn
    assert function is not None, "only parameters that need gradients are trained"
    return function.next_functions[0][0]


def _is_large(module: nn.Linear) -> bool:
    return module.weight.numel() >= LARGE and module.weight.device.type == "cpu"
