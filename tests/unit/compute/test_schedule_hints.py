"""Schedules that expect one step per epoch give a hint; others give none."""

from __future__ import annotations

from typing import Any

import pytest
from torch.optim import lr_scheduler

from manyhands.compute.train_state import TrainState
from manyhands.errors import JobError

EPOCHS, STEPS = 90, 9_000


def notes(make_job: Any, schedule: Any, *, epochs: int = EPOCHS, steps: int = STEPS) -> list[str]:
    job = make_job(epochs=epochs, schedule=lambda self, o, n: schedule(o, n))
    return TrainState.of(job, device="cpu", num_steps=steps).notes


@pytest.mark.parametrize(
    ("schedule", "says"),
    [
        (
            lambda o, n: lr_scheduler.StepLR(o, 30),
            "StepLR(step_size=30) lowers the learning rate 300 times in 9,000 steps. For epochs, write  "
            "step_size=30 * num_steps // self.epochs. A schedule is stepped once per step, not once per ",
        ),
        (
            lambda o, n: lr_scheduler.MultiStepLR(o, [60, 30]),
            "MultiStepLR(milestones=[30, 60]) reaches the last one after 60 of 9,000 steps. For epochs, "
            "write  milestones=[m * num_steps // self.epochs for m in [30, 60]].",
        ),
        (
            lambda o, n: lr_scheduler.CosineAnnealingLR(o, 90),
            "CosineAnnealingLR(T_max=90) reaches its minimum after 90 of 9,000 steps, and rises "
            "again. Write  T_max=num_steps.",
        ),
        (
            lambda o, n: lr_scheduler.CosineAnnealingWarmRestarts(o, 10),
            "restarts after 10 of 9,000",
        ),
        (
            lambda o, n: lr_scheduler.ExponentialLR(o, 0.95),
            "ExponentialLR lowers the learning rate to 9.7e-08 within 270 of 9,000 steps. For epochs, "
            "make it a function of  step * self.epochs / num_steps  (ExponentialLR: gamma ** ",
        ),
        (
            lambda o, n: lr_scheduler.LambdaLR(o, lambda e: 0.9**e),
            "LambdaLR lowers the learning rate",
        ),
        (
            lambda o, n: lr_scheduler.PolynomialLR(o, 90),
            "PolynomialLR lowers the learning rate to 0 within 90",
        ),
        (
            lambda o, n: lr_scheduler.SequentialLR(
                o,
                [
                    lr_scheduler.LinearLR(o, 0.1, total_iters=5),
                    lr_scheduler.CosineAnnealingLR(o, 85),
                ],
                milestones=[5],
            ),
            "CosineAnnealingLR(T_max=85)",
        ),
    ],
)
def test_schedules_for_epochs_give_a_hint(make_job: Any, schedule: Any, says: str) -> None:
    (note,) = notes(make_job, schedule)
    assert note.startswith(says) or says in note


@pytest.mark.parametrize(
    "schedule",
    [
        lambda o, n: None,
        lambda o, n: lr_scheduler.StepLR(o, 30 * n // EPOCHS),
        lambda o, n: lr_scheduler.StepLR(o, 1, gamma=0.999),
        lambda o, n: lr_scheduler.MultiStepLR(o, [m * n // EPOCHS for m in (30, 60)]),
        lr_scheduler.CosineAnnealingLR,
        lambda o, n: lr_scheduler.OneCycleLR(o, 1.0, total_steps=n),
        lambda o, n: lr_scheduler.ExponentialLR(o, 0.95 ** (EPOCHS / n)),
        lambda o, n: lr_scheduler.LinearLR(o, 1e-8, total_iters=n),
        lambda o, n: lr_scheduler.LambdaLR(o, lambda step: 1 - step / n),
    ],
)
def test_schedules_for_steps_give_no_hint(make_job: Any, schedule: Any) -> None:
    assert notes(make_job, schedule) == []


def test_no_hint_if_an_epoch_is_one_step(make_job: Any) -> None:
    assert notes(make_job, lr_scheduler.CosineAnnealingLR, epochs=90, steps=90) == []
    cosine = lambda o, n: lr_scheduler.CosineAnnealingLR(o, 90)  # noqa: E731
    assert notes(make_job, cosine, epochs=90, steps=90) == []


def test_a_rate_that_vanishes_early_gives_a_hint(make_job: Any) -> None:
    """The step size is larger than the number of epochs, but far too small for the number of steps."""
    (note,) = notes(
        make_job, lambda o, n: lr_scheduler.StepLR(o, step_size=30), epochs=10, steps=250
    )
    assert note.startswith("StepLR lowers the learning rate to")
    assert "in 210 of 250 steps" in note


@pytest.mark.parametrize(
    ("schedule", "says"),
    [
        (lambda o, n: lr_scheduler.StepLR(o, 30), "For epochs, write  step_size=30 * 100."),
        (
            lambda o, n: lr_scheduler.MultiStepLR(o, [60, 30]),
            "For epochs, write  milestones=[m * 100 for m in [30, 60]].",
        ),
        (
            lambda o, n: lr_scheduler.ExponentialLR(o, 0.95),
            "make it a function of  step / 100  (ExponentialLR: gamma ** (1 / 100)).",
        ),
    ],
)
def test_hints_of_a_job_that_trains_for_steps(make_job: Any, schedule: Any, says: str) -> None:
    job = make_job(steps=STEPS, schedule=lambda self, o, n: schedule(o, n))
    state = TrainState.of(job, device="cpu", num_steps=STEPS, steps_per_epoch=100)
    assert says in state.notes[0]
    fitting = make_job(steps=STEPS, schedule=lambda self, o, n: lr_scheduler.StepLR(o, n // 3))
    assert not TrainState.of(fitting, device="cpu", num_steps=STEPS, steps_per_epoch=100).notes


def test_a_schedule_that_needs_the_epochs_of_a_job_that_has_none(make_job: Any) -> None:
    cosine = lambda self, o, n: lr_scheduler.StepLR(o, n // self.epochs)  # noqa: E731
    with pytest.raises(
        JobError, match=r"trains for steps=50, so self.epochs is None. Count in  num_"
    ):
        TrainState.of(make_job(steps=50, schedule=cosine), device="cpu", num_steps=50)
