"""`--chaos` with real processes: what was killed is what was lost, and every sample counts once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from manyhands.testing import harness
from manyhands.testing.conformance import Case, assert_once_an_epoch

EPOCHS = 10


def trained(case: Case, run: Path, chaos: str, *, epochs: int = EPOCHS) -> harness.Finished:
    done = case.train("Regression", run, "--chaos", chaos, epochs=epochs, pause_s=0.02)
    assert_once_an_epoch(done, epochs=epochs)
    killed = [e["member"] for e in done.of("Injected") if e["fault"] == "kill"]
    assert [e["member"] for e in done.of("MemberLost")] == killed
    summary = summary_of(done)
    assert summary["injected"] == summary["chaos"]["recovered"] == len(done.of("Injected"))
    return done


def summary_of(done: harness.Finished) -> dict[str, Any]:
    summary: dict[str, Any] = json.loads((done.run / "summary.json").read_text())
    return summary


@pytest.mark.long
def test_a_kill_and_a_pause_and_nobody_more_than_can_be_spared(tmp_path: Path) -> None:
    case = Case("ps:sync(transport=shm)", workers=3, flags=("--max-restarts", "0"))
    chaos = "kill worker after step 8; pause worker 300ms after step 16; kill worker after step 24"
    done = trained(case, tmp_path / "run", chaos)
    assert [e["fault"] for e in done.of("Injected")] == ["kill", "pause"]
    assert "kill worker after step 24 waits" in done.out, "two workers are left"
    assert f"chaos: kill {done.of('MemberLost')[0]['member']}\n" in done.out
    assert "chaos       2 faults, 2 recovered, median pause" in done.out


def test_allreduce_goes_on_after_a_kill_and_a_cut(tmp_path: Path) -> None:
    case = Case("allreduce", workers=3, flags=("--max-restarts", "0"))
    chaos = "kill worker-1 after step 8; cut link after step 20; seed 2"
    done = trained(case, tmp_path / "run", chaos)
    faults = [e["fault"] for e in done.of("Injected")]
    assert faults[0] == "kill"
    assert [e["member"] for e in done.of("MemberLost")] == ["worker-1"]
    assert faults == ["kill", "cut link"] or "links can't be cut here" in done.out


@pytest.mark.long
@pytest.mark.parametrize(
    ("strategy", "chaos"),
    [
        ("ps:sync", "kill worker every 1s; pause worker 500ms every 3s"),
        ("ps:async(transport=tcp)", "kill worker every 2s; cut link 500ms every 1s"),
        ("ps:ssp(placement=dedicated)", "kill member every 1s; pause server 1s every 4s"),
        ("allreduce", "kill worker every 2s; cut link every 3s; pause member 500ms every 4s"),
    ],
)
def test_again_and_again(strategy: str, chaos: str, tmp_path: Path) -> None:
    case = Case(strategy, workers=3, flags=("--max-restarts", "50"), fields={"lr": 1e-3})
    done = trained(case, tmp_path / "run", f"{chaos}; seed 5", epochs=30)
    assert done.of("MemberLost")


@pytest.mark.long
def test_a_resumed_run_is_left_in_peace_unless_asked(tmp_path: Path) -> None:
    run = tmp_path / "run"
    case = Case("allreduce", workers=2)
    done = trained(case, run, "pause worker 100ms after step 3", epochs=1)
    assert len(done.of("Injected")) == 1
    resumed = harness.resume(run, "--set", "epochs=2", "--schedule", "restart")
    assert resumed.code == 0, resumed.err
    assert len(resumed.of("Injected")) == 1
    assert summary_of(resumed)["chaos"] is None
