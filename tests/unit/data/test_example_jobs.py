"""The jobs in examples/: they load, their parts fit together, and the quick one learns."""

from __future__ import annotations

import pytest
import torch

from manyhands.job import load_job


@pytest.fixture
def little_data(tmp_path, small_mnist, monkeypatch):
    for name, content in small_mnist.items():
        (tmp_path / name).write_bytes(content)
    monkeypatch.setenv("MANYHANDS_DATA", str(tmp_path))


@pytest.mark.parametrize(
    ("reference", "name"),
    [
        ("digits.py", "Digits"),
        ("mnist.py", "Mnist"),
        ("mnist.py:Mnist", "Mnist"),
        ("mnist.py:MnistConv", "MnistConv"),
    ],
)
def test_the_methods_of_a_job_work_on_one_batch(reference, name, examples, little_data):
    job = load_job(str(examples / reference), {"hidden": "32"})
    assert type(job).__name__ == name
    assert job.monitor == "accuracy"
    torch.manual_seed(job.seed)
    model = job.model()
    optimizer = job.optimizer(model.parameters())
    schedule = job.schedule(optimizer, 3)
    batch = job.data().gather(torch.arange(16))
    losses = []
    for _ in range(3):
        loss = job.loss(model(job.inputs(batch)), batch)
        optimizer.zero_grad()
        loss.backward()
        assert all(parameter.grad is not None for parameter in model.parameters())
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    assert loss.shape == ()
    assert losses[2] < losses[0]
    assert schedule.get_last_lr()[0] == pytest.approx(0, abs=1e-12)
    batch = job.eval_data().gather(torch.arange(20))
    accuracy = job.metrics(model(job.inputs(batch)), batch)["accuracy"]
    assert accuracy.shape == ()
    assert accuracy.item() * 20 == pytest.approx(round(accuracy.item() * 20))


def test_digits_learns_as_its_docstring_says(examples):
    job = load_job(str(examples / "digits.py"))
    torch.manual_seed(job.seed)
    model, data, test = job.model(), job.data(), job.eval_data()
    optimizer = job.optimizer(model.parameters())
    num_steps = job.epochs * -(-len(data) // job.batch_size)
    schedule = job.schedule(optimizer, num_steps)
    for _ in range(job.epochs):
        for indices in torch.randperm(len(data)).split(job.batch_size):
            batch = data.gather(indices)
            optimizer.zero_grad()
            job.loss(model(job.inputs(batch)), batch).backward()
            optimizer.step()
            schedule.step()
    with torch.no_grad():
        accuracy = job.metrics(model(test.tensors[0]), test.tensors)["accuracy"].item()
    assert accuracy > 0.97
