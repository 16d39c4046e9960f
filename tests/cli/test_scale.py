"""A live run gets more workers, and fewer, and loses nothing."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from manyhands.api.options import Resolved, number_or_range
from manyhands.errors import UsageError
from manyhands.hosts.launchers.local import cores
from manyhands.testing import harness, in_process
from manyhands.testing.conformance import Case, assert_once_an_epoch

EPOCHS = 35


def say(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "manyhands.cli.main", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def workers_of(view: dict[str, object]) -> int:
    members, servers = view["members"], view["servers"]
    assert isinstance(members, list)
    assert isinstance(servers, int)
    return len(members) - servers


@pytest.mark.parametrize(
    "strategy",
    [
        "allreduce",
        pytest.param("ps:sync", marks=pytest.mark.long),
        pytest.param("ps:async(transport=tcp)", marks=pytest.mark.long),
    ],
)
def test_more_workers_and_fewer(strategy: str, tmp_path: Path) -> None:
    run = tmp_path / "run"
    case = Case(strategy, workers=2)
    arguments = case.arguments("Regression", run, pause_s=0.05, epochs=EPOCHS)
    with harness.command(*arguments, run=run) as running:
        running.wait_for_step(3)
        more = say("scale", str(run), "--workers", "4")
        assert more.returncode == 0, more.stderr
        done_by_then = max(e["step"] for e in running.events() if e["event"] == "StepCommitted")
        running.wait_for_step(done_by_then + 3)
        fewer = say("scale", str(run), "--workers", "2")
        assert fewer.returncode == 0, fewer.stderr
        wrong = say("scale", str(run), "--workers", "100000")
        assert wrong.returncode == 2
        assert "refused: they would share a global batch" in wrong.stderr
        done = running.wait()
    assert done.code == 0, f"{done.out}\n{done.err}"
    assert_once_an_epoch(done, epochs=EPOCHS)
    assert not done.of("MemberLost")
    counts = [workers_of(view) for view in done.of("ViewChanged")]
    assert counts[0] == counts[-1] == 2
    assert 4 in counts
    if case.traits.equals_single:
        alone = in_process.train("Regression", tmp_path / "alone", epochs=EPOCHS)
        assert done.losses == pytest.approx(alone.losses, rel=1e-5)
    assert json.loads((run / "summary.json").read_text())["outcome"] == "finished"


def test_a_run_that_is_over_can_not_be_scaled(tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert in_process.train("Regression", run).code == 0
    over = say("scale", str(run), "--workers", "4")
    assert over.returncode == 2
    assert f"manyhands resume {run} --workers 4" in over.stderr
    assert say("scale", str(run), "--workers", "0").returncode == 2
    assert say("scale", str(tmp_path), "--workers", "2").returncode == 2


@pytest.mark.parametrize("given", ["2:1", "0:3", "a:b", "2:", "many"])
def test_invalid_ranges_of_workers_are_refused(given: str) -> None:
    with pytest.raises(UsageError, match=f"--workers {given}: .* as 2:4"):
        Resolved({"workers": given}).get("workers", 2, number_or_range)


def test_fewer_workers_than_the_minimum_end_the_run(tmp_path: Path) -> None:
    run = tmp_path / "run"
    arguments = harness.train_arguments(
        *("Regression", run, "--max-restarts", "0", "--workers", "2:3"),
        strategy="allreduce",
        epochs=20,
        pause_s=0.05,
    )
    with harness.command(*arguments, run=run) as running:
        running.wait_for_step(3)
        running.kill("worker-1")
        running.wait_for(lambda events: any(e["event"] == "Recovered" for e in events))
        running.kill("worker-2")
        done = running.wait()
    assert done.code == 128 + 9
    assert "worker-2 failed: killed by SIGKILL" in done.err


COUNTING = """
import os
import torch
from manyhands.testing.jobs import Regression
from dataclasses import dataclass

@dataclass
class Counting(Regression):
    diary: str = ""

    def loss(self, output, batch):
        with open(self.diary, "a") as file:
            file.write(f"{os.getpid()} {torch.get_num_threads()}\\n")
        return super().loss(output, batch)
"""


@pytest.mark.long
@pytest.mark.skipif(cores() < 2, reason="one core can't be shared")
def test_more_workers_share_the_cores(tmp_path: Path) -> None:
    job, diary, run = tmp_path / "job.py", tmp_path / "diary", tmp_path / "run"
    job.write_text(COUNTING)
    arguments = harness.train_arguments(
        f"{job}:Counting", run, strategy="allreduce", pause_s=0.05, epochs=EPOCHS, diary=diary
    )
    with harness.command(*arguments, run=run) as running:
        running.wait_for_step(3)
        assert say("scale", str(run), "--workers", "2").returncode == 0
        done = running.wait()
    assert done.code == 0, f"{done.out}\n{done.err}"
    counts: dict[str, list[int]] = {}
    for line in diary.read_text().splitlines():
        process, threads = line.split()
        counts.setdefault(process, []).append(int(threads))
    first, second = counts.values()
    assert (first[0], first[-1]) == (cores(), cores() // 2)
    assert second[-1] == cores() // 2, "but for what it tried alone"
