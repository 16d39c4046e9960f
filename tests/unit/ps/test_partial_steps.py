"""Steps with parts of a batch: the laws that they keep, against plain formulas and torch's own steps."""

from __future__ import annotations

import copy
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.optim import Optimizer

from manyhands.ps import partial_steps
from manyhands.ps.partial_steps import AHEAD, Steps, geometric, steps_of

LR, B = 0.1, 0.9
SIZE = 6
NOTHING = torch.zeros(SIZE, dtype=torch.float64)

Make = Callable[[list[nn.Parameter]], Optimizer]
MOMENTUM: dict[str, Make] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=LR, momentum=B),
    "nesterov": lambda p: torch.optim.SGD(p, lr=LR, momentum=B, nesterov=True),
    "dampened": lambda p: torch.optim.SGD(p, lr=LR, momentum=B, dampening=0.25),
    "adam": lambda p: torch.optim.Adam(p, lr=LR, betas=(B, 0.99)),
    "adamw": lambda p: torch.optim.AdamW(p, lr=LR, betas=(B, 0.99), weight_decay=0.1),
    "amsgrad": lambda p: torch.optim.Adam(p, lr=LR, betas=(B, 0.99), amsgrad=True),
}
MOMENTS = ("momentum_buffer", "exp_avg", "exp_avg_sq")


def weights(seed: int = 0) -> nn.Parameter:
    generator = torch.Generator().manual_seed(seed)
    return nn.Parameter(torch.randn(SIZE, generator=generator, dtype=torch.float64))


def gradient(seed: int) -> Tensor:
    return weights(100 + seed).detach()


class Run:
    """Parameters, and steps of a rule."""

    def __init__(self, make: Make, rule: Any = "ahead") -> None:
        self.parameter = weights()
        self.steps = steps_of(make([self.parameter]), rule)

    def step(self, grad: Tensor, part: float = 1.0, *, lr_scale: float | None = None) -> Tensor:
        """`lr_scale`: as a push without staleness by default."""
        self.parameter.grad = grad
        self.steps.step(lr_scale=part if lr_scale is None else lr_scale, part=part)
        return self.parameter.detach().clone()

    @property
    def moments(self) -> dict[str, Tensor]:
        state = self.steps.optimizer.state[self.parameter]
        return {key: state[key].clone() for key in MOMENTS if key in state}


@settings(max_examples=25)
@given(
    cuts=st.lists(st.integers(1, 999), max_size=5, unique=True),
    name=st.sampled_from(list(MOMENTUM)),
)
def test_the_parts_of_a_batch_add_to_momentum_what_the_batch_adds(
    cuts: list[int], name: str
) -> None:
    whole, cut = Run(MOMENTUM[name]), Run(MOMENTUM[name])
    edges = [0, *sorted(cuts), 1000]
    for step in range(3):
        whole.step(gradient(step))
        for low, high in pairwise(edges):
            cut.step(gradient(step), (high - low) / 1000)
    assert whole.moments.keys() == cut.moments.keys() != set()
    for key, moment in whole.moments.items():
        torch.testing.assert_close(cut.moments[key], moment)


def test_the_weights_are_those_that_momentum_alone_will_reach() -> None:
    """A twin without look-ahead gets the same gradients, and then none: it comes to where the other is."""
    n = 4
    ahead, momentum, place = Run(MOMENTUM["sgd"]), NOTHING, weights().detach().clone()
    for step in range(10):
        seen = ahead.step(gradient(step), 1 / n)
        momentum = B ** (1 / n) * momentum + geometric(B, 1 / n) * gradient(step)
        place = place - LR / n * momentum
    for _ in range(round(AHEAD * n)):
        momentum = B ** (1 / n) * momentum
        place = place - LR / n * momentum
    torch.testing.assert_close(seen, place)


def test_one_batch_ahead_is_nesterovs_momentum(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partial_steps, "AHEAD", 1.0)
    mine, torchs = Run(MOMENTUM["sgd"]), Run(MOMENTUM["nesterov"], "none")
    for step in range(5):
        torch.testing.assert_close(mine.step(gradient(step)), torchs.step(gradient(step)))


@pytest.mark.parametrize("name", [name for name in MOMENTUM if name != "dampened"])
def test_whole_batches_without_a_look_ahead_are_torchs_steps(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All but torch's quirk that the first gradient is not dampened."""
    monkeypatch.setattr(partial_steps, "AHEAD", 0.0)
    mine, torchs = Run(MOMENTUM[name]), Run(MOMENTUM[name], "none")
    for step in range(5):
        expected = torchs.step(gradient(step), lr_scale=0.5)
        torch.testing.assert_close(mine.step(gradient(step), lr_scale=0.5), expected)


@pytest.mark.parametrize("parts", [1, 2, 8])
def test_a_gradient_moves_the_weights_as_far_as_in_one_process(parts: int) -> None:
    run = Run(MOMENTUM["sgd"])
    for _ in range(parts):
        run.step(gradient(0), 1 / parts)
    for _ in range(300 * parts):
        last = run.step(NOTHING, 1 / parts)
    moved = weights().detach() - last
    torch.testing.assert_close(moved, LR / (1 - B) * gradient(0))


def test_weight_decay_and_maximize_count_as_in_a_gradient() -> None:
    def make(params: list[nn.Parameter]) -> Optimizer:
        return torch.optim.SGD(params, lr=1e-4, momentum=B, weight_decay=0.5, maximize=True)

    run = Run(make)
    before, grad = weights().detach(), gradient(0)
    after = run.step(grad, 0.25)
    first = geometric(B, 0.25) * B**AHEAD + geometric(B, AHEAD)
    expected = before - 0.25 * 1e-4 * first * (0.5 * before - grad)
    torch.testing.assert_close(after, expected, rtol=0, atol=1e-8)  # to first order in the rate


@pytest.mark.parametrize("name", ["adam", "amsgrad"])
def test_adam_looks_ahead_by_the_mean_and_goes_by_the_root_of_the_part(name: str) -> None:
    run, f, b2 = Run(MOMENTUM[name]), 0.25, 0.99
    mean = square = largest = np.zeros(SIZE)
    expected = weights().detach().numpy()
    for step in range(1, 6):
        grad = gradient(step).numpy()
        mean = B**f * mean + (1 - B**f) * grad
        square = b2**f * square + (1 - b2**f) * grad**2
        largest = np.maximum(largest, square) if name == "amsgrad" else square
        size = np.sqrt(largest / (1 - b2 ** (f * step))) + 1e-8
        ahead = B**AHEAD * mean / (1 - B ** (f * step)) + (1 - B**AHEAD) * grad
        expected = expected - LR * np.sqrt(f) * ahead / size
        np.testing.assert_allclose(run.step(gradient(step), f).numpy(), expected, rtol=1e-6)


def test_decoupled_weight_decay_goes_by_the_part() -> None:
    run, n = Run(MOMENTUM["adamw"]), 4
    for _ in range(n):
        last = run.step(NOTHING, 1 / n)
    torch.testing.assert_close(last, weights().detach() * (1 - LR * 0.1 / n) ** n)


@pytest.mark.parametrize("name", MOMENTUM)
def test_an_empty_part_changes_nothing(name: str) -> None:
    run = Run(MOMENTUM[name])
    before, moments = run.step(gradient(0), 0.5), run.moments
    assert torch.equal(run.step(gradient(1), 0.0), before)
    assert all(torch.equal(run.moments[key], moment) for key, moment in moments.items())


@pytest.mark.parametrize("name", MOMENTUM)
def test_settings_and_gradients_are_left_as_they_are(name: str) -> None:
    run, grad = Run(MOMENTUM[name]), gradient(0)
    before = copy.deepcopy(run.steps.optimizer.param_groups[0])
    run.step(grad, 0.25)
    after = run.steps.optimizer.param_groups[0]
    assert {k: v for k, v in after.items() if k != "params"} == {
        k: v for k, v in before.items() if k != "params"
    }
    assert torch.equal(grad, gradient(0)), "replica holders read it too"


class OwnSgd(torch.optim.SGD):
    """A subclass, which may do anything in its step."""


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.NAdam(p, lr=LR),
        lambda p: torch.optim.RMSprop(p, lr=LR, momentum=B),
        lambda p: OwnSgd(p, lr=LR, momentum=B),
        lambda p: torch.optim.SGD(p, lr=LR),
    ],
    ids=["nadam", "rmsprop", "subclass", "without momentum"],
)
def test_optimizers_without_a_known_momentum_do_their_own_steps(make: Make) -> None:
    mine, torchs = Run(make), Run(make, "none")
    for step in range(3):
        expected = torchs.step(gradient(step), 0.25)
        torch.testing.assert_close(mine.step(gradient(step), 0.25), expected)


def test_the_rule_none_is_the_optimizers_own_step() -> None:
    assert type(Run(MOMENTUM["sgd"], "none").steps) is Steps


def test_geometric_sums() -> None:
    assert geometric(0.5, 3) == pytest.approx(1 + 0.5 + 0.25)
    assert geometric(1.0, 3) == 3
    assert geometric(0.0, 2) == 1
