"""Small jobs that a test can bend: each method is given, or the plain one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import make_dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from manyhands.job import Job

MakeJob = Callable[..., Job]


def numbers(samples: int = 20, *, seed: int = 0) -> TensorDataset:
    """Inputs of 4 numbers, targets of 2."""
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(samples, 4, generator=generator)
    return TensorDataset(inputs, inputs[:, :2] * 2 - inputs[:, 2:])


PLAIN: dict[str, Any] = {
    "model": lambda self: nn.Linear(4, 2),
    "optimizer": lambda self, params: torch.optim.SGD(params, lr=0.1),
    "data": lambda self: numbers(),
    "loss": lambda self, output, batch: nn.functional.mse_loss(output, batch[1]),
}


@pytest.fixture
def make_job() -> MakeJob:
    """A job called Mine, with fields by keyword and methods where a callable is given."""

    def make(**given: Any) -> Job:
        methods = {name: value for name, value in given.items() if callable(value)}
        fields = {name: value for name, value in given.items() if not callable(value)}
        cls = make_dataclass("Mine", [], bases=(Job,), namespace={**PLAIN, **methods})
        job: Job = cls(**fields)
        return job

    return make
