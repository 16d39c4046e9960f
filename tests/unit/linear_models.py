"""Models with large linear layers, in every form that changes how their gradients are computed."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from manyhands.compute.gradients import LARGE

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
