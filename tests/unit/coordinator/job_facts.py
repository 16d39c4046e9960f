"""Facts about a loaded job, as a worker reports them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from manyhands.control.messages import BuiltFacts, JobFields, WorkerFacts
from manyhands.transport.fields import read


def facts(*, metrics: Sequence[str] = ("loss", "accuracy"), **fields: Any) -> WorkerFacts:
    """Return the facts about a job with these fields. Without metrics it has no evaluation data."""
    given = {"batch_size": 8, "epochs": 2, "eval_every": 1, "monitor": "loss", "patience": None}
    all_fields = {**given, **fields}
    return WorkerFacts(
        job="Regression",
        fields=read(JobFields, all_fields),
        all_fields=all_fields,
        device="cpu",
        torch="2",
        parameters=7,
        train_samples=100,
        eval_samples=10 if metrics else 0,
        unit=("samples", 1.0),
        tables={},
        built=BuiltFacts(list(metrics)),
    )
