"""Run folders: a new one for every run, one coordinator in each, and clear words otherwise."""

from __future__ import annotations

import os
import pwd
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from manyhands.cli.main import main
from manyhands.errors import RunFolderError
from manyhands.runs.folder import RunFolder, runs_in


@pytest.mark.parametrize(
    ("job", "name"), [("Mnist", "mnist"), ("My_Job 2", "my-job-2"), ("???", "run"), ("-a-", "a")]
)
def test_a_run_is_named_by_its_job_and_the_time(tmp_path: Path, job: str, name: str) -> None:
    run = RunFolder.create(job, root=tmp_path / "runs")
    assert re.fullmatch(rf"{name}-\d{{8}}-\d{{6}}", run.path.name)
    assert sorted(p.name for p in run.path.iterdir()) == ["checkpoints", "logs", "tb"]


def test_names_in_one_second_are_unique(tmp_path: Path) -> None:
    paths = [RunFolder.create("job", root=tmp_path).path for _ in range(6)]
    assert len(set(paths)) == 6
    assert any(path.name.endswith("-2") for path in paths)


def test_a_requested_folder(tmp_path: Path) -> None:
    wanted = tmp_path / "deep" / "down"
    assert RunFolder.create("job", path=wanted).path == wanted
    (tmp_path / "empty").mkdir()
    assert RunFolder.create("job", path=tmp_path / "empty").path.is_dir()
    with pytest.raises(RunFolderError, match=f"not empty.*manyhands resume {wanted}"):
        RunFolder.create("job", path=wanted)


def test_a_folder_that_can_not_be_created(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path in (tmp_path / "file", tmp_path / "file" / "run"):
        with pytest.raises(RunFolderError, match=f"{path} can't be created: .*--run-dir"):
            RunFolder.create("job", path=path)
    with pytest.raises(RunFolderError, match=r"can't be created: .*--run-dir"):
        RunFolder.create("job", root=tmp_path / "file" / "runs")


def test_opening_a_folder_that_is_not_a_run(tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match=r"There is no run .*none.*manyhands list"):
        RunFolder.open(tmp_path / "none")
    with pytest.raises(RunFolderError, match=r"is not a run: it has no config\.json.*list"):
        RunFolder.open(tmp_path)


def test_config_and_summary_come_back(tmp_path: Path) -> None:
    run = RunFolder.create("job", path=tmp_path / "run")
    assert run.summary is None
    run.write_config({"settings": {"lr": "0.1"}})
    run.write_summary({"outcome": "finished"})
    again = RunFolder.open(run.path)
    assert again.config == {"settings": {"lr": "0.1"}}
    assert again.summary == {"outcome": "finished"}
    again.note_fields({"lr": 0.1, "epochs": 3}, {"lr": "0.1"})
    assert again.config == {
        "settings": {"lr": "0.1"},
        "fields": {
            "lr": {"value": 0.1, "from": "--set"},
            "epochs": {"value": 3, "from": "job file"},
        },
    }
    again.forget_summary()
    again.forget_summary()
    assert again.summary is None


@pytest.mark.parametrize("text", ["{", "[]", "3"])
def test_a_config_that_is_not_ours(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(RunFolderError, match=r"config\.json"):
        _ = RunFolder.open(tmp_path).config


def test_a_run_of_another_user_warns_whose_code_will_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = RunFolder.create("job", path=tmp_path / "run")
    job = tmp_path / "job.py"
    job.touch()
    run.write_config(
        {
            "job": {"file": str(job), "reference": "job.py", "sha256": ""},
            "settings": {},
            "options": {},
        }
    )
    resume = ["resume", str(run.path), "--checkpoint", "step-9"]
    assert main(resume) == 2
    assert "warning" not in capsys.readouterr().err
    owner = pwd.getpwuid(os.geteuid()).pw_name
    monkeypatch.setattr(os, "geteuid", lambda: 54321)
    assert main(resume) == 2
    first, second = capsys.readouterr().err.splitlines()
    assert first.startswith(f"warning: {run.path} was made by {owner}, not by you")
    assert first.endswith(f"its job file is code, and is run as you: {job}")
    assert second == f"error: --checkpoint step-9: {run.path} has no checkpoint."


def test_runs_are_listed_oldest_first(tmp_path: Path) -> None:
    for age, name in enumerate(["b", "c", "a"]):
        run = RunFolder.create(name, path=tmp_path / name)
        run.write_config({})
        os.utime(run.path / "config.json", (1000 - age, 1000 - age))
    (tmp_path / "no-run").mkdir()
    assert [run.path.name for run in runs_in(tmp_path)] == ["a", "c", "b"]
    assert runs_in(tmp_path / "none") == []


HOLDER = """
import sys, time
from pathlib import Path
from manyhands.runs.folder import RunFolder
run = RunFolder(Path(sys.argv[1]))
run.lock()
print("held", flush=True)
time.sleep(60)
"""


def test_one_coordinator_at_a_time(tmp_path: Path) -> None:
    run = RunFolder.create("job", path=tmp_path / "run")
    assert not run.locked
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(run.path)], stdout=subprocess.PIPE, text=True
    ) as holder:
        try:
            assert holder.stdout is not None
            assert holder.stdout.readline() == "held\n"
            assert run.locked
            with pytest.raises(RunFolderError, match=f"right now, by process {holder.pid}"):
                run.lock()
            run.discard()
            assert run.path.is_dir(), "somebody trains in it"
        finally:
            holder.kill()
            holder.wait(timeout=30)
    deadline = time.monotonic() + 10
    while run.locked and time.monotonic() < deadline:
        time.sleep(0.01)
    run.lock()  # the kernel let go
    assert run.locked
    run.unlock()
    run.unlock()
    assert not run.locked


def test_a_folder_that_is_gone_can_not_be_locked(tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match="none can't be written: No such file"):
        RunFolder(tmp_path / "none").lock()


def test_discard_leaves_nothing(tmp_path: Path) -> None:
    run = RunFolder.create("job", path=tmp_path / "run")
    (run.logs / "worker-0.log").write_text("x")
    run.lock()
    run.unlock()
    run.discard()
    assert list(tmp_path.iterdir()) == []
    run.discard()


def test_a_folder_that_was_deleted_or_moved_is_gone(tmp_path: Path) -> None:
    run = RunFolder.create("job", path=tmp_path / "run")
    assert not run.is_gone
    run.lock()
    try:
        assert not run.is_gone
        (tmp_path / "run").rename(tmp_path / "elsewhere")
        assert run.is_gone
        RunFolder.create("job", path=tmp_path / "run")
        assert run.is_gone
    finally:
        run.unlock()
