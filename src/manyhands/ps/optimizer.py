"""The job's own torch optimizer, run over blocks: flat pieces of its parameters.

An elementwise optimizer (SGD, Adam and their kin) does to each element what it does to it inside its
tensor, so cutting tensors into blocks changes nothing but speed: one fused pass over a few large
blocks instead of many small tensors. Others get whole tensors, in their own shape. No optimizer is
written here, and none is pickled: it is built from the class and the hyperparameters of the job's.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from manyhands.compute.train_state import multiplied_lr

ELEMENTWISE: tuple[type[Optimizer], ...] = (
    torch.optim.SGD,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.Adamax,
    torch.optim.Adagrad,
    torch.optim.Adadelta,
    torch.optim.RMSprop,
    torch.optim.ASGD,
    torch.optim.Rprop,
)
"""Each element's update depends on that element alone."""

FUSED: tuple[type[Optimizer], ...] = (
    torch.optim.SGD,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.Adagrad,
)


def is_elementwise(optimizer: Optimizer) -> bool:
    """Whether its parameters may be cut into blocks. A subclass may do anything: it may not."""
    return type(optimizer) in ELEMENTWISE


class BlockOptimizer:
    """An optimizer like `template`, over the blocks that one server holds."""

    def __init__(self, template: Optimizer, blocks: Mapping[int, tuple[int, Tensor]]) -> None:
        """`blocks`: number of the block to (parameter group, its tensor, which is updated in place)."""
        self._parameters = {
            number: torch.nn.Parameter(tensor, requires_grad=True)
            for number, (_, tensor) in blocks.items()
        }
        groups = [
            {
                **{
                    key: value
                    for key, value in group.items()
                    if key not in ("params", "param_names", "initial_lr")
                },
                "params": [self._parameters[n] for n, (g, _) in blocks.items() if g == index],
            }
            for index, group in enumerate(template.param_groups)
        ]
        self.optimizer = _like(template, groups)

    def step(self, gradients: Mapping[int, Tensor], *, lr_scale: float = 1.0) -> None:
        """Update the blocks that have a gradient, and no others."""
        for number, gradient in gradients.items():
            self._parameters[number].grad = gradient
        try:
            with multiplied_lr(self.optimizer, lr_scale):
                self.optimizer.step()
        finally:
            for number in gradients:
                self._parameters[number].grad = None

    def state(self, number: int) -> dict[str, Any]:
        """What the optimizer remembers of a block: tensors of its size, and scalars."""
        return dict(self.optimizer.state.get(self._parameters[number], {}))

    def load_state(self, number: int, state: Mapping[str, Any]) -> None:
        copied = {k: v.clone() if isinstance(v, Tensor) else v for k, v in state.items()}
        self.optimizer.state[self._parameters[number]] = copied


def join_state(pieces: Sequence[Mapping[str, Any]], shape: Sequence[int]) -> dict[str, Any]:
    """A parameter's state from those of its consecutive pieces, in its own shape."""
    if not pieces or not pieces[0]:
        return {}
    joined: dict[str, Any] = {}
    for name, first in pieces[0].items():
        if isinstance(first, Tensor) and first.dim() > 0:
            joined[name] = torch.cat([piece[name].reshape(-1) for piece in pieces]).view(*shape)
        else:
            joined[name] = first.clone() if isinstance(first, Tensor) else first
    return joined


def _like(template: Optimizer, groups: list[dict[str, Any]]) -> Optimizer:
    """An optimizer of the template's class with these groups."""
    cls = type(template)
    known = inspect.signature(cls.__init__).parameters
    arguments = {name: value for name, value in template.defaults.items() if name in known}
    unset = arguments.get("foreach") is None and arguments.get("fused") is None
    if cls in FUSED and unset and not arguments.get("differentiable"):
        arguments["fused"] = True
        for group in groups:
            group["fused"] = True
    return cls(groups, **arguments)
