"""Results of a job's methods are checked, and errors name the method."""

from __future__ import annotations

import random
from collections import namedtuple
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_driver import drive
from torch import nn
from torch.optim import lr_scheduler

from manyhands.compute.param_groups import describe_optimizer
from manyhands.compute.train_state import TrainState, call, evaluating, job_loss, to_device
from manyhands.coordinator.batch_scaling import Scaling
from manyhands.coordinator.plan import PlanConfig, TrainingPlan
from manyhands.errors import JobError

BATCH = (torch.ones(3, 4), torch.ones(3, 2))


def train_state(job: Any) -> TrainState:
    return TrainState.of(job, device="cpu", num_steps=10)


@pytest.mark.parametrize(
    ("method", "answer", "says"),
    [
        ("model", None, r"Mine.model\(\) must return a torch.nn.Module; it returned None"),
        ("model", nn.Linear, r"Mine.model\(\) must return a torch.nn.Module; it returned type"),
        ("model", torch.ones(3), r"it returned Tensor of shape \(3,\)"),
        ("model", nn.ReLU(), "model of Mine has no parameter to train"),
        ("optimizer", None, r"Mine.optimizer\(\) must return a torch.optim.Optimizer; .* None"),
        ("optimizer", torch.optim.SGD, r"Mine.optimizer\(\) must return .*; it returned type"),
        ("schedule", 0.1, r"Mine.schedule\(\) must return a torch LRScheduler, or None; .* float"),
    ],
)
def test_the_wrong_thing(make_job: Any, method: str, answer: Any, says: str) -> None:
    with pytest.raises(JobError, match=says):
        train_state(make_job(**{method: lambda self, *_: answer}))


def test_a_frozen_model_has_nothing_to_train(make_job: Any) -> None:
    job = make_job(model=lambda self: nn.Linear(4, 2).requires_grad_(False))
    with pytest.raises(JobError, match="no parameter to train"):
        train_state(job)


def test_a_plateau_schedule_is_refused(make_job: Any) -> None:
    job = make_job(schedule=lambda self, optimizer, _: lr_scheduler.ReduceLROnPlateau(optimizer))
    with pytest.raises(JobError, match=r'ReduceLROnPlateau, .* plateau: str = "factor=0.1'):
        train_state(job)


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (lambda output: None, "it returned None .is a return missing"),
        (lambda output: 3.5, "a scalar tensor, the mean over the batch; it returned float"),
        (lambda output: output.mean(dim=1), r"it returned Tensor of shape \(3,\)"),
        (lambda output: output.argmax(-1).float().mean(), "does not depend on any parameter"),
        (lambda output: output.detach().mean(), "does not depend on any parameter"),
    ],
)
def test_the_wrong_loss(make_job: Any, answer: Any, says: str) -> None:
    job = make_job(loss=lambda self, output, batch: answer(output))
    built = train_state(job)
    with pytest.raises(JobError, match=says) as caught:
        built.loss(built.model, BATCH)
    assert "Mine.loss()" in str(caught.value)


def test_without_gradients_a_loss_may_be_a_constant(make_job: Any) -> None:
    job = make_job(loss=lambda self, output, batch: output.argmax(-1).float().mean())
    with torch.no_grad():
        loss, _ = job_loss(job, nn.Linear(4, 2), BATCH)
    assert loss.dim() == 0


def test_a_model_depends_only_on_its_seed(make_job: Any) -> None:
    first = train_state(make_job(seed=3)).model.state_dict()
    torch.rand(5)
    again, other = train_state(make_job(seed=3)).model, train_state(make_job(seed=4)).model
    assert all(torch.equal(first[name], value) for name, value in again.state_dict().items())
    assert not torch.equal(first["weight"], other.state_dict()["weight"])


def test_the_optimizer_gets_the_trainable_parameters(make_job: Any) -> None:
    def model(self: Any) -> nn.Module:
        net = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
        net[0].requires_grad_(False)
        return net

    built = train_state(make_job(model=model))
    (group,) = built.optimizer.param_groups
    assert [tuple(p.shape) for p in group["params"]] == [(2, 3), (2,)]


def elsewhere(self: Any, params: Any) -> Any:
    return torch.optim.SGD(self.model().parameters(), lr=0.1)


def too_few(self: Any, params: Any) -> Any:
    return torch.optim.SGD([p for p in params if p.dim() > 1], lr=0.1)


def one_more(self: Any, params: Any) -> Any:
    return torch.optim.SGD([*params, nn.Parameter(torch.ones(7))], lr=0.1)


@pytest.mark.parametrize(
    ("optimizer", "says"),
    [
        (
            elsewhere,
            r"Mine.optimizer\(\) has 2 parameters of shape \(2, 4\), \(2,\) that the model does not have and "
            r"none of the model's, .*def optimizer\(self, params\): return torch.optim.SGD\(params",
        ),
        (
            one_more,
            r"1 parameter of shape \(7,\) that the model does not have, which would train n",
        ),
        (
            too_few,
            r"Mine.optimizer\(\) leaves out 1 parameter of the model \(bias\), .* into a group.*"
            r"parameter.requires_grad_\(False\)",
        ),
    ],
)
def test_an_optimizer_that_does_not_train_the_model(
    make_job: Any, optimizer: Any, says: str
) -> None:
    with pytest.raises(JobError, match=says):
        train_state(make_job(optimizer=optimizer))


def test_groups_by_name(make_job: Any) -> None:
    def optimizer(self: Any, params: Any, net: nn.Module) -> Any:
        decayed, plain = net[1].weight, [net[1].bias, net[0].weight]  # type: ignore[index]
        assert {id(p) for p in params} == {id(p) for p in net[1].parameters()}  # type: ignore[index]
        groups = [{"params": [decayed], "weight_decay": 0.1}, {"params": plain, "lr": 0.3}]
        return torch.optim.SGD(groups, lr=0.1, momentum=0.9)

    def model(self: Any) -> nn.Module:
        net = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
        net[0].requires_grad_(False)
        return net

    built = train_state(make_job(model=model, optimizer=optimizer))
    assert describe_optimizer(built.model, built.optimizer) == [
        ("optimizer", "SGD, 2 groups"),
        ("group 1", "1 tensor, 6 numbers: lr 0.1, momentum 0.9, weight_decay 0.1 (1.weight)"),
        (
            "group 2",
            "2 tensors, 14 numbers: lr 0.3, momentum 0.9, weight_decay 0 (1.bias, 0.weight)",
        ),
        ("frozen", "2 tensors, 15 numbers (0.weight, 0.bias)"),
    ]
    plain = train_state(make_job())
    assert describe_optimizer(plain.model, plain.optimizer) == [
        ("optimizer", "SGD, 2 tensors, 10 numbers: lr 0.1")
    ]


def test_a_second_argument_with_a_default_is_not_the_model(make_job: Any) -> None:
    def optimizer(self: Any, params: Any, lr: float = 0.7) -> Any:
        return torch.optim.SGD(params, lr=lr)

    assert train_state(make_job(optimizer=optimizer)).lr == 0.7


def test_update_clips_and_steps_and_clears_gradients(make_job: Any) -> None:
    def schedule(self: Any, optimizer: Any, num_steps: int) -> Any:
        return lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)

    built = train_state(make_job(clip_norm=1.0, schedule=schedule))
    before = [p.detach().clone() for p in built.model.parameters()]
    for p in built.model.parameters():
        p.grad = torch.full_like(p, 100.0)
    built.update()
    moved = [b - p for b, p in zip(before, built.model.parameters(), strict=True)]
    assert torch.cat([m.flatten() for m in moved]).norm().item() == pytest.approx(0.1, rel=1e-4)
    assert built.lr == pytest.approx(0.05)
    assert all(p.grad is None for p in built.model.parameters())


@pytest.mark.parametrize("anneal", [lr_scheduler.StepLR, lr_scheduler.ExponentialLR])
def test_a_factor_applies_to_one_step_and_not_to_the_schedule(make_job: Any, anneal: Any) -> None:
    """Also for a schedule that computes the next learning rate from the last."""

    def schedule(self: Any, optimizer: Any, num_steps: int) -> Any:
        how = {"step_size": 1} if anneal is lr_scheduler.StepLR else {}
        return anneal(optimizer, gamma=0.5, **how)

    built = train_state(make_job(schedule=schedule))
    for factor, ticks, lr in [(1.0, 1, 0.1), (3.0, 1, 0.15), (2.0, 0, 0.05), (1.0, 2, 0.025)]:
        built.lr_factor, built.ticks = factor, ticks
        assert built.lr == pytest.approx(lr)
        assert built.base_lr == 0.1
        before = [p.detach().clone() for p in built.model.parameters()]
        for p in built.model.parameters():
            p.grad = torch.ones_like(p)
        built.update()
        for b, p in zip(before, built.model.parameters(), strict=True):
            torch.testing.assert_close(b - p, torch.full_like(p, lr))
    assert built.scheduler is not None
    assert built.scheduler.get_last_lr() == [pytest.approx(0.1 * 0.5**4)]


@settings(max_examples=25, deadline=None)
@given(
    worlds=st.dictionaries(st.integers(0, 30), st.integers(1, 5), max_size=4),
    rule=st.sampled_from(["linear", "sqrt"]),
    reference=st.integers(1, 3),
)
def test_one_cycle_ends_with_the_training_for_any_batch_size(
    worlds: dict[int, int], rule: str, reference: int
) -> None:
    plan_config = PlanConfig(23, 3, 2, has_eval=False, scaling=Scaling(rule, reference))
    weight = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.9)
    total = plan_config.num_steps
    one_cycle = lr_scheduler.OneCycleLR(optimizer, max_lr=1.0, total_steps=total)
    built = TrainState(nn.Linear(1, 1), optimizer, lambda model, batch: batch, scheduler=one_cycle)
    life = drive(TrainingPlan(plan_config), chance=random.Random(1), worlds=worlds)
    for plan in life.committed:
        built.lr_factor, built.ticks = plan.lr_factor, plan.ticks
        weight.grad = torch.ones(1)
        built.update()
        assert one_cycle.last_epoch <= total
    assert one_cycle.last_epoch == total


def test_a_model_is_called_with_its_inputs() -> None:
    class Named(nn.Module):
        def forward(self, a: int, b: int = 5) -> tuple[int, int]:
            return a, b

    assert call(Named(), {"b": 1, "a": 2}) == (2, 1)
    assert call(Named(), (2, 1)) == (2, 1)
    assert call(Named(), [7]) == (7, 5)
    assert call(Named(), 7) == (7, 5)


def test_a_nested_batch_keeps_its_shape() -> None:
    pair = namedtuple("pair", "x y")
    batch = {"a": [torch.ones(1), "text"], "b": pair(torch.zeros(2), (3, None))}
    moved = to_device(batch, "meta")
    assert moved["a"][0].device.type == "meta"
    assert moved["b"].x.device.type == "meta"
    assert isinstance(moved["b"], pair)
    assert (moved["a"][1], moved["b"].y) == ("text", (3, None))


def test_evaluating_restores_every_mode_even_after_an_error() -> None:
    """A part that the job froze in evaluation mode stays there."""
    model = nn.Sequential(nn.BatchNorm1d(2), nn.Dropout())
    model[0].eval()
    with pytest.raises(AssertionError, match="inside"), evaluating(model):
        assert any(module.training for module in model.modules()), "inside, none is training"
    assert [module.training for module in model.modules()] == [True, False, True]
