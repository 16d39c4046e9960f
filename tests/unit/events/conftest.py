"""The events of a small run, and a run folder to watch it in."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest

from manyhands.events import events as ev


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    left = [thread for thread in threading.enumerate() if thread not in before]
    for thread in left:
        thread.join(timeout=5)
    assert not [thread.name for thread in left if thread.is_alive()]


@pytest.fixture
def start() -> list[ev.Event]:
    """Two workers, ready to train for 2 epochs of 10 steps."""
    versions = {"manyhands": "0.1.0", "python": "3.11.9", "torch": "2.11.0"}
    ready = [
        ev.MemberReady(
            member=f"worker-{rank}",
            device=f"cuda:{rank} (NVIDIA H200)",
            parameters=1_234_567,
            train_samples=320,
            eval_samples=64,
            batch_size=32,
            epochs=2,
            steps=20,
        )
        for rank in range(2)
    ]
    members = ("worker-0", "worker-1")
    return [
        ev.RunStarted(
            run="runs/a b", job="Digits", strategy="allreduce", workers=2, versions=versions
        ),
        *ready,
        ev.ViewChanged(view=1, members=members, transport="gloo on lo"),
    ]


@pytest.fixture
def step() -> Callable[..., ev.StepCommitted]:
    def make(number: int, loss: float = 0.25) -> ev.StepCommitted:
        first = (number - 1) % 10 * 32
        return ev.StepCommitted(
            time=1_000.0 + number,
            step=number,
            epoch=(number - 1) // 10,
            samples=32,
            shares={
                "worker-0": ((first, first + 16),),
                "worker-1": ((first + 16, first + 32),),
            },
            loss=loss,
            lr=0.1,
            step_s=0.02,
            compute_s=0.015,
            wait_s=0.005,
            bytes_sent=1_000,
        )

    return make


@pytest.fixture
def evaluated() -> ev.Evaluated:
    return ev.Evaluated(
        time=1_010.5,
        step=10,
        epoch=0,
        samples=64,
        metrics={"loss": 0.4321, "accuracy": 0.8765},
        best=True,
        seconds=0.5,
    )


@pytest.fixture
def finish() -> Callable[..., ev.RunFinished]:
    def make(outcome: str = "finished", resume: str | None = None) -> ev.RunFinished:
        summary = {
            "outcome": outcome,
            "strategy": "allreduce",
            "workers": 2,
            "steps": 20,
            "samples": 640,
            "epochs": 2,
            "wall_s": 72.4,
            "samples_per_s": 3_412.2,
            "final_metrics": {"loss": 0.1234, "accuracy": 0.9753},
            "best_metrics": {"loss": 0.1111, "accuracy": 0.9797, "step": 10},
            "bytes_sent": 12_345_678,
            "checkpoint": "checkpoints/step-20",
            "error": None,
        }
        return ev.RunFinished(outcome=outcome, summary=summary, resume_command=resume)

    return make
