"""The gradient buffer holds the gradients that torch computes by itself."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch
from linear_models import MODELS, WIDTH
from torch import nn

from manyhands.ps.block_store import FlatTensors
from manyhands.ps.gradient_buffer import GradientBuffer
from manyhands.ps.model_layout import layout_of, pieces_of


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


def test_a_large_layer_computes_its_gradient_in_the_buffer() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    flat = FlatTensors.private(layout_of(model, optimizer))
    gradient_buffer = GradientBuffer(model, pieces_of(model, optimizer))
    addresses: list[int] = []
    # A hook of the job's own sees the gradient before the buffer takes it.
    model[0].weight.register_hook(lambda gradient: addresses.append(gradient.data_ptr()))
    gradient_buffer.begin(flat)
    for _ in range(2):
        model(torch.randn(3, WIDTH)).sum().backward()
    gradient_buffer.finish()
    piece = flat.piece("0.weight").data_ptr()
    assert [address == piece for address in addresses] == [True, False], (
        "only the first micro-batch"
    )
