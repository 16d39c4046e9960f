"""The job's optimizer over blocks does what it does over whole parameters."""

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

from manyhands.ps.optimizer import BlockOptimizer, cut_state, is_elementwise, join_state

SHAPES = [(7, 5), (5,), (3, 4, 2)]
SIZES = [35, 5, 24]
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


class Cut:
    """Parameters laid one behind the other and cut at CUTS, as a server holds them."""

    def __init__(self, template: Optimizer) -> None:
        self.flat = torch.cat([p.detach().reshape(-1) for p in parameters()])
        self.ranges = list(pairwise(CUTS))
        blocks = {i: (0, self.flat[a:b]) for i, (a, b) in enumerate(self.ranges)}
        self.blocks = BlockOptimizer(template, blocks)

    def step(self, step: int) -> None:
        whole = torch.cat([g.reshape(-1) for g in gradients(step)])
        self.blocks.step({i: whole[a:b] for i, (a, b) in enumerate(self.ranges)})


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_blocks_change_nothing(name: str) -> None:
    whole = parameters()
    optimizer = OPTIMIZERS[name](whole)
    cut = Cut(OPTIMIZERS[name](parameters()))
    for step in range(5):
        for parameter, gradient in zip(whole, gradients(step), strict=True):
            parameter.grad = gradient
        optimizer.step()
        cut.step(step)
    expected = torch.cat([p.detach().reshape(-1) for p in whole])
    torch.testing.assert_close(cut.flat, expected, rtol=1e-6, atol=1e-7)
    assert is_elementwise(optimizer)


def test_groups_keep_their_hyperparameters_and_schedules_reach_them() -> None:
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
        all_of_it = torch.cat([g.reshape(-1) for g in gradients(step)])
        blocks.step({n: all_of_it[a:b] for n, (_, a, b) in ranges.items()})
        for one in schedules:
            one.step()
    expected = torch.cat([p.detach().reshape(-1) for p in whole])
    torch.testing.assert_close(flat, expected, rtol=1e-6, atol=1e-7)


def test_only_blocks_with_a_gradient_move_and_the_rate_is_scaled_once() -> None:
    template = torch.optim.SGD(parameters(), lr=0.1)
    cut = Cut(template)
    before = cut.flat.clone()
    cut.blocks.step({1: torch.ones(22)}, lr_scale=0.5)
    assert torch.equal(cut.flat[:10], before[:10])
    assert torch.equal(cut.flat[32:], before[32:])
    torch.testing.assert_close(cut.flat[10:32], before[10:32] - 0.05)
    assert cut.blocks.optimizer.param_groups[0]["lr"] == 0.1


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_state_goes_from_tensors_to_blocks_and_back(name: str) -> None:
    """A run of one kind can be resumed as the other: the optimizer's memory fits both."""
    whole = parameters()
    optimizer = OPTIMIZERS[name](whole)
    for parameter, gradient in zip(whole, gradients(0), strict=True):
        parameter.grad = gradient
    optimizer.step()
    pieces_of: dict[int, list[dict[str, Any]]] = {}
    one_tensor_a_block = [(i, size) for i, size in enumerate(SIZES)]
    for index, size in one_tensor_a_block:
        state = optimizer.state.get(whole[index], {})
        pieces_of[index] = cut_state(state, size, [(0, size // 2), (size // 2, size)])
    blocks = {}
    for index, parameter in enumerate(whole):
        flat, half = parameter.detach().clone().reshape(-1), SIZES[index] // 2
        blocks[2 * index], blocks[2 * index + 1] = (0, flat[:half]), (0, flat[half:])
    server = BlockOptimizer(OPTIMIZERS[name](parameters()), blocks)
    for index, pieces in pieces_of.items():
        for half, piece in enumerate(pieces):
            if piece:
                server.load_state(2 * index + half, piece)
    halves = {}
    for index, gradient in enumerate(gradients(1)):
        flat, half = gradient.reshape(-1), SIZES[index] // 2
        halves[2 * index], halves[2 * index + 1] = flat[:half], flat[half:]
        whole[index].grad = gradient
    server.step(halves)
    optimizer.step()
    for index, parameter in enumerate(whole):
        got = torch.cat([blocks[2 * index][1], blocks[2 * index + 1][1]]).view_as(parameter)
        torch.testing.assert_close(got, parameter.detach(), rtol=1e-6, atol=1e-7)
        back = join_state([server.state(2 * index), server.state(2 * index + 1)], SHAPES[index])
        expected = optimizer.state.get(parameter, {})
        assert back.keys() == {k for k, v in expected.items() if v is not None}
        for key, value in back.items():
            torch.testing.assert_close(
                torch.as_tensor(value), torch.as_tensor(expected[key]), check_dtype=False
            )


class Normed(Optimizer):
    """Not elementwise: the step of a tensor depends on its norm (as LARS has it)."""

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
