"""Which modules wait for which parameters: a layer for its own, unless another module may use them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from manyhands.ps.gradient_buffer import _waits


class Block(nn.Module):
    """Uses the parameters of a child directly: the forward of `inner` is never called."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.chain = nn.Sequential(nn.Linear(4, 4), nn.ReLU())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(self.chain(x), self.inner.weight, self.inner.bias)


class OwnForward(nn.Sequential):
    """A chain with its own forward, which may do anything."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self[0](x) + self[1].weight.sum()


def attention() -> nn.Module:
    return nn.TransformerEncoderLayer(8, 2, dim_feedforward=16, batch_first=True)


MODELS = {
    "a single layer": lambda: nn.Linear(3, 3),
    "a chain": lambda: nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3)),
    "chains in chains": lambda: nn.Sequential(
        nn.Sequential(nn.Linear(3, 3), nn.Sequential(nn.Linear(3, 3))), nn.Linear(3, 2)
    ),
    "a block in a chain": lambda: nn.Sequential(nn.Linear(4, 4), Block()),
    "a chain in a block": Block,
    "a subclass of a chain": lambda: nn.Sequential(OwnForward(nn.Linear(3, 3), nn.Linear(3, 3))),
    "attention": lambda: nn.Sequential(nn.Linear(8, 8), attention(), nn.Linear(8, 1)),
    "an empty chain": lambda: nn.Sequential(),
}


def names(model: nn.Module) -> list[tuple[str, list[str]]]:
    modules = {id(m): name for name, m in model.named_modules()}
    parameters = {id(p): name for name, p in model.named_parameters()}
    return [(modules[id(m)], [parameters[id(p)] for p in owned]) for m, owned in _waits(model)]


@pytest.mark.parametrize("kind", MODELS)
def test_every_parameter_is_waited_for(kind: str) -> None:
    model = MODELS[kind]()
    waited = [name for _, owned in names(model) for name in owned]
    assert sorted(waited) == sorted(name for name, _ in model.named_parameters())


def test_in_chains_each_layer_waits_for_its_own_parameters() -> None:
    assert [(m, len(owned)) for m, owned in names(MODELS["chains in chains"]())] == [
        ("0.0", 2), ("0.1.0", 2), ("1", 2),
    ]  # fmt: skip


def test_other_modules_wait_for_all_parameters_below_them() -> None:
    assert [m for m, _ in names(MODELS["a block in a chain"]())] == ["0", "1"]
    assert [m for m, _ in names(Block())] == [""]
    assert [m for m, _ in names(MODELS["a subclass of a chain"]())] == ["0"]
    waits = dict(names(MODELS["attention"]()))
    assert list(waits) == ["0", "1", "2"]
    assert {"1.self_attn.in_proj_weight", "1.self_attn.out_proj.weight", "1.norm1.weight"} <= {
        *waits["1"]
    }


def test_a_layer_used_twice_waits_once_and_tied_layers_wait_for_the_same_weight() -> None:
    layer, tied = nn.Linear(3, 3), nn.Linear(3, 3)
    tied.weight = layer.weight
    waits = list(_waits(nn.Sequential(layer, nn.ReLU(), layer, tied)))
    assert [m for m, _ in waits if m is layer] == [layer]
    assert all(any(p is layer.weight for p in owned) for m, owned in waits if m in (layer, tied))


@pytest.mark.parametrize("kind", [kind for kind in MODELS if kind != "an empty chain"])
def test_no_parameter_is_used_before_it_was_waited_for(kind: str) -> None:
    """Parameters are NaN until they are waited for, so the output would be NaN too."""
    torch.manual_seed(0)
    model = MODELS[kind]().eval()
    true = {p: p.detach().clone() for p in model.parameters()}
    x = torch.ones(2, 3, next(model.parameters()).shape[-1])
    wanted = model(x)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(float("nan"))

    def arrive(owned: list[nn.Parameter]) -> None:
        with torch.no_grad():
            for parameter in owned:
                parameter.copy_(true[parameter])

    for module, owned in _waits(model):
        module.register_forward_pre_hook(lambda m, args, owned=owned: arrive(owned))
    assert torch.equal(model(x), wanted)
