"""A job that is a module of a package: all its processes import it as one, and resume finds it again."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

JOB = """\
from dataclasses import dataclass
from manyhands.testing.jobs import Regression
from ..nets import Net
from .sets import Rows

@dataclass
class Relative(Regression):
    anneal: bool = False

    def model(self):
        return Net()

    def data(self):
        return Rows()
"""
NETS = "from torch import nn\nclass Net(nn.Sequential):\n    def __init__(self):\n"
NETS += "        super().__init__(nn.Linear(6, 2))\n"
SETS = "from manyhands.testing.jobs import _synthetic\nclass Rows:\n"
SETS += "    rows = _synthetic(32, seed=1)\n    def __len__(self):\n        return 32\n"
SETS += "    def __getitem__(self, at):\n        return self.rows[at]\n"


def manyhands(*words: str, cwd: Path) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "manyhands", *words],
        cwd=cwd,
        env=os.environ | {"NO_COLOR": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_module_of_a_package_trains_and_resumes_from_another_folder(tmp_path: Path) -> None:
    """With a loader process and a dedicated server; without __init__.py, as python -m allows."""
    jobs = tmp_path / "work" / "lab" / "jobs"
    jobs.mkdir(parents=True)
    (jobs / "net.py").write_text(JOB)
    (jobs / "sets.py").write_text(SETS)
    (jobs.parent / "nets.py").write_text(NETS)
    run = tmp_path / "run"
    manyhands(
        *("train", "lab.jobs.net:Relative", "--run-dir", str(run), "--device", "cpu"),
        *("--strategy", "ps:sync(placement=dedicated, servers=1)", "--workers", "1"),
        *("--set", "epochs=1", "--set", "loader_processes=1"),
        cwd=tmp_path / "work",
    )
    noted = json.loads((run / "config.json").read_text())["job"]
    assert noted["reference"] == "lab.jobs.net:Relative"
    assert noted["file"] == str(jobs / "net.py")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    again = manyhands(
        *("resume", str(run), "--strategy", "single", "--set", "epochs=2"),
        *("--set", "loader_processes=0", "--schedule", "restart"),
        cwd=elsewhere,
    )
    assert "finished" in again
    assert "has changed" not in again
