"""Guarantees that are easily broken: what a job may do, and what a refusal must not do."""

from __future__ import annotations

import json
import os
import resource
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from manyhands.runs import checkpoints
from manyhands.testing import harness

HEAD = """
from dataclasses import dataclass
import random
import numpy as np
import torch
from torch import nn
from torch.utils.data import Dataset, random_split
from manyhands.testing.jobs import Regression
"""


def job(tmp_path: Path, body: str) -> Path:
    path = tmp_path / "job.py"
    path.write_text(HEAD + body)
    return path


def trained(members: ModuleType, path: Path | str, run: Path, **options: Any) -> harness.Finished:
    done = members.train(path, run, **options)
    assert done.code == 0, done.out + done.err
    return done


def test_a_random_split_is_the_same_in_every_worker(members: ModuleType, tmp_path: Path) -> None:
    path = job(
        tmp_path,
        """
@dataclass
class Split(Regression):
    def data(self):
        return random_split(super().data(), [68, 30])[0]
    def eval_data(self):
        return None
""",
    )
    alone = trained(members, path, tmp_path / "one")
    both = trained(members, path, tmp_path / "two", strategy="allreduce", workers=2)
    assert both.losses == pytest.approx(alone.losses, rel=1e-5)


@pytest.mark.long
def test_augmentation_does_not_depend_on_the_loading_process(tmp_path: Path) -> None:
    path = job(
        tmp_path,
        """
class Noisy(Dataset):
    def __init__(self, data):
        self.data = data
    def __len__(self):
        return len(self.data)
    def __getitem__(self, i):
        x, y = self.data[i]
        return x + torch.randn(6) + random.random() + float(np.random.rand()), y

@dataclass
class Augmented(Regression):
    def data(self):
        return Noisy(super().data())
    def eval_data(self):
        return None
""",
    )
    alone = trained(harness, path, tmp_path / "one")
    both = trained(
        harness,
        path,
        tmp_path / "two",
        strategy="allreduce",
        workers=2,
        accumulate=2,
        loader_processes=1,
    )
    assert both.losses == pytest.approx(alone.losses, rel=1e-5)


@pytest.mark.long
def test_a_model_with_a_part_only_for_training_trains_on_many_workers(tmp_path: Path) -> None:
    path = job(
        tmp_path,
        """
class Aux(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head, self.aux = nn.Linear(6, 8), nn.Linear(8, 2), nn.Linear(8, 2)
    def forward(self, x):
        hidden = self.body(x).tanh()
        return self.head(hidden) + (self.aux(hidden) if self.training else 0.0)

@dataclass
class WithAux(Regression):
    def model(self):
        return Aux()
""",
    )
    alone = trained(harness, path, tmp_path / "one")
    three = trained(harness, path, tmp_path / "three", strategy="allreduce", workers=3)
    assert three.losses == pytest.approx(alone.losses, rel=1e-5)


@pytest.mark.long
def test_samples_of_weight_zero_are_allowed(tmp_path: Path) -> None:
    path = job(
        tmp_path,
        """
@dataclass
class Masked(Regression):
    def mask(self, batch):
        return (batch[0][:, 0] > 0.8).float()
    def loss(self, output, batch):
        mask = self.mask(batch)
        return (((output - batch[1]) ** 2).mean(dim=1) * mask).sum() / mask.sum()
    def weight(self, batch):
        return self.mask(batch).sum()
    def metrics(self, output, batch):
        return {}
""",
    )
    done = trained(
        harness, path, tmp_path / "run", strategy="allreduce", workers=4, batch_size=32, samples=96
    )
    alone = trained(harness, path, tmp_path / "one", batch_size=32, samples=96)
    assert done.losses == pytest.approx(alone.losses, rel=1e-5)
    assert all(e["metrics"]["loss"] > 0 for e in done.of("Evaluated"))


@pytest.mark.parametrize(
    ("body", "fields", "message"),
    [
        ("    def metrics(self, output, batch):\n        return 1 / 0\n", {}, "ZeroDivisionError"),
        ("    def eval_data(self):\n        return None\n", {"patience": 2}, "patience needs"),
    ],
)
def test_mistakes_in_the_evaluation_are_found_at_the_start(
    members: ModuleType, tmp_path: Path, body: str, fields: dict[str, Any], message: str
) -> None:
    path = job(tmp_path, f"@dataclass\nclass Wrong(Regression):\n{body}")
    done = members.train(path, tmp_path / "run", **fields)
    assert done.code in (1, 2)
    assert message in done.err
    assert "StepCommitted" not in done.out
    events = tmp_path / "run" / "events.jsonl"
    assert not events.exists() or "StepCommitted" not in events.read_text()


def test_a_refused_resume_changes_nothing(members: ModuleType, tmp_path: Path) -> None:
    run = tmp_path / "run"
    trained(members, "Regression", run, epochs=4)
    before = {name: (run / name).read_bytes() for name in ("config.json", "summary.json")} | {
        "checkpoints": sorted(os.listdir(run / "checkpoints"))
    }  # type: ignore[dict-item]
    refused = members.resume(run, "--checkpoint", "step-14", "--set", "lr=fast")
    assert refused.code == 2
    assert "lr is a number" in refused.err
    after = {name: (run / name).read_bytes() for name in ("config.json", "summary.json")} | {
        "checkpoints": sorted(os.listdir(run / "checkpoints"))
    }  # type: ignore[dict-item]
    assert after == before
    assert members.resume(run, "--set", "seed=5").code == 2
    going_back = members.resume(run, "--checkpoint", "step-14")
    assert going_back.code == 0, going_back.err
    assert going_back.of("Resumed")[-1]["step"] == 14


@pytest.mark.long
def test_a_full_disk_loses_nothing(tmp_path: Path) -> None:
    run = tmp_path / "run"
    arguments = harness.train_arguments("Regression", run, pause_s=0.02, epochs=1000)
    with harness.command(*arguments, run=run) as running:
        running.wait_for(lambda events: any(e["event"] == "CheckpointSaved" for e in events))
        # As on a full disk: no file of the coordinator may grow any more.
        resource.prlimit(running.process.pid, resource.RLIMIT_FSIZE, (1000, 1000))
        done = running.wait()
    assert done.code == 1
    assert "The run's events.jsonl can't be written: " in done.err
    assert checkpoints.verify(checkpoints.final(run, checkpoints.steps(run)[-1])).step > 0
    resumed = harness.resume(run, "--set", "epochs=2", "--set", "pause_s=0")
    assert resumed.code == 0, resumed.err


@pytest.mark.long
def test_a_schedule_is_not_stepped_beyond_its_end(tmp_path: Path) -> None:
    path = job(
        tmp_path,
        """
@dataclass
class Cycle(Regression):
    def schedule(self, optimizer, num_steps):
        return torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=num_steps)
""",
    )
    trained(harness, path, tmp_path / "run", epochs=1)
    longer = harness.resume(tmp_path / "run", "--set", "epochs=2")
    assert longer.code == 2
    assert "made for 7 steps, 7 of which are done, and the run now has 14" in longer.err
    kept = harness.resume(tmp_path / "run", "--set", "epochs=2", "--schedule", "keep")
    assert kept.code == 0, kept.err
    assert len({event["lr"] for event in kept.steps[7:]}) == 1


def test_fields_of_any_kind_are_recorded(members: ModuleType, tmp_path: Path) -> None:
    path = job(
        tmp_path,
        """
from pathlib import Path

@dataclass
class Fields(Regression):
    folder: Path = Path("somewhere")
""",
    )
    trained(members, path, tmp_path / "run", epochs=1)
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert "somewhere" in config["fields"]["folder"]["value"]


def test_absurdly_many_workers_are_refused_before_any_is_started(
    members: ModuleType, tmp_path: Path
) -> None:
    done = members.train("Regression", tmp_path / "run", strategy="allreduce", workers=9999)
    assert done.code == 2
    assert "would only wait for each other" in done.err
    assert not (tmp_path / "run").exists()
