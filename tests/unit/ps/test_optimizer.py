"""The job's optimizer gives the same result over blocks as over whole parameters."""

from __future__ import annotations

import copy
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import OneCycleLR

from manyhands.compute.param_groups import is_elementwise
from manyhands.ps.block_store import BlockOptimizer
from manyhands.ps.model_layout import join_state
from manyhands.ps.partial_steps import steps_of
from manyhands.ps.staleness import MomentumRule

SHAPES = [(7, 5), (5,), (3, 4, 2)]
CUTS = [0, 10, 32, 64]  # blocks that begin and end inside tensors and span several


def parameters() -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]


def gradients(step: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(
        p, lr=0.1, momentum=0.9, weight_decay=0.01, nesterov=True
    ),
    "dampened": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.5),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, weight_decay=0.01),
    "amsgrad": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True, foreach=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.9, centered=True),
    "adadelta": lambda p: torch.optim.Adadelta(p),
}


class CutParameters:
    """Parameters in one flat tensor, cut at CUTS, as a server holds them."""

    def __init__(self, template: Optimizer, momentum_rule: MomentumRule = "none") -> None:
        self.flat = torch.cat([p.detach().reshape(-1) for p in parameters()])
        self.ranges = list(pairwise(CUTS))
        blocks = {i: (0, self.flat[a:b]) for i, (a, b) in enumerate(self.ranges)}
        self.blocks = BlockOptimizer(template, blocks, momentum_rule=momentum_rule)

    def step(self, step: int, *, part: float = 1.0) -> None:
        whole = torch.cat([g.reshape(-1) for g in gradients(step)])
        self.blocks.step({i: whole[a:b] for i, (a, b) in enumerate(self.ranges)}, part=part)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_blocks_give_the_same_result(name: str) -> None:
    whole = parameters()
    optimizer = OPTIMIZERS[name](whole)
    cut = CutParameters(OPTIMIZERS[name](parameters()))
    for step in range(5):
        for parameter, gradient in zip(whole, gradients(step), strict=True):
            parameter.grad = gradient
        optimizer.step()
        cut.step(step)
    expected = torch.cat([p.detach().reshape(-1) for p in whole])
    torch.testing.assert_close(cut.flat, expected, rtol=1e-6, atol=1e-7)
    assert is_elementwise(optimizer)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_blocks_give_the_same_result_ahead(name: str) -> None:
    whole = parameters()
    steps = steps_of(OPTIMIZERS[name](whole), "ahead")
    cut = CutParameters(OPTIMIZERS[name](parameters()), "ahead")
    for step, part in enumerate([0.25, 0.75, 0.5, 1.0]):
        for parameter, gradient in zip(whole, gradients(step), strict=True):
            parameter.grad = gradient
        steps.step(lr_scale=1.0, part=part)
        cut.step(step, part=part)
    expected = torch.cat([p.detach().reshape(-1) for p in whole])
    torch.testing.assert_close(cut.flat, expected, rtol=1e-6, atol=1e-7)


def test_groups_keep_their_hyperparameters_and_follow_schedules() -> None:
    def make(params: list[nn.Parameter]) -> Optimizer:
        groups = [
            {"params": params[:2], "weight_decay": 0.0},
            {"params": params[2:], "lr": 0.05, "momentum": 0.0},
        ]
        return torch.optim.SGD(groups, lr=0.2, momentum=0.9, weight_decay=0.1)

    def schedule(optimizer: Optimizer) -> OneCycleLR:
        return OneCycleLR(optimizer, max_lr=[0.2, 0.05], total_steps=8)

    whole = parameters()
    optimizer = make(whole)
    flat = torch.cat([p.detach().reshape(-1) for p in parameters()])
    ranges = {0: (0, 0, 25), 1: (0, 25, 40), 2: (1, 40, 64)}
    blocks = BlockOptimizer(
        make(parameters()), {n: (g, flat[a:b]) for n, (g, a, b) in ranges.items()}
    )
    schedules = [schedule(optimizer), schedule(blocks.optimizer)]
    for step in range(6):
        for parameter, gradient in zip(whole, gradients(step), strict=True):
            parameter.grad = gradient
        optimizer.step()
        whole_gradient = torch.cat([g.reshape(-1) for g in gradients(step)])
        blocks.step({n: whole_gradient[a:b] for n, (_, a, b) in ranges.items()})
        for one in schedules:
            one.step()
    expected = torch.cat([p.detach().reshape(-1) for p in whole])
    torch.testing.assert_close(flat, expected, rtol=1e-6, atol=1e-7)


def test_only_blocks_with_a_gradient_move_and_the_rate_is_scaled_once() -> None:
    template = torch.optim.SGD(parameters(), lr=0.1)
    cut = CutParameters(template)
    before = cut.flat.clone()
    cut.blocks.step({1: torch.ones(22)}, lr_scale=0.5)
    assert torch.equal(cut.flat[:10], before[:10])
    assert torch.equal(cut.flat[32:], before[32:])
    torch.testing.assert_close(cut.flat[10:32], before[10:32] - 0.05)
    assert cut.blocks.optimizer.param_groups[0]["lr"] == 0.1


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_states_of_blocks_join_to_that_of_a_tensor(name: str) -> None:
    whole = parameters()[0]
    optimizer = OPTIMIZERS[name]([whole])
    flat = parameters()[0].detach().reshape(-1)
    blocks = BlockOptimizer(
        OPTIMIZERS[name]([parameters()[0]]), {0: (0, flat[:16]), 1: (0, flat[16:])}
    )
    for step in range(2):
        whole.grad = gradients(step)[0]
        optimizer.step()
        gradient = gradients(step)[0].reshape(-1)
        blocks.step({0: gradient[:16], 1: gradient[16:]})
    joined = join_state([blocks.state(0), blocks.state(1)], SHAPES[0])
    expected = {k: v for k, v in optimizer.state.get(whole, {}).items() if v is not None}
    assert joined.keys() == expected.keys()
    for key, value in joined.items():
        got, wanted = torch.as_tensor(value), torch.as_tensor(expected[key])
        assert got.shape == wanted.shape
        torch.testing.assert_close(got, wanted, check_dtype=False)


class Normed(Optimizer):
    """Not elementwise: the step of a tensor depends on its norm, as in LARS."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.data -= group["lr"] * parameter.grad / parameter.grad.norm()


def test_other_optimizers_get_whole_tensors() -> None:
    whole = parameters()
    optimizer = Normed(whole, lr=0.3)
    assert not is_elementwise(optimizer)
    held = [p.detach().clone() for p in parameters()]
    server = BlockOptimizer(copy.deepcopy(optimizer), {i: (0, t) for i, t in enumerate(held)})
    server.step(dict(enumerate(gradients(0))))
    for parameter, gradient in zip(whole, gradients(0), strict=True):
        parameter.grad = gradient
    optimizer.step()
    for got, expected in zip(held, whole, strict=True):
        assert torch.equal(got, expected.detach())
