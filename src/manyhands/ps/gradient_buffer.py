"""Where gradients land: in the flat memory that servers read, as soon as the backward has made them.

A parameter has no gradient of its own when a backward begins, so the backward hands over what it made
instead of adding it to something; a hook copies it (it adds, from the second micro-batch on) while it is
still in the cache, and drops it. The large matrices of plain linear layers skip even that: their gradient
is one matrix product (weights_first.py), which is told to write where it should land.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from manyhands.collectives.weights_first import weights_first
from manyhands.ps.block_store import FlatTensors


class GradientBuffer:
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
        weights_first(model, self)

    def begin(self, flat: FlatTensors) -> None:
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

    def expects(self, weight: Tensor) -> bool:
        """Whether a gradient of this parameter would land."""
        return id(weight) in self._target

    def multiply(self, weight: Tensor, left: Tensor, right: Tensor) -> Tensor | None:
        """The gradient of a parameter is, or is also, this product."""
        key = id(weight)
        piece = self._target.get(key)
        if piece is None:
            return left @ right
        if key in self._written:
            piece.addmm_(left, right)
        else:
            torch.mm(left, right, out=piece)
            self._written.add(key)
        return None

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


def _last_node(parameter: nn.Parameter) -> Any:
    function = parameter.expand_as(parameter).grad_fn
    assert function is not None, "only parameters that need gradients are trained"
    return function.next_functions[0][0]
