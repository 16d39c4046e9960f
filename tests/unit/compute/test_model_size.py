"""Facts about a model, against the model itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from manyhands.compute.model_size import model_size
from manyhands.compute.train_state import TrainState

OPTIMIZERS: list[tuple[str, dict[str, Any]]] = [
    ("SGD", {}),
    ("SGD", {"momentum": 0.9, "nesterov": True}),
    ("Adam", {"amsgrad": True}),
    ("AdamW", {"fused": True}),
    ("NAdam", {}),
    ("Adagrad", {}),
    ("Adadelta", {}),
    ("RMSprop", {"momentum": 0.5, "centered": True}),
    ("Rprop", {}),
]


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> TrainState:
    return TrainState(model, optimizer, lambda model, batch: model(batch).sum())


def bytes_in(state: dict[str, Any]) -> int:
    return sum(v.numel() * v.element_size() for v in state.values() if isinstance(v, Tensor))


@pytest.mark.parametrize(("name", "options"), OPTIMIZERS)
def test_the_state_of_the_optimizer_is_known_before_a_step(
    name: str, options: dict[str, Any]
) -> None:
    model = nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 3))
    optimizer = getattr(torch.optim, name)(model.parameters(), lr=0.1, **options)
    size = model_size(state_of(model, optimizer))
    model(torch.ones(2, 5)).sum().backward()
    optimizer.step()
    for parameter, found in zip(model.parameters(), size.parameters, strict=True):
        assert found.state_bytes == bytes_in(optimizer.state[parameter]), found.name
    assert size.elementwise


def test_a_step_that_reads_numbers_leaves_the_state_unknown() -> None:
    class Reads(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            for group in self.param_groups:
                for parameter in group["params"]:
                    if float(parameter.grad.sum()) > 0:
                        self.state[parameter]["big"] = torch.zeros(9)

    model = nn.Linear(2, 2)
    size = model_size(state_of(model, Reads(model.parameters(), lr=0.1)))
    assert size.state_bytes is None
    assert not size.elementwise


def test_groups_frozen_parameters_and_buffers() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    model[0].bias.requires_grad_(False)
    groups = [{"params": [model[1].bias]}, {"params": [model[0].weight, model[1].weight]}]
    size = model_size(state_of(model, torch.optim.SGD(groups, lr=0.1)))
    found = {p.name: (p.group, p.place) for p in size.parameters}
    assert found == {
        "0.weight": (1, 1),
        "0.bias": (-1, -1),
        "1.weight": (1, 2),
        "1.bias": (0, 0),
    }
    assert size.buffers == {"float32": 32, "int64": 8}
    assert (size.parameter_bytes, size.gradient_bytes) == (112, 96)
    assert size.complete_after["1.bias"] == pytest.approx(16 / 96)
    assert size.complete_after["0.weight"] == 1.0
