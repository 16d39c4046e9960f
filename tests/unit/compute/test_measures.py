"""Logged values are weighted like the loss, in steps and in evaluations."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from manyhands.compute.evaluation import EvalSamples, evaluate
from manyhands.compute.feed import Share
from manyhands.compute.gradients import gradients, rehearse
from manyhands.compute.measures import declared_by
from manyhands.compute.train_state import TrainState
from manyhands.contract import StepReport
from manyhands.control.messages import StepRow
from manyhands.coordinator.progress import StepPlan, StepProgress
from manyhands.errors import JobError
from manyhands.events.events import StepCommitted
from manyhands.events.tensorboard import step_scalars
from manyhands.measure import Measure, combine, register, registered
from manyhands.worker.reporter import _read_measures


def logging(make_job: Any, *, name: Any = "inputs", value: Any = None, **fields: Any) -> Any:
    def loss(self: Any, output: Any, batch: Any) -> Any:
        self.log(name, batch[0].mean() if value is None else value)
        return nn.functional.mse_loss(output, batch[1])

    return make_job(loss=loss, **fields)


def batch(number: float, samples: int) -> Any:
    return torch.full((samples, 4), number), torch.ones(samples, 2)


def trained(job: Any, *batches: Any, part: int = 0) -> StepReport:
    train_state = TrainState.of(job, device="cpu", num_steps=10)
    pairs = [(each, len(each[0])) for each in batches]
    samples = sum(number for _, number in pairs)
    weight, loss = gradients(train_state, Share(1, 0, samples, samples, pairs, part))
    return StepReport(1, samples, weight, loss, 0.1, part=part, logged=train_state.measures.take())


def test_a_mean_over_micro_batches_and_workers(make_job: Any) -> None:
    job = logging(make_job)
    reports = [
        trained(job, batch(1.0, 3), batch(2.0, 1)),
        trained(job, batch(5.0, 4), part=1),
        trained(job, (torch.ones(2, 4), torch.ones(2, 2)), part=2),
    ]
    sums = _read_measures(reports)
    assert sums[0] == {"inputs": (5.0, 4.0)}
    gathering = StepProgress()
    plan = StepPlan(1, 0, ((0, 10),))
    workers = {0: "a", 1: "b", 2: "c"}
    gathering.expect(plan, {0: [(0, 4)], 1: [(4, 8)], 2: [(8, 10)]}, workers)
    for report, measures in zip(reports, sums, strict=True):
        head = (1, float(report.weight), 0.0, 0.1, 0.1, 0.1, 0.0, 0)
        gathering.add(workers[report.part], StepRow(*head, part=report.part, measures=measures))
    (step,) = gathering.committed()
    assert step.event.measures == {"inputs": pytest.approx((3 * 1 + 2 + 4 * 5 + 2 * 1) / 10)}


def test_the_jobs_own_weights_count(make_job: Any) -> None:
    job = logging(make_job, weight=lambda self, batch: batch[0].sum())
    (sums,) = _read_measures([trained(job, batch(1.0, 3), batch(2.0, 1))])
    assert combine([sums], {}) == {"inputs": pytest.approx((12 * 1 + 8 * 2) / 20)}


def test_logged_values_are_metrics_of_an_evaluation(make_job: Any) -> None:
    job = logging(make_job, batch_size=4, metrics=lambda self, output, batch: {"one": 1.0})
    inputs = torch.arange(6.0).unsqueeze(1).expand(-1, 4)
    data = torch.utils.data.TensorDataset(inputs, torch.ones(6, 2))
    found = evaluate(job, nn.Linear(4, 2), EvalSamples(data), device="cpu")
    assert list(found["sums"]) == ["loss", "one", "inputs"]
    assert combine([found["sums"]], {})["inputs"] == pytest.approx(2.5)
    same = logging(
        make_job, name="one", value=7.0, metrics=lambda self, output, batch: {"one": 1.0}
    )
    found = evaluate(same, nn.Linear(4, 2), EvalSamples(data), device="cpu")
    assert combine([found["sums"]], {})["one"] == 1.0


def test_log_does_nothing_outside_of_training(make_job: Any) -> None:
    job = logging(make_job, name=None, value="nonsense")
    assert job.loss(torch.ones(3, 2), batch(1.0, 3)).item() == 0.0


def test_a_logged_parameter_keeps_its_value(make_job: Any) -> None:
    scale = nn.Parameter(torch.tensor(3.0))
    report = trained(logging(make_job, value=scale), batch(1.0, 2))
    with torch.no_grad():
        scale.mul_(2)
    assert _read_measures([report]) == [{"inputs": (6.0, 2.0)}]


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("loss", 1.0, "a step has its own 'loss'. Choose another name, such as \"my_loss\""),
        (3, 1.0, r"self.log\(3, ...\): the name is a string"),
        (
            "norms",
            torch.ones(3),
            r"a scalar tensor, the mean over the batch; it is Tensor of shape \(3,",
        ),
        ("norms", "large", "it is str"),
        ("norms", [1.0], "it is list"),
    ],
)
def test_mistakes_are_found_before_training(
    make_job: Any, name: Any, value: Any, says: str
) -> None:
    job = logging(make_job, name=name, value=value)
    train_state = TrainState.of(job, device="cpu", num_steps=10)
    with pytest.raises(JobError, match=says):
        rehearse(train_state, Share(0, 0, 2, 2, [(batch(1.0, 2), 2)], 0))


def test_measures_are_on_tensorboard() -> None:
    event = StepCommitted(
        step=1, epoch=0, samples=4, shares={}, loss=1.0, lr=0.1, step_s=0.1, compute_s=None, wait_s=None,
        bytes_sent=0, measures={"penalty": 0.25},
    )  # fmt: skip
    assert step_scalars(event)["train/penalty"] == 0.25


TOKENS = Measure("tokens", unit="tokens", rule="sum")
LONGEST = Measure("longest", unit="tokens", rule="max")
SHOWN = Measure("shown", rule="last")


def counting(make_job: Any, **fields: Any) -> Any:
    """A job that logs the first input of a batch by three rules, and its number of samples."""

    def loss(self: Any, output: Any, batch: Any) -> Any:
        first = batch[0][0, 0]
        self.log("tokens", len(batch[0]))
        self.log("longest", first)
        self.log("shown", first)
        self.log("plain", first)
        return nn.functional.mse_loss(output, batch[1])

    measures = lambda self: [TOKENS, LONGEST, SHOWN]  # noqa: E731
    return make_job(loss=loss, measures=measures, **fields)


def test_declared_rules_hold_over_micro_batches_and_workers(make_job: Any) -> None:
    job = counting(make_job)
    parts = [
        trained(job, batch(1.0, 3), batch(2.0, 1)),
        trained(job, batch(5.0, 2), batch(4.0, 2), part=1),
    ]
    first, second = _read_measures(parts)
    assert first == {
        "tokens": (4.0, 4.0),
        "longest": (2.0, 4.0),
        "shown": (2.0, 4.0),
        "plain": (5.0, 4.0),
    }
    values = combine([first, second], declared_by(job))
    assert values == {"tokens": 8.0, "longest": 5.0, "shown": 4.0, "plain": (3 + 2 + 10 + 8) / 8}


def test_declared_rules_hold_in_an_evaluation(make_job: Any) -> None:
    job = counting(make_job, batch_size=4)
    inputs = torch.arange(6.0).unsqueeze(1).expand(-1, 4)
    data = torch.utils.data.TensorDataset(inputs, torch.ones(6, 2))
    parts = [
        evaluate(job, nn.Linear(4, 2), EvalSamples(data), part=part, device="cpu")["sums"]
        for part in ((0, 2, 3), (2, 3, 3))
    ]
    values = combine(parts, declared_by(job))
    assert (values["tokens"], values["longest"], values["shown"]) == (6.0, 4.0, 4.0)


@pytest.fixture
def nothing_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("manyhands.measure._registered", {})


def test_a_learner_adds_registered_measures(nothing_registered: None) -> None:
    name = "distance"
    distance = register(Measure(name, rule="max", help="from the mean"))
    assert registered() == {name: distance}
    assert register(Measure(name, rule="max", help="from the mean")) == distance
    with pytest.raises(ValueError, match="there is another measure"):
        register(Measure(name))
    with pytest.raises(ValueError, match="there is another measure"):
        register(Measure("loss", rule="sum"))
    reports = [StepReport(1, 4, 4.0, 0.0, 0.1) for _ in range(3)]
    reports[0].measures[name] = 2.0
    reports[2].measures[name] = torch.tensor(3.0)
    assert _read_measures(reports) == [{name: (2.0, 1.0)}, {}, {name: (3.0, 1.0)}]


@pytest.mark.parametrize(
    ("measures", "says"),
    [
        (["tokens"], r"measures\(\) must return a list such as \[mh.Measure\("),
        (None, "and returned None"),
        ([Measure("lr")], "a step has its own 'lr'"),
        ([Measure("")], "the name is a string"),
        ([TOKENS, Measure("tokens")], "two different measures 'tokens'"),
    ],
)
def test_a_wrong_declaration_is_refused(make_job: Any, measures: Any, says: str) -> None:
    job = make_job(measures=lambda self: measures)
    with pytest.raises(JobError, match=says):
        TrainState.of(job, device="cpu", num_steps=10)


def test_a_job_cannot_declare_a_measure_of_manyhands(
    make_job: Any, nothing_registered: None
) -> None:
    register(Measure("distance"))
    job = make_job(measures=lambda self: [Measure("distance", rule="sum")])
    with pytest.raises(JobError, match='Choose another name, such as "my_distance"'):
        TrainState.of(job, device="cpu", num_steps=10)
