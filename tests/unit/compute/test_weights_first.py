"""WeightsFirst changes the order of the products in backward, and no gradient."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from copy import deepcopy

import pytest
import torch
from torch import Tensor, nn

from manyhands.compute.gradients import LARGE, WeightsFirst

WIDTH = 256
assert WIDTH * WIDTH >= LARGE


class Tied(nn.Module):
    """One matrix, as two layers and by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH, bias=False)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.second(torch.relu(self.first(x)))
        return hidden + nn.functional.linear(x, self.first.weight)


class Unused(nn.Module):
    """Two layers, one of which the loss does not depend on."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        self.unused(x)
        result: Tensor = self.used(x)
        return result


def frozen_bias() -> nn.Module:
    layer = nn.Linear(WIDTH, WIDTH)
    layer.bias.requires_grad_(False)
    return nn.Sequential(layer, nn.Linear(WIDTH, 4))


def frozen_weight() -> nn.Module:
    layer = nn.Linear(WIDTH, WIDTH)
    layer.weight.requires_grad_(False)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), layer)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "chain": lambda: nn.Sequential(
        nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 3)
    ),
    "changed in place": lambda: nn.Sequential(
        nn.Linear(WIDTH, WIDTH), nn.ReLU(inplace=True), nn.Linear(WIDTH, WIDTH), nn.Dropout(0.0)
    ),
    "no bias": lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, 2)),
    "frozen bias": frozen_bias,
    "frozen weight": frozen_weight,
    "tied": Tied,
    "unused": Unused,
}


@pytest.mark.parametrize("shape", [(), (2,), (2, 5)])
@pytest.mark.parametrize("kind", MODELS)
def test_outputs_and_gradients_are_those_of_torch(kind: str, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    model = MODELS[kind]()
    plain = deepcopy(model)
    WeightsFirst(model)
    for x in torch.randn(2, *shape, WIDTH):
        torch.testing.assert_close(model(x), plain(x), rtol=0, atol=0)
        model(x).square().sum().backward()
        plain(x).square().sum().backward()
    for mine, expected in zip(model.parameters(), plain.parameters(), strict=True):
        assert (mine.grad is None) == (expected.grad is None)
        if mine.grad is not None:
            torch.testing.assert_close(mine.grad, expected.grad)


@pytest.mark.parametrize("first", [True, False])
def test_the_weight_comes_before_the_input_until_removed(first: bool) -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    handle = WeightsFirst(model)
    if not first:
        handle.remove()
    output = model[1](model[0](torch.randn(3, WIDTH)))
    with torch.autograd.profiler.profile(record_shapes=True) as profile:
        output.sum().backward()
    products = [each.input_shapes for each in profile.function_events if each.name == "aten::mm"]
    of_weight, of_input = [[WIDTH, 3], [3, WIDTH]], [[3, WIDTH], [WIDTH, WIDTH]]
    assert products[:2] == ([of_weight, of_input] if first else [of_input, of_weight])


def test_gradients_outside_of_a_step() -> None:
    """Such as those of a metric that differentiates."""
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1))
    WeightsFirst(model)
    x = torch.randn(2, WIDTH, requires_grad=True)
    (gradient,) = torch.autograd.grad(model(x).sum(), x)
    torch.testing.assert_close(gradient, (model[1].weight @ model[0].weight).expand(2, -1))


def test_gradients_can_be_differentiated_again() -> None:
    """Such as in a gradient penalty."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
    plain = deepcopy(model)
    WeightsFirst(model)
    values = torch.randn(3, WIDTH)
    for each in (model, plain):
        x = values.clone().requires_grad_()
        wanted = [x, each[0].weight]
        grads = torch.autograd.grad(each(x).square().sum(), wanted, create_graph=True)
        sum(grad.square().sum() for grad in grads).backward()
    for mine, expected in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, expected.grad)


def test_the_gradient_is_computed_in_the_memory_that_is_given() -> None:
    model = nn.Linear(WIDTH, WIDTH)
    memory = torch.full((WIDTH, WIDTH), torch.nan)
    WeightsFirst(model, memory=lambda weight: memory.detach())
    model(torch.randn(3, WIDTH)).sum().backward()
    assert model.weight.grad is not None
    assert model.weight.grad.data_ptr() == memory.data_ptr()


def test_the_model_can_be_copied_and_pickled() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH))
    WeightsFirst(model)
    for other in (deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert other[0].forward.args[0] is other[0], "it computes with its own weight"
        other(torch.randn(3, WIDTH)).sum().backward()
        assert other[0].weight.grad is not None
        assert model[0].weight.grad is None
