"""`show` and `list` of runs that have finished, are training, were killed, or are of an older version."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from manyhands.cli.list_runs import COLUMNS
from manyhands.cli.main import main
from manyhands.events.history import read_history, sparkline
from manyhands.runs.folder import RunFolder


def event(kind: str, time: float, **fields: Any) -> dict[str, Any]:
    return {"time": time, "event": kind, **fields}


def steps(first: int, last: int, *, at: float) -> Iterator[dict[str, Any]]:
    for step in range(first, last + 1):
        yield event("StepCommitted", at + step, step=step, loss=4 / step, samples=16, step_s=0.5)


def evaluated(step: int, accuracy: float, *, best: bool, at: float) -> dict[str, Any]:
    metrics = {"loss": 1 - accuracy, "accuracy": accuracy}
    return event("Evaluated", at, step=step, metrics=metrics, best=best)


LIFE = [
    event("RunStarted", 100.0),
    event("MemberReady", 101.0, member="worker-0", steps=12),
    *steps(1, 4, at=101),
    evaluated(4, 0.5, best=True, at=106),
    event("MemberLost", 107.0, member="worker-1", reason="killed by SIGKILL"),
    *steps(5, 8, at=107),
    evaluated(8, 0.75, best=True, at=116),
]


def make(
    root: Path,
    name: str,
    events: list[dict[str, Any]],
    *,
    summary: dict[str, Any] | None = None,
    old: bool = False,
    **changed: str,
) -> RunFolder:
    run = RunFolder.create("x", path=root / name)
    job = {"reference": "jobs/net.py", "file": "/jobs/net.py", "sha256": ""}
    options = {"strategy": {"value": "allreduce"}, "workers": {"value": 2}}
    monitor = {"monitor": {"value": "accuracy", "from": "job file"}}
    run.write_config(
        {
            "created": f"2026-01-01T12:00:0{len(list(root.iterdir()))}+0000",
            "job": job if old else {**job, "class": "Net"},
            "settings": changed,
            "options": options,
            "fields": monitor,
        }
    )
    lines = "".join(json.dumps(each, separators=(",", ":")) + "\n" for each in events)
    (run.path / "events.jsonl").write_text(lines)
    if summary is not None:
        run.write_summary(summary)
    (run.path / "checkpoints" / "step-8").mkdir()
    return run


def output(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(list(words)) == 0
    return capsys.readouterr().out


def finished(best: float) -> dict[str, Any]:
    return {
        "outcome": "finished",
        "steps": 12,
        "epochs": 3.0,
        "samples": 192,
        "samples_per_s": 32.0,
        "wall_s": 16.0,
        "monitor": "max accuracy",
        "best_metrics": {"loss": 1 - best, "accuracy": best, "step": 8},
        "final_metrics": {"loss": 0.5, "accuracy": 0.5},
    }


def test_show_a_run_that_has_finished(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    end = event("RunFinished", 120.0, outcome="finished", resume_command=None)
    run = make(tmp_path, "a", [*LIFE, end], summary=finished(0.75), lr="0.1")
    shown = output(capsys, "show", str(run.path))
    for words in (
        "job            jobs/net.py (Net)\n",
        "changed        lr=0.1\n",
        "strategy       allreduce, 2 workers\n",
        "outcome        finished, 20 s\n",
        "steps          12 (3 epochs, 192 samples)\n",
        "speed          32 samples/s\n",
        "lost           worker-1 after step 4: killed by SIGKILL\n",
        "best           loss 0.2500  accuracy 0.7500  (step 8, highest accuracy)\n",
        f"               {run.path}/checkpoints/step-8\n",
        "loss           █▄▃▂▂▁▁▁  4.0000 to 0.5000\n",
        "eval accuracy  ▁█  0.5000 to 0.7500\n",
    ):
        assert f"  {words}" in shown
    assert "go on with" not in shown
    told = json.loads(output(capsys, "show", str(run.path), "--json"))
    assert told["best_checkpoint"] == str(run.path / "checkpoints" / "step-8")
    assert told["curves"]["eval"]["accuracy"] == [[4, 0.5], [8, 0.75]]
    assert told["lost"] == [{"member": "worker-1", "reason": "killed by SIGKILL", "after_step": 4}]


def test_show_a_run_that_stopped_at_a_limit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = "manyhands resume somewhere"
    end = event("RunFinished", 120.0, outcome="limit", resume_command=command)
    summary = {**finished(0.75), "outcome": "limit", "limit": "--max-steps 8", "steps": 8}
    run = make(tmp_path, "a", [*LIFE, end], summary=summary)
    shown = output(capsys, "show", str(run.path))
    assert "outcome        limit (--max-steps 8), after 20 s: step 8 of 12 (67%)\n" in shown
    assert shown.endswith(f"continue with:  {command}\n")


@pytest.mark.parametrize("old", [False, True])
def test_show_a_run_that_was_killed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], old: bool
) -> None:
    run = make(tmp_path, "a", LIFE, old=old)
    with open(run.path / "events.jsonl", "a") as file:
        file.write('{"time":117,"event":"StepCom')  # torn
    shown = output(capsys, "show", str(run.path))
    assert "cut off, after 16 s: step 8 of 12 (67%)\n" in shown
    assert "(step 8, highest accuracy)\n" in shown
    assert "speed          32 samples/s\n" in shown
    assert shown.endswith(f"continue with:  manyhands resume {run.path}\n")
    run.lock()
    try:
        shown = output(capsys, "show", str(run.path))
        assert "training now, for 16 s: step 8 of 12 (67%)\n" in shown
        assert "go on with" not in shown
    finally:
        run.unlock()


def test_steps_after_the_checkpoint_that_was_resumed_from_are_void(tmp_path: Path) -> None:
    again = [
        event("RunStarted", 500.0),
        event("Resumed", 501.0, step=4, epoch=1, checkpoint="checkpoints/step-4", workers=2),
        *steps(5, 6, at=501),
    ]
    run = make(tmp_path, "a", [*LIFE, *again])
    history = read_history(run.path / "events.jsonl")
    assert [step for step, _ in history.losses] == [1, 2, 3, 4, 5, 6]
    assert [each["step"] for each in history.evaluations] == [4]
    assert history.best is not None
    assert history.best["step"] == 4
    assert (history.num_starts, history.seconds) == (2, 16.0 + 7.0)
    quick = read_history(run.path / "events.jsonl", with_steps=False)
    assert (quick.losses, quick.evaluations) == ([], history.evaluations)


def test_list_sorts_and_shows_changed_fields(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    root = Path("runs")
    root.mkdir()
    make(root, "good", LIFE, summary=finished(0.9), lr="0.1", epochs="3")
    make(root, "bad", LIFE, summary=finished(0.2), lr="9")
    make(root, "killed", LIFE, old=True)
    (root / "broken").mkdir()
    (root / "broken" / "config.json").write_text("{}")
    head, *rows = output(capsys, "list").splitlines()
    assert head.split() == [*COLUMNS]
    assert rows[0].split()[:8] == [
        "runs/good",
        "Net",
        "finished",
        "allreduce",
        "2",
        "12",
        "16",
        "s",
    ]
    assert rows[0].endswith("accuracy 0.9   lr=0.1 epochs=3")
    assert rows[2].split()[:3] == ["runs/killed", "net.py", "cut"]
    assert rows[3].split() == ["runs/broken", "unreadable"]
    best = output(capsys, "list", "--sort", "best").splitlines()
    assert [row.split()[0] for row in best[1:4]] == ["runs/good", "runs/killed", "runs/bad"]
    told = json.loads(output(capsys, "list", "runs", "--sort", "name", "--json"))
    assert [each["run"] for each in told] == [
        *("runs/bad", "runs/good", "runs/killed", "runs/broken"),
    ]
    assert told[1]["changed"] == {"lr": "0.1", "epochs": "3"}
    assert told[2]["best"] == {"loss": 0.25, "accuracy": 0.75}
    assert main(["list", "--sort", "bets"]) == 2
    assert "--sort bets: it must be one of started, best, time" in (err := capsys.readouterr().err)
    assert "did you mean 'best'?" in err
    assert main(["list", "runs/good"]) == 2
    assert "manyhands show runs/good" in capsys.readouterr().err


def test_a_sparkline() -> None:
    assert sparkline([]) == ""
    assert sparkline([1.0]) == "▁"
    assert sparkline([0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]) == "▁▂▃▄▅▆▇█"
    assert sparkline([0.0, float("nan"), 7.0]) == "▁x█"
    assert sparkline([float(n // 100) for n in range(800)], cells=8) == "▁▂▃▄▅▆▇█"
    assert sparkline([2.0, 1.0], bars="._") == "_."
