"""Every strategy keeps what the conformance suite asks, with real processes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from manyhands.testing import harness
from manyhands.testing.conformance import CHECKS, Case

CASES = [
    Case("single", workers=1),
    Case("allreduce", workers=2),
    Case("allreduce", workers=4),
    Case("ps:sync", workers=2),
    Case("ps:sync(servers=2)", workers=4),
]


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_conformance(case: Case, check: Callable[[Case, Path], None], tmp_path: Path) -> None:
    check(case, tmp_path)


def test_batch_norm_is_evaluated_with_one_set_of_statistics(tmp_path: Path) -> None:
    """Each worker gathers its own running statistics; those of rank 0 are what is evaluated and saved."""
    job = tmp_path / "job.py"
    job.write_text(
        "from dataclasses import dataclass\n"
        "from torch import nn\n"
        "from manyhands.testing.jobs import Regression\n"
        "@dataclass\n"
        "class Norm(Regression):\n"
        "    def model(self):\n"
        "        return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))\n"
        "    def eval_data(self):\n"
        "        return self.data()\n"
    )
    fields = {"strategy": "allreduce", "batch_size": 14, "samples": 98}
    done = harness.train(job, tmp_path / "run", workers=2, **fields)
    assert done.code == 0, done.err
    import torch

    from manyhands.testing.jobs import Regression

    model = torch.nn.Sequential(
        torch.nn.Linear(6, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 2)
    ).eval()
    model.load_state_dict(done.state()["model"])
    inputs, targets = Regression().data().tensors
    expected = torch.nn.functional.mse_loss(model(inputs), targets).item()
    assert done.of("Evaluated")[-1]["metrics"]["loss"] == pytest.approx(expected, rel=1e-5)
