"""A run that is resumed with another learning rate trains alike with every strategy."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import ModuleType

import pytest
import torch

CHANGED = ("--set", "lr=0.2", "--set", "epochs=3", "--schedule", "stretch")


@pytest.mark.parametrize(
    "others",
    [
        pytest.param([("ps:sync", 2)], id="ps"),
        pytest.param(
            [
                ("allreduce", 2),
                ("ps:sync(transport=tcp)", 2),
                ("ps:sync(placement=dedicated,transport=tcp,servers=2)", 2),
            ],
            marks=pytest.mark.long,
            id="all",
        ),
    ],
)
def test_another_rate_is_applied_by_whoever_has_the_optimizer(
    members: ModuleType, tmp_path: Path, others: list[tuple[str, int]]
) -> None:
    begun = tmp_path / "begun"
    assert members.train("Regression", begun, grouped=True, epochs=2).code == 0
    results = []
    for number, (strategy, workers) in enumerate([("single", 1), *others]):
        run = tmp_path / f"run-{number}"
        shutil.copytree(begun, run)
        how = ("--strategy", strategy, "--workers", str(workers))
        done = members.resume(run, *CHANGED, *how)
        assert done.code == 0, f"{strategy}: {done.out}\n{done.err}"
        results.append(done)
    alone, *together = results
    assert alone.steps[14]["lr"] == pytest.approx(3 * 0.2 * 0.25, rel=1e-6)  # biases have thrice
    for done in together:
        assert [e["lr"] for e in done.steps] == pytest.approx([e["lr"] for e in alone.steps])
        assert done.losses == pytest.approx(alone.losses, rel=1e-5)
        for name, value in alone.state()["model"].items():
            torch.testing.assert_close(done.state()["model"][name], value, rtol=1e-5, atol=1e-6)
        groups = done.state()["optimizer"]["param_groups"]
        assert [group["initial_lr"] for group in groups] == pytest.approx([0.6, 0.2])
