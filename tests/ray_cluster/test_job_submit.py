"""From outside of the cluster: `ray job submit -- manyhands train ... --on ray`."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from ray_nodes import Nodes, ray_nodes

from manyhands.events.jsonl import committed_steps, read_events
from manyhands.testing.harness import JOBS, train

pytestmark = pytest.mark.long

SUBMIT = Path(__file__).with_name("submit_job.py")
LONG_S = 120.0


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    """One node: several on one machine share the folder of uploads, and each unpacks them anew."""
    with ray_nodes(3) as cluster:
        yield cluster


def submit(nodes: Nodes, folder: Path, *flags: str) -> subprocess.Popen[str]:
    """The nodes see nothing of the folder but what Ray uploads."""
    (folder / "jobs").mkdir(parents=True)
    shutil.copy(JOBS, folder / "jobs" / "mine.py")
    command = [sys.executable, "-m", "manyhands.cli.main", "train", "jobs/mine.py:Regression"]
    command += ["--on", "ray", "--device", "cpu", "--workers", "2", *flags]
    return subprocess.Popen(
        [sys.executable, str(SUBMIT), nodes.address, str(folder), *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.mark.parametrize("flags", [(), ("--ray-ship", ".")], ids=["", "shipped"])
def test_a_submitted_job_trains(nodes: Nodes, tmp_path: Path, flags: tuple[str, ...]) -> None:
    here = train("Regression", tmp_path / "here", strategy="allreduce", workers=2)
    run = tmp_path / "run"
    job = submit(nodes, tmp_path / "laptop", "--run-dir", str(run), *flags)
    out, _ = job.communicate(timeout=LONG_S)
    assert job.returncode == 0, out
    assert "finished in" in out
    losses = [step["loss"] for step in committed_steps(read_events(run / "events.jsonl"))]
    assert losses == pytest.approx(here.losses, abs=1e-5)
    assert nodes.left() == ""


def test_a_stopped_job_saves(nodes: Nodes, tmp_path: Path) -> None:
    run = tmp_path / "run"
    slow = ("--set", "epochs=5000", "--set", "pause_s=0.02")
    job = submit(nodes, tmp_path / "laptop", "--run-dir", str(run), *slow)
    events, deadline = run / "events.jsonl", time.monotonic() + LONG_S
    while not (events.exists() and any(e.get("step", 0) >= 3 for e in read_events(events))):
        assert job.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.05)
    job.send_signal(signal.SIGTERM)
    out, _ = job.communicate(timeout=LONG_S)
    assert "the job is STOPPED" in out
    assert nodes.left() == ""
    (end,) = [event for event in read_events(events) if event["event"] == "RunFinished"]
    assert end["outcome"] == "preempted"
    assert list((run / "checkpoints").iterdir())
