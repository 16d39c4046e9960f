"""Evaluation: the parts of any number of workers add up to the mean over all samples."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from manyhands.compute.evaluation import EvalSamples, evaluate, forwards_each
from manyhands.compute.measures import declared_by
from manyhands.control.messages import EvaluationReport
from manyhands.coordinator.progress import evaluation_of
from manyhands.errors import JobError
from manyhands.transport.fields import read

INPUTS = torch.arange(28.0).reshape(7, 4)
DATA = torch.utils.data.TensorDataset(INPUTS, INPUTS[:, :2] + 1)


def whole(job: Any, model: nn.Module, world: int = 1, data: Any = DATA) -> Any:
    samples = EvalSamples.of(job, data)
    shares = [(r, r + 1, world) for r in range(world)]
    found = [evaluate(job, model, samples, part=share, device="cpu") for share in shares]
    parts = [read(EvaluationReport, {"view": 1, "seconds": 0.0, **each}) for each in found]
    return evaluation_of(parts, declared_by(job))


def mean_error(self: Any, output: Any, batch: Any) -> dict[str, Any]:
    return {"error": (output - batch[1]).abs().mean(), "samples_squared": len(batch[0])}


@pytest.mark.parametrize("world", [1, 2, 3, 7, 9])
@pytest.mark.parametrize("batch_size", [1, 2, 7, 50])
def test_the_mean_is_over_all_samples(make_job: Any, world: int, batch_size: int) -> None:
    job = make_job(batch_size=batch_size, metrics=mean_error)
    model = nn.Linear(4, 2)
    samples, metrics = whole(job, model, world)
    with torch.no_grad():
        output = model(INPUTS)
    assert samples == 7
    assert metrics["loss"] == pytest.approx(float(nn.functional.mse_loss(output, DATA.tensors[1])))
    assert metrics["error"] == pytest.approx(float((output - DATA.tensors[1]).abs().mean()))


def test_a_jobs_own_weights_count(make_job: Any) -> None:
    job = make_job(
        batch_size=1,
        weight=lambda self, batch: batch[0][0, 0],
        loss=lambda self, output, batch: batch[0][0, 0] + 0 * output.sum(),
    )
    _, metrics = whole(job, nn.Linear(4, 2), world=2)
    weights = INPUTS[:, 0]
    assert metrics["loss"] == pytest.approx(float((weights * weights).sum() / weights.sum()))


@pytest.mark.parametrize("world", [1, 2, 3, 9])
@pytest.mark.parametrize("batch_size", [1, 2, 7])
def test_all_parts_can_have_the_same_number_of_forwards(
    make_job: Any, world: int, batch_size: int
) -> None:
    job = make_job(batch_size=batch_size, metrics=mean_error)
    model, samples = nn.Linear(4, 2), EvalSamples.of(job, DATA)
    calls: list[int] = []
    model.register_forward_hook(lambda module, inputs, output: calls.append(len(output)))
    wanted = forwards_each(job, samples, parts=world)
    for rank in range(world):
        part, ticks = (rank, rank + 1, world), []
        plain = evaluate(job, model, samples, part=part, device="cpu")
        calls.clear()
        found = evaluate(
            *(job, model, samples),
            part=part,
            num_forwards=wanted,
            device="cpu",
            progress=lambda: ticks.append(1),  # noqa: B023
        )
        assert found == plain, "what is missing does not count"
        assert len(calls) == len(ticks) == wanted


def test_evaluation_changes_neither_weights_nor_modes(make_job: Any) -> None:
    model = nn.Sequential(nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 2))
    model[0].eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    job = make_job()
    first, second = whole(job, model), whole(job, model)
    assert first == second
    assert [m.training for m in model] == [False, True, True]
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize(
    ("method", "answer", "says"),
    [
        ("metrics", None, r"Mine.metrics\(\) must return a dict of name to number; .* None"),
        ("metrics", 0.5, r"Mine.metrics\(\) must return a dict of name to number; .* float"),
        ("metrics", {"top": [1, 2]}, r"Mine.metrics\(\) must return a number .* 'top'; .* list"),
        ("metrics", {"top": torch.ones(2)}, r"'top'; it returned Tensor of shape \(2,\)"),
        ("metrics", {"top": "high"}, r"'top'; it returned str"),
        ("loss", torch.ones(2), r"Mine.loss\(\) must return a scalar tensor"),
        ("weight", "many", r"weight\(\) must return a number for each batch; it returned str"),
        ("weight", torch.ones(2), r"weight\(\) must .*; it returned Tensor of shape \(2,\)"),
    ],
)
def test_the_wrong_thing(make_job: Any, method: str, answer: Any, says: str) -> None:
    model = nn.Linear(4, 2)
    with pytest.raises(JobError, match=says):
        whole(make_job(**{method: lambda self, *_: answer}), model)
    assert model.training


@pytest.mark.parametrize("number", [1, 0.25, np.float32(0.25), np.int64(3), torch.tensor(0.5)])
def test_any_number_is_a_metric_and_a_weight(make_job: Any, number: Any) -> None:
    job = make_job(metrics=lambda self, *_: {"it": number}, weight=lambda self, _: number)
    _, metrics = whole(job, nn.Linear(4, 2), world=2)
    assert metrics["it"] == pytest.approx(float(number))


@pytest.mark.parametrize("world", [1, 2, 5])
def test_a_few_samples_are_the_same_everywhere(make_job: Any, world: int) -> None:
    """Chosen by the seed, whatever is evaluated by whom."""
    model = nn.Linear(4, 2)
    job = make_job(batch_size=2, eval_samples=4, seed=7, metrics=mean_error)
    chosen = EvalSamples.of(job, DATA).indices(0, 4)
    assert len(set(chosen.tolist())) == 4
    samples, metrics = whole(job, model, world)
    with torch.no_grad():
        error = (model(INPUTS[chosen]) - DATA.tensors[1][chosen]).abs().mean()
    assert samples == 4
    assert metrics["error"] == pytest.approx(float(error))
    assert torch.equal(EvalSamples.of(job, DATA).indices(0, 4), chosen)
    others = [EvalSamples.of(make_job(eval_samples=4, seed=n), DATA) for n in range(8)]
    assert len({tuple(other.indices(0, 4).tolist()) for other in others}) > 1


def test_all_samples_may_be_named_and_no_more(make_job: Any) -> None:
    model = nn.Linear(4, 2)
    assert whole(make_job(eval_samples=7), model) == whole(make_job(), model)
    with pytest.raises(JobError, match=r"eval_samples is 8, and the evaluation data has 7 samples"):
        whole(make_job(eval_samples=8), model)
