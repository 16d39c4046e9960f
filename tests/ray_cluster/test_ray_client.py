"""A person outside of the cluster: the coordinator runs on its head."""

from __future__ import annotations

import shutil
import signal
import time
from pathlib import Path

import pytest
from ray_nodes import Nodes

from manyhands.events.jsonl import read_events
from manyhands.testing.harness import JOBS, RunningCommand, command, gone, train, train_arguments

pytestmark = pytest.mark.long


def far(nodes: Nodes) -> tuple[str, str]:
    return "--on", f"ray://127.0.0.1:{nodes.client}"


def until_printed(running: RunningCommand, run: Path, step: int) -> None:
    deadline = time.monotonic() + 60
    path = run / "events.jsonl"
    while not any(e.get("step", 0) >= step for e in (read_events(path) if path.exists() else ())):
        assert running.process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.05)


def long_training(nodes: Nodes, run: Path) -> list[str]:
    slow = {"epochs": 5000, "pause_s": 0.02}
    return train_arguments("Regression", run, *far(nodes), strategy="allreduce", workers=2, **slow)


def test_output_and_exit_code_come_back(nodes: Nodes, tmp_path: Path) -> None:
    here = train("Regression", tmp_path / "here", strategy="allreduce", workers=2)
    there = train("Regression", tmp_path / "there", *far(nodes), strategy="allreduce", workers=2)
    assert there.code == 0, there.err
    assert there.losses == pytest.approx(here.losses, abs=1e-5)
    assert there.out.startswith("coordinated on ")
    assert "finished in" in there.out
    wrong = train("Regression", tmp_path / "wrong", *far(nodes), "--set", "nonesuch=1")
    assert wrong.code == 2
    assert "nonesuch" in wrong.err
    assert nodes.left() == ""


def test_ctrl_c_is_handed_on(nodes: Nodes, tmp_path: Path) -> None:
    run = tmp_path / "run"
    with command(*long_training(nodes, run), run=run) as running:
        until_printed(running, run, 3)
        running.signal(signal.SIGINT)
        done = running.wait()
    assert done.code == 130, done.err
    assert "--on ray" in done.out.partition("go on with")[2]
    assert gone(list(running.pids().values()))
    assert nodes.left() == ""


def test_without_its_person_it_saves_and_stops(nodes: Nodes, tmp_path: Path) -> None:
    run = tmp_path / "run"
    with command(*long_training(nodes, run), run=run) as running:
        until_printed(running, run, 3)
        running.signal(signal.SIGKILL)
        running.wait()
    assert nodes.left(within_s=60) == ""
    assert gone(list(running.pids().values()))
    (end,) = [event for event in running.events() if event["event"] == "RunFinished"]
    assert end["outcome"] == "preempted"
    assert list((run / "checkpoints").iterdir())


def test_a_folder_is_sent(nodes: Nodes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The nodes do not see the person's folder: it is gone from where it was when they look."""
    folder = tmp_path / "laptop"
    (folder / "jobs").mkdir(parents=True)
    shutil.copy(JOBS, folder / "jobs" / "mine.py")
    monkeypatch.chdir(folder)
    run = tmp_path / "run"
    flags = ("--ray-ship", ".", "--workers", "2", "--device", "cpu", "--run-dir", str(run))
    with command("train", "jobs/mine.py:Regression", *far(nodes), *flags, run=run) as running:
        done = running.wait()
    assert done.code == 0, done.err
    (start,) = done.of("RunStarted")
    assert start["job"] == "jobs/mine.py:Regression"
    assert "runtime_resources" in (run / "config.json").read_text(), (
        "the job was read where Ray put it"
    )
    with command(
        "train", "jobs/mine.py", *far(nodes), "--ray-ship", "/usr/lib", run=run
    ) as running:
        done = running.wait()
    assert done.code == 2
    assert "the job jobs/mine.py is not in that folder" in done.err
