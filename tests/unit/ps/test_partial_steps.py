"""Steps with parts of a batch: the laws that they keep, against plain formulas and torch's own steps."""

from __future__ import annotations

import copy
import math
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
from manyhands.ps.partial_steps import SHARE, Steps, steps_of

LR, B = 0.1, 0.9
SIZE = 6
NOTHING = torch.zeros(SIZE, dtype=torch.float64)

Make = Callable[[list[nn.Parameter]], Optimizer]
MOMENTUM: dict[str, Make] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=LR, momentum=B),
    "nesterov": lambda p: torch.optim.SGD(p, lr=LR, momentum=B, nesterov=True),
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


@pytest.mark.parametrize(("n", "batches"), [(1, 1.9), (4, 1.8), (64, 1.7)])
def test_the_weights_are_those_that_momentum_alone_will_reach(n: int, batches: float) -> None:
    """A twin without look-ahead gets the same gradients, and then none: it passes where the other is."""
    f = 1 / n
    ahead, momentum, place = Run(MOMENTUM["sgd"]), NOTHING, weights().detach().clone()
    for step in range(10):
        seen = ahead.step(gradient(step), f)
        momentum = B**f * momentum + (1 - B**f) / (1 - B) * gradient(step)
        place = place - LR * f * momentum
    kept = SHARE * B**f / (1 - B + SHARE * B**f)
    assert math.log(kept, B) == pytest.approx(batches, abs=0.06), "kept is what momentum is by then"
    # The sum of the pushes until then, which need not be a whole number of them.
    torch.testing.assert_close(seen, place - LR * f * B**f * (1 - kept) / (1 - B**f) * momentum)


def test_whole_batches_with_all_of_momentum_are_nesterovs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partial_steps, "SHARE", 1.0)
    mine, torchs = Run(MOMENTUM["sgd"]), Run(MOMENTUM["nesterov"], "none")
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
        return torch.optim.SGD(params, lr=LR, momentum=B, weight_decay=0.5, maximize=True)

    mine, plain = Run(make), Run(MOMENTUM["sgd"])
    for step in range(4):
        expected = plain.step(0.5 * plain.parameter.detach() - gradient(step), 0.25)
        torch.testing.assert_close(mine.step(gradient(step), 0.25), expected)


@pytest.mark.parametrize("name", ["adam", "amsgrad"])
def test_adam_looks_ahead_by_the_mean_and_goes_by_the_root_of_the_part(name: str) -> None:
    run, f, b2 = Run(MOMENTUM[name]), 0.25, 0.99
    kept = SHARE * B**f / (1 - B + SHARE * B**f)
    mean = square = largest = np.zeros(SIZE)
    expected = weights().detach().numpy()
    for step in range(1, 6):
        grad = gradient(step).numpy()
        mean = B**f * mean + (1 - B**f) * grad
        square = b2**f * square + (1 - b2**f) * grad**2
        largest = np.maximum(largest, square) if name == "amsgrad" else square
        size = np.sqrt(largest / (1 - b2 ** (f * step))) + 1e-8
        ahead = kept * mean / (1 - B ** (f * step)) + (1 - kept) * grad
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
        lambda p: torch.optim.SGD(p, lr=LR, momentum=B, dampening=0.25),
        lambda p: torch.optim.SGD(p, lr=LR, momentum=1.0),
    ],
    ids=["nadam", "rmsprop", "subclass", "without momentum", "dampened", "without friction"],
)
def test_optimizers_without_a_known_momentum_do_their_own_steps(make: Make) -> None:
    mine, torchs = Run(make), Run(make, "none")
    for step in range(3):
        expected = torchs.step(gradient(step), 0.25)
        torch.testing.assert_close(mine.step(gradient(step), 0.25), expected)


def test_the_rule_none_is_the_optimizers_own_step() -> None:
    assert type(Run(MOMENTUM["sgd"], "none").steps) is Steps


@pytest.mark.parametrize("name", MOMENTUM)
def test_the_state_of_a_checkpoint_is_that_of_the_optimizer_itself(name: str) -> None:
    """After whole batches, momentum is what torch's own steps make it, and it is read back bit by bit."""
    mine, torchs = Run(MOMENTUM[name]), Run(MOMENTUM[name], "none")
    for step in range(3):
        mine.step(gradient(step))
        torchs.step(gradient(step))
    (group,) = mine.steps.optimizer.param_groups
    held = mine.steps.optimizer.state[mine.parameter]
    exported = mine.steps.exported(held, group)
    for key, moment in torchs.moments.items():
        torch.testing.assert_close(exported[key], moment)
    for key, value in mine.steps.imported(exported, group).items():
        assert torch.equal(value, held[key]), key
