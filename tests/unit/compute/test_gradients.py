"""One worker's part of a step: however it is divided, the gradient is that of the global mean."""

from __future__ import annotations

from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from manyhands.compute.feed import Feed, Share
from manyhands.compute.gradients import gradients
from manyhands.compute.train_state import TrainState
from manyhands.contract import StepReport
from manyhands.control.messages import Portion
from manyhands.errors import JobError

SAMPLES = 13


def data() -> torch.utils.data.TensorDataset:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(SAMPLES, 4, generator=generator)
    weights = torch.randint(1, 9, (SAMPLES,), generator=generator).float()
    return torch.utils.data.TensorDataset(inputs, torch.sin(inputs[:, :2]), weights)


def weighted_loss(self: Any, output: Tensor, batch: Any) -> Tensor:
    errors = ((output - batch[1]) ** 2).mean(dim=1)
    return (errors * batch[2]).sum() / batch[2].sum()


def weight_of(self: Any, batch: Any) -> Tensor:
    return batch[2].sum()


def parts_of(job: Any, cuts: list[int], *, uniform: bool = False) -> list[tuple[TrainState, Share]]:
    """Each worker's own copy of the model, with its share of one global step of all samples."""
    edges = [0, *cuts, SAMPLES]
    parts = []
    for low, high in pairwise(edges):
        ranges = ((low, high),) if high > low else ()
        feed = Feed(job, data(), device="cpu", uniform=uniform)
        share = feed.share(Portion(1, 0, SAMPLES, ranges))
        parts.append((TrainState.of(job, device="cpu", num_steps=1), share))
    return parts


def added_up(
    parts: list[tuple[TrainState, Share]], **how: Any
) -> tuple[list[Tensor], float, float]:
    """The sum of the workers' gradients, weights and losses."""
    weight = loss = 0.0
    for train_state, share in parts:
        mine, part = gradients(train_state, share, **how)
        weight, loss = weight + float(mine), loss + float(part)
    models = [list(train_state.model.parameters()) for train_state, _ in parts]
    grads = [torch.stack([p.grad for p in same]).sum(0) for same in zip(*models, strict=True)]
    return grads, weight, loss


def reference(job: Any) -> tuple[list[Tensor], float]:
    """One backward over the whole batch, by torch alone."""
    train_state = TrainState.of(job, device="cpu", num_steps=1)
    batch = data().tensors
    loss = job.loss(train_state.model(batch[0]), batch)
    loss.backward()
    return [p.grad for p in train_state.model.parameters()], loss.item()


def model(self: Any) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2))


@pytest.mark.parametrize("cuts", [[], [6], [1, 2], [0, 13], [13], [4, 4, 9]], ids=str)
@pytest.mark.parametrize("accumulate", [1, 2, 5, 50])
@pytest.mark.parametrize("own_weights", [False, True])
def test_unequal_parts_give_the_gradient_of_the_whole(
    make_job: Any, cuts: list[int], accumulate: int, own_weights: bool
) -> None:
    extra = {"loss": weighted_loss, "weight": weight_of} if own_weights else {}
    job = make_job(model=model, accumulate=accumulate, **extra)
    total = float(data().tensors[2].sum())
    how = {"total": lambda mine: torch.tensor(total)} if own_weights else {}
    grads, weight, loss = added_up(parts_of(job, cuts), **how)
    expected, mean = reference(job)
    for ours, theirs in zip(grads, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-7)
    assert weight == pytest.approx(total if own_weights else SAMPLES)
    assert loss / weight == pytest.approx(mean, rel=1e-5)


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("own_weights", [False, True])
def test_the_mean_of_a_share_is_that_of_its_samples_alone(
    make_job: Any, accumulate: int, own_weights: bool
) -> None:
    extra = {"loss": weighted_loss, "weight": weight_of} if own_weights else {}
    job = make_job(model=model, accumulate=accumulate, **extra)

    def never(mine: Any) -> Any:
        raise AssertionError("no worker needs another's weight for the mean of its own share")

    for train_state, share in parts_of(job, [5]):
        weight, _ = gradients(train_state, share, mean_of="share", total=never)
        alone = TrainState.of(job, device="cpu", num_steps=1)
        batch = [torch.cat(parts) for parts in zip(*(b for b, _ in share.batches), strict=True)]
        job.loss(alone.model(batch[0]), batch).backward()
        for ours, theirs in zip(
            train_state.model.parameters(), alone.model.parameters(), strict=True
        ):
            torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-5, atol=1e-7)
        assert float(weight) == (float(batch[2].sum()) if own_weights else share.samples)


def test_every_micro_batch_but_the_last_is_local(make_job: Any) -> None:
    entered = []

    @contextmanager
    def local() -> Any:
        entered.append("in")
        yield

    ((train_state, share),) = parts_of(make_job(model=model, accumulate=4), [])
    assert len(share.batches) == 4
    gradients(train_state, share, local=local)
    assert entered == ["in"] * 3


@pytest.mark.parametrize("uniform", [False, True])
def test_an_empty_share_gives_zero_gradients(make_job: Any, uniform: bool) -> None:
    def normed(self: Any) -> nn.Module:
        net = nn.Sequential(nn.BatchNorm1d(4), nn.BatchNorm1d(4), nn.Dropout(), nn.Linear(4, 2))
        net[1].eval()
        return net

    ((train_state, share), _) = parts_of(make_job(model=normed), [0], uniform=uniform)
    before = {name: value.clone() for name, value in train_state.model.state_dict().items()}
    weight, loss = gradients(train_state, share)
    assert (weight, float(loss), share.samples) == (0.0, 0.0, 0)
    assert all(p.grad is not None and not p.grad.any() for p in train_state.model.parameters())
    after = train_state.model.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)
    # Each part of the model is in the mode it was in: the second one was frozen by the job.
    assert [module.training for module in train_state.model] == [True, False, True, True]


@pytest.mark.parametrize("cuts", [[], [1], [0, 2, 3]], ids=str)
def test_uniform_shares_give_the_same_gradients_in_equally_many_forwards(
    make_job: Any, cuts: list[int]
) -> None:
    def noisy(self: Any) -> nn.Module:
        return nn.Sequential(model(self), nn.Dropout(0.5))

    job = make_job(model=noisy, accumulate=3)
    expected, weight, loss = added_up(parts_of(job, cuts))
    parts = parts_of(job, cuts, uniform=True)
    calls: list[bool] = []
    for train_state, _ in parts:
        net = train_state.model
        net.register_forward_hook(lambda module, inputs, output: calls.append(module.training))
    found = added_up(parts)
    assert found[1:] == (weight, loss)
    for ours, theirs in zip(found[0], expected, strict=True):
        assert torch.equal(ours, theirs), "padding draws no random numbers either"
    assert len(calls) == 3 * len(parts)
    assert sum(calls) == sum(bool(n) for _, share in parts for _, n in share.batches)


def test_a_loss_of_nothing_is_no_gradient_in_a_uniform_share(make_job: Any) -> None:
    """The mean loss over no tokens is NaN, and so is its gradient."""
    logged = []

    def of_nothing(self: Any, output: Any, batch: Any) -> Tensor:
        self.log("seen", 1.0)
        logged.append(1)
        return (output["out"].square() * 0).sum() / torch.zeros(())

    class Net(nn.Sequential):
        def forward(self, inputs: Tensor) -> Any:
            return {"out": super().forward(inputs), "number": 3}

    job = make_job(
        model=lambda self: Net(nn.Linear(4, 2)), loss=of_nothing, weight=lambda self, batch: 0.0
    )
    ((train_state, share),) = parts_of(job, [], uniform=True)
    gradients(train_state, share, total=lambda mine: 5.0)
    assert logged
    assert train_state.measures.take() == []
    for parameter in train_state.model.parameters():
        assert parameter.grad is not None
        assert not parameter.grad.any()


def test_with_own_weights_an_empty_share_joins_the_sum(make_job: Any) -> None:
    """The sum is a collective: a worker that skipped it would leave its peers waiting."""
    asked = []
    ((train_state, share), _) = parts_of(make_job(loss=weighted_loss, weight=weight_of), [0])
    weight, _ = gradients(train_state, share, total=lambda mine: asked.append(float(mine)) or 9.0)
    assert (weight, asked) == (0.0, [0.0])


@pytest.mark.parametrize("answer", [None, "many", torch.ones(3), [1.0]])
def test_the_wrong_weight(make_job: Any, answer: Any) -> None:
    ((train_state, share),) = parts_of(make_job(weight=lambda self, batch: answer), [])
    with pytest.raises(JobError, match=r"weight\(\) must return a number for each batch; it ret"):
        gradients(train_state, share)


def test_the_mean_loss_of_a_report() -> None:
    assert StepReport(1, 4, 4.0, torch.tensor(6.0), 0.1).mean_loss == 1.5
    assert StepReport(1, 0, 0.0, torch.tensor(0.0), 0.1).mean_loss == 0.0
