"""WeightsFirst changes the order of the products in backward, and no gradient."""

from __future__ import annotations

import pickle
from copy import deepcopy

import pytest
import torch
from linear_models import MODELS, WIDTH
from torch import nn

from manyhands.compute.gradients import WeightsFirst


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
