"""The gradient buffer holds the gradients that torch computes by itself."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy

import pytest
import torch
from torch import Tensor, nn

from manyhands.ps.block_store import FlatTensors
from manyhands.ps.gradient_buffer import GradientBuffer
from manyhands.ps.model_layout import layout_of, pieces_of

WIDTH = 64


class Tied(nn.Module):
    """One matrix, used by two layers and directly."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH, bias=False)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.second(torch.relu(self.first(x)))
        return hidden + nn.functional.linear(x, self.first.weight)


class UnusedLayer(nn.Module):
    """A model with a layer that the loss does not depend on."""

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


MODELS: dict[str, Callable[[], nn.Module]] = {
    "chain": lambda: nn.Sequential(
        nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 3)
    ),
    "in place": lambda: nn.Sequential(
        nn.Linear(WIDTH, WIDTH), nn.ReLU(inplace=True), nn.Linear(WIDTH, WIDTH), nn.Dropout(0.0)
    ),
    "no bias": lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, 2)),
    "frozen bias": frozen_bias,
    "tied": Tied,
    "unused layer": UnusedLayer,
}


@pytest.mark.parametrize("shape", [(), (2,), (5,), (2, 5)])
@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize("kind", MODELS)
def test_gradients_are_those_of_torch(
    kind: str, micro_batches: int, shape: tuple[int, ...]
) -> None:
    torch.manual_seed(0)
    model = MODELS[kind]()
    plain = deepcopy(model)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.1)
    flat = FlatTensors.private(layout_of(model, optimizer))
    pieces = pieces_of(model, optimizer)
    gradient_buffer = GradientBuffer(model, pieces)
    landed: list[int] = []
    gradient_buffer.landed = lambda parameter: landed.append(id(parameter))
    gradient_buffer.begin(flat)
    for x in torch.randn(micro_batches, *shape, WIDTH):
        torch.testing.assert_close(model(x), plain(x), rtol=0, atol=0)
        model(x).square().sum().backward()
        plain(x).square().sum().backward()
    gradient_buffer.finish()
    expected = dict(plain.named_parameters())
    assert pieces.keys() == {name for name, p in expected.items() if p.requires_grad}
    for name in pieces:
        wanted = expected[name].grad
        found = flat.piece(name).view_as(expected[name])
        torch.testing.assert_close(found, torch.zeros_like(found) if wanted is None else wanted)
        assert landed.count(id(pieces[name])) == (0 if wanted is None else micro_batches)


def test_gradients_outside_of_a_step_are_left_alone() -> None:
    """A metric may differentiate, for example."""
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1))
    GradientBuffer(model, pieces_of(model, torch.optim.SGD(model.parameters(), lr=0.1)))
    x = torch.randn(2, WIDTH, requires_grad=True)
    (gradient,) = torch.autograd.grad(model(x).sum(), x)
    torch.testing.assert_close(gradient, (model[1].weight @ model[0].weight).expand(2, -1))
    model(x).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
