"""Real kills of real processes: the cause is named, nobody is left over, nothing that was saved is lost."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from manyhands.runs import checkpoints
from manyhands.runs.folder import RunFolder
from manyhands.testing import harness
from manyhands.testing.conformance import assert_once_an_epoch, assert_same_bits

SLOW = {"pause_s": 0.05}
MINE = "from manyhands.testing.jobs import Regression\nclass Mine(Regression): pass\n"


@pytest.mark.parametrize("control", ["unix", pytest.param("tcp", marks=pytest.mark.long)])
def test_no_member_outlives_a_killed_coordinator(tmp_path: Path, control: str) -> None:
    run = tmp_path / "run"
    arguments = harness.train_arguments(
        *("Regression", run, "--control", control),
        strategy="allreduce",
        workers=2,
        loader_processes=1,
        epochs=50,
        **SLOW,
    )
    with harness.command(*arguments, run=run) as running:
        running.wait_for_step(3)
        pids = family(list(running.pids().values()))
        assert len(pids) >= 4, "two workers, each with a loader"
        running.signal(signal.SIGKILL)
        assert running.wait().code == -signal.SIGKILL
    assert harness.gone(pids)
    resumed = harness.resume(run, "--set", "pause_s=0", "--set", "epochs=3")
    assert resumed.code == 0, resumed.err
    assert_once_an_epoch(resumed)


def test_a_member_killed_while_it_starts_is_named(tmp_path: Path) -> None:
    run = tmp_path / "run"
    arguments = harness.train_arguments("Regression", run, strategy="allreduce", workers=2)
    with harness.command(*arguments, run=run) as running:
        running.wait_for(
            lambda events: len([e for e in events if e["event"] == "MemberStarted"]) == 2
        )
        pids = running.pids()
        running.kill("worker-1")
        done = running.wait()
    assert done.code == 128 + signal.SIGKILL
    assert "worker-1 failed: killed by SIGKILL" in done.err
    assert harness.gone(list(pids.values()))


def test_all_begin_again_from_the_beginning_where_nothing_was_saved(
    members: ModuleType, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    arguments = harness.train_arguments("Regression", run, strategy="single", **SLOW)
    with members.command(*arguments, run=run) as running:
        running.wait_for_step(2)
        running.kill("worker-0")
        done = running.wait()
    assert done.code == 0, f"{done.out}\n{done.err}"
    (resumed,) = done.of("Resumed")
    assert (resumed["step"], resumed["checkpoint"]) == (0, None)
    assert "all members restart from the beginning: nothing was saved" in done.out
    assert "1 lost, 0 replaced, all restarted once" in done.out
    assert_once_an_epoch(done)


def test_a_resumed_run_that_starts_again_keeps_its_checkpoints(
    members: ModuleType, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    assert members.train("Regression", run, strategy="single", epochs=1).code == 0
    more = ("--set", "epochs=4", "--set", "pause_s=0.05", "--schedule", "stretch")
    with members.command("resume", str(run), *more, run=run) as running:
        running.wait_for(
            lambda events: len([e for e in events if e["event"] == "CheckpointSaved"]) > 1
        )
        running.kill("worker-0")
        done = running.wait()
    assert done.code == 0, f"{done.out}\n{done.err}"
    assert done.of("Resumed")[-1]["step"] > done.of("Resumed")[0]["step"]
    assert not list((run / "checkpoints").glob(".*"))
    assert_once_an_epoch(done, epochs=4)


def test_a_job_that_is_broken_by_then_ends_it_and_nothing_is_lost(tmp_path: Path) -> None:
    """Its mistake is a person's, as before the start, but something was trained: the folder stays."""
    job, run = tmp_path / "job.py", tmp_path / "run"
    job.write_text(MINE)
    arguments = harness.train_arguments(
        job, run, "--checkpoint-every", "2", strategy="single", **SLOW
    )
    with harness.command(*arguments, run=run) as running:
        running.wait_for(lambda events: any(e["event"] == "CheckpointSaved" for e in events))
        job.write_text("this is no Python\n")
        running.kill("worker-0")
        done = running.wait()
    assert done.code == 2
    assert "line 1: invalid syntax" in done.err
    assert f"continue with:  manyhands resume {run}" in done.out
    job.write_text(MINE)
    resumed = harness.resume(run)
    assert resumed.code == 0, resumed.err
    assert_once_an_epoch(resumed)


@pytest.mark.long
def test_all_begin_again_only_so_many_times(tmp_path: Path) -> None:
    run = tmp_path / "run"
    arguments = harness.train_arguments(
        "Regression", run, "--max-restarts", "1", strategy="single", epochs=50, **SLOW
    )
    with harness.command(*arguments, run=run) as running:
        running.wait_for_step(2)
        running.kill("worker-0")
        running.wait_for(lambda events: any(e["event"] == "Recovered" for e in events))
        running.kill("worker-1")
        done = running.wait()
    assert done.code == 128 + signal.SIGKILL
    assert "worker-1 failed: killed by SIGKILL" in done.err


@pytest.mark.long
def test_nobody_begins_again_over_checkpoints_that_do_not_read(tmp_path: Path) -> None:
    run = tmp_path / "run"
    arguments = harness.train_arguments("Regression", run, strategy="single", epochs=50, **SLOW)
    with harness.command(*arguments, run=run) as running:
        running.wait_for(lambda events: any(e["event"] == "CheckpointSaved" for e in events))
        running.kill("worker-0", signal.SIGSTOP)
        for file in (run / "checkpoints").glob("step-*/*.distcp"):
            file.write_bytes(b"")
        running.kill("worker-0")
        done = running.wait()
    assert done.code == 1
    assert "No checkpoint of this run is intact" in done.err
    assert list((run / "checkpoints").glob("step-*"))


@pytest.mark.long
def test_as_many_workers_begin_again_as_were_asked_for_last(tmp_path: Path) -> None:
    run = tmp_path / "run"
    arguments = harness.train_arguments(
        "Regression", run, strategy="allreduce", workers=1, epochs=30, **SLOW
    )
    with harness.command(*arguments, run=run) as running:
        running.wait_for_step(2)
        RunFolder.open(run).request(2)
        running.wait_for(lambda events: len(views(events)) == 2)
        for member in views(running.events())[-1]["members"]:
            running.kill(member)
        done = running.wait()
    assert done.code == 0, f"{done.out}\n{done.err}"
    assert len(views(done.events)[-1]["members"]) == 2
    assert_once_an_epoch(done, epochs=30)


def views(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [event for event in events if event["event"] == "ViewChanged"]


@pytest.mark.parametrize(
    ("number", "code"),
    [pytest.param(signal.SIGINT, 130, marks=pytest.mark.long), (signal.SIGTERM, 75)],
)
def test_a_signal_while_all_begin_again_ends_the_run(
    tmp_path: Path, number: signal.Signals, code: int
) -> None:
    run = tmp_path / "run"
    arguments = harness.train_arguments("Regression", run, strategy="single", epochs=50, **SLOW)
    with harness.command(*arguments, run=run) as running:
        running.wait_for(lambda events: any(e["event"] == "CheckpointSaved" for e in events))
        running.kill("worker-0")
        running.wait_for(lambda events: any(e["event"] == "MemberLost" for e in events))
        running.signal(number)
        done = running.wait()
    assert done.code == code
    assert harness.gone(list(running.pids().values()))
    summary = RunFolder.open(run).summary
    assert summary is not None
    assert (summary["steps"], summary["checkpoint"]) == (None, "checkpoints/step-7")
    assert summary["outcome"] == ("interrupted" if code == 130 else "preempted")
    if code == 75:
        return
    resumed = harness.resume(run, "--set", "pause_s=0")
    assert resumed.code == 0, resumed.err
    assert_once_an_epoch(resumed, epochs=50)


def test_a_frozen_worker_does_not_freeze_the_stop(tmp_path: Path) -> None:
    run = tmp_path / "run"
    arguments = harness.train_arguments(
        "Regression", run, strategy="allreduce", workers=2, epochs=50, **SLOW
    )
    with harness.command(*arguments, run=run) as running:
        running.wait_for_step(3)
        pids = running.pids()
        running.kill("worker-1", signal.SIGSTOP)
        running.signal(signal.SIGINT)
        running.wait_for(lambda events: any(e["event"] == "Stopping" for e in events))
        running.signal(signal.SIGINT)
        done = running.wait()
    assert done.code == 130
    assert harness.gone(list(pids.values()))


def test_an_exception_in_a_job_is_shown_with_its_log(tmp_path: Path) -> None:
    job = tmp_path / "job.py"
    job.write_text(
        "from dataclasses import dataclass\n"
        "from manyhands.testing.jobs import Regression\n"
        "@dataclass\n"
        "class Explodes(Regression):\n"
        "    def loss(self, output, batch):\n"
        "        raise ValueError('the loss exploded')\n"
    )
    done = harness.train(job, tmp_path / "run", strategy="allreduce", workers=2)
    assert done.code == 1
    (failed,) = done.of("MemberFailed")
    assert "ValueError: the loss exploded" in done.err
    first, *_ = done.err.partition("Traceback (most recent call last):\n")[2].splitlines()
    assert first.endswith('job.py", line 6, in loss'), "it begins at the user's line"
    assert f"{failed['log']} (full traceback)" in done.err
    log = Path(failed["log"]).read_text()
    assert "the loss exploded" in log
    assert "manyhands/worker/loop.py" in log


def test_a_jobs_own_exit_code_is_handed_on(tmp_path: Path) -> None:
    job = tmp_path / "job.py"
    job.write_text(
        "import sys\n"
        "from dataclasses import dataclass\n"
        "from manyhands.testing.jobs import Regression\n"
        "@dataclass\n"
        "class Leaves(Regression):\n"
        "    def loss(self, output, batch):\n"
        "        sys.exit(17)\n"
    )
    assert harness.train(job, tmp_path / "run").code == 17


@pytest.mark.parametrize(
    ("number", "code"),
    [
        pytest.param(signal.SIGINT, 130, marks=pytest.mark.long),
        pytest.param(signal.SIGTERM, 75, marks=pytest.mark.long),
        (signal.SIGUSR1, 75),
    ],
)
def test_a_stop_saves_and_resumes_on_another_number_of_workers(
    tmp_path: Path, number: signal.Signals, code: int
) -> None:
    run = tmp_path / "run"
    arguments = harness.train_arguments("Regression", run, strategy="allreduce", workers=2, **SLOW)
    with harness.command(*arguments, run=run) as running:
        running.wait_for_step(4)
        pids = running.pids()
        if number == signal.SIGUSR1:  # some schedulers warn every process of a job
            for pid in pids.values():
                os.kill(pid, number)
        running.signal(number)
        if number == signal.SIGUSR1:  # a warning, which the order follows
            running.wait_for(lambda events: any(e["event"] == "Stopping" for e in events))
            running.signal(signal.SIGTERM)
        stopped = running.wait()
    assert stopped.code == code
    assert not stopped.of("MemberLost")
    assert harness.gone(list(pids.values()))
    last = stopped.steps[-1]["step"]
    assert checkpoints.steps(run)[-1] == last, "every committed step is in the checkpoint"
    assert f"manyhands resume {run}" in stopped.out
    summary = json.loads((run / "summary.json").read_text())
    assert summary["outcome"] == ("interrupted" if code == 130 else "preempted")

    resumed = harness.resume(run, "--workers", "3", "--set", "pause_s=0")
    assert resumed.code == 0, resumed.err
    assert_once_an_epoch(resumed)
    reference = harness.train("Regression", tmp_path / "reference")
    assert resumed.losses == pytest.approx(reference.losses, rel=1e-5)


def test_a_damaged_checkpoint_is_passed_over_and_kept(members: ModuleType, tmp_path: Path) -> None:
    run = tmp_path / "run"
    whole = members.train("Regression", run, "--keep", "10")
    assert whole.code == 0
    expected = whole.state()
    newest = checkpoints.final(run, checkpoints.steps(run)[-1])
    data = newest / "__0_0.distcp"
    data.write_bytes(data.read_bytes()[:-100])
    resumed = members.resume(run, "--set", "epochs=3")
    assert resumed.code == 0, resumed.err
    assert f"{data} has" in resumed.out
    assert "was skipped" in resumed.out
    assert any(path.name.startswith(f".{newest.name}.aside") for path in newest.parent.iterdir())
    assert_same_bits(resumed.state(), expected)
    assert_once_an_epoch(resumed)


def test_when_no_checkpoint_is_sound_nothing_is_touched(
    members: ModuleType, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    assert members.train("Regression", run).code == 0
    for step in checkpoints.steps(run):
        (checkpoints.final(run, step) / "manifest.json").write_text("{")
    before = sorted(os.listdir(run / "checkpoints"))
    resumed = members.resume(run, "--set", "epochs=4")
    assert resumed.code == 1
    assert "No checkpoint of this run is intact" in resumed.err
    assert sorted(os.listdir(run / "checkpoints")) == before


def test_a_full_disk_loses_nothing_that_was_saved(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", str(disk)], capture_output=True
    )
    if mounted.returncode != 0:
        pytest.skip("a small disk needs the right to mount a tmpfs")
    try:
        run = disk / "run"
        # About 1.5 MB a checkpoint with its momentum, room for some ten of them.
        arguments = harness.train_arguments(
            *("Regression", run, "--checkpoint-every", "1", "--keep", "100"),
            width=20_000,
            epochs=4,
        )
        with harness.command(*arguments, run=run) as running:
            done = running.wait()
        assert done.code == 1, done.out
        assert "could not be saved" in done.out
        assert "no space left" in done.out
        sound = [checkpoints.verify(checkpoints.final(run, s)).step for s in checkpoints.steps(run)]
        assert len(sound) >= 3
        assert json.loads((run / "summary.json").read_text())["outcome"] == "failed"
        assert "no space left" in done.err
        for step in sound[:-1]:
            shutil.rmtree(checkpoints.final(run, step))
        resumed = harness.resume(run, "--checkpoint-every", "0", "--keep", "1")
        assert resumed.code == 0, resumed.err
        assert resumed.of("Resumed")[-1]["step"] == sound[-1]
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def family(pids: list[int]) -> list[int]:
    """The processes and all their descendants."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(entry.read_text().rpartition(")")[2].split()[1])
        except (FileNotFoundError, ProcessLookupError):
            continue
        children.setdefault(parent, []).append(int(entry.parent.name))
    found = list(pids)
    for pid in found:
        found.extend(children.get(pid, []))
    return found


@pytest.mark.long
@pytest.mark.parametrize("count", [2, 3])
def test_several_of_four_die_at_once(count: int, tmp_path: Path) -> None:
    """All that is left goes on, and those who take the places of the dead find it."""
    run = tmp_path / "run"
    arguments = harness.train_arguments(
        *("Regression", run, "--checkpoint-every", "5"),
        strategy="allreduce",
        workers=4,
        epochs=12,
        pause_s=0.05,
    )
    with harness.command(*arguments, run=run) as running:
        running.wait_for_step(4)
        for number in range(1, 1 + count):
            running.kill(f"worker-{number}")
        running.wait_for(lambda events: any(e["event"] == "Recovered" for e in events))
        done = running.wait()
    assert done.code == 0, f"{done.out}\n{done.err}"
    assert len(done.of("MemberLost")) == count
    assert_once_an_epoch(done, epochs=12)
    alone = harness.train("Regression", tmp_path / "alone", epochs=12)
    assert done.losses[10:] == pytest.approx(alone.losses[10:], rel=1e-5)
    for step in checkpoints.steps(run):
        checkpoints.verify(checkpoints.final(run, step))
