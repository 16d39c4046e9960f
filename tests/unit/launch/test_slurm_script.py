"""The script for sbatch, run for real with fake programs of Slurm."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from fake_slurm import Slurm

from manyhands.errors import UsageError
from manyhands.hosts.discovery import detect
from manyhands.launch import SlurmJob

AWKWARD = ["--set", 'text=it\'s a "$HOME" `id` \\ ; $(id) *']


@pytest.fixture
def slurm(tmp_path: Path) -> Slurm:
    return Slurm(tmp_path)


def script(slurm: Slurm, **more: Any) -> str:
    settings: dict[str, Any] = {"job": "my jobs/job.py:Large", "name": "job", "nodes": 2}
    return SlurmJob(**(settings | {"setup": (slurm.setup,)} | more)).script()


def all_waiting(slurm: Slurm, process: subprocess.Popen[str], start: int, count: int) -> None:
    deadline = time.monotonic() + 60
    while len(slurm.tasks(start)) < count:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_every_task_runs_the_same_command_with_its_own_rank(slurm: Slurm) -> None:
    text = script(slurm, tasks_per_node=2, flags=("--workers", "4", *AWKWARD, "--quiet"))
    with slurm.submitted(text, {"codes": [0] * 4, "waits": False}) as process:
        _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (0, "")
    tasks = slurm.tasks(0)
    specs = [detect(task["environ"]) for task in tasks]
    assert [(spec.me.rank, spec.size, spec.me.host, spec.host) for spec in specs] == [
        (0, 4, "node0", "node0"),
        (1, 4, "node0", "node0"),
        (2, 4, "node1", "node0"),
        (3, 4, "node1", "node0"),
    ]
    wanted = ["train", "my jobs/job.py:Large", "--on", "env", "--run-dir", "runs/job-4711"]
    wanted += ["--workers", "4", *AWKWARD, "--quiet"]
    assert all(task["argv"] == wanted for task in tasks)
    assert all(task["environ"]["MANYHANDS_KEY"] == "sesame" for task in tasks)
    assert not any("sesame" in word for task in tasks for word in task["argv"])
    assert "sesame" not in text
    assert not (slurm.folder / "runs" / "job-4711.started").exists()


def test_a_warned_job_is_requeued_and_resumes(slurm: Slurm) -> None:
    plans: list[dict[str, Any]] = [
        {"codes": [75, 75], "waits": True, "outcome": "preempted"},
        # One task was killed on the way; the run was saved all the same.
        {"codes": [75, 137], "waits": True, "outcome": "preempted"},
        {"codes": [0, 137], "waits": False, "outcome": "finished"},
    ]
    with slurm.submitted(script(slurm), *plans) as process:
        for start in range(2):
            all_waiting(slurm, process, start, 2)
            process.send_signal(signal.SIGUSR1)
        _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (0, "")
    assert slurm.tasks(0)[0]["argv"][0] == "train"
    for start in (1, 2):
        for task in slurm.tasks(start):
            assert task["argv"] == ["resume", "runs/job-4711", "--on", "env"]
    assert not (slurm.state / "job-3").exists()


def test_the_number_of_requeues_is_limited(slurm: Slurm) -> None:
    again: dict[str, Any] = {"codes": [75], "waits": False, "outcome": "preempted"}
    text = script(slurm, nodes=1, requeues=1)
    with slurm.submitted(text, again, again, again) as process:
        _, err = process.communicate(timeout=60)
    assert process.returncode == 75
    assert "manyhands resume runs/job-4711" in err
    assert (slurm.state / "job-1").exists()
    assert not (slurm.state / "job-2").exists()


@pytest.mark.parametrize(("code", "outcome"), [(1, None), (2, None), (137, "failed")])
def test_the_exit_code_of_a_failure_is_kept(slurm: Slurm, code: int, outcome: str | None) -> None:
    plan: dict[str, Any] = {"codes": [code, 0], "waits": False}
    if outcome:
        plan["outcome"] = outcome
    with slurm.submitted(script(slurm), plan) as process:
        process.communicate(timeout=60)
    assert process.returncode == code
    assert not (slurm.state / "job-1").exists()


def test_the_summary_of_an_earlier_start_is_ignored(slurm: Slurm) -> None:
    """A run that was preempted, and a second start that fails at once: it would be queued for ever."""
    run = slurm.folder / "kept"
    run.mkdir()
    (run / "config.json").write_text("{}")
    (run / "summary.json").write_text('{\n  "outcome": "preempted"\n}')
    an_hour_ago = time.time() - 3600
    os.utime(run / "summary.json", (an_hour_ago, an_hour_ago))
    text = script(slurm, nodes=1, run_dir=str(run))
    with slurm.submitted(text, {"codes": [1], "waits": False}, run=str(run)) as process:
        process.communicate(timeout=60)
    assert process.returncode == 1
    assert slurm.tasks(0)[0]["argv"][0] == "resume"


@pytest.mark.parametrize(
    ("mode", "wanted"),
    [(None, "there is no key in"), (0o644, "chmod 600"), (0o660, "chmod 600")],
)
def test_without_a_private_key_nothing_is_started(
    slurm: Slurm, mode: int | None, wanted: str
) -> None:
    if mode is None:
        slurm.key_file.unlink()
    else:
        slurm.key_file.chmod(mode)
    with slurm.submitted(script(slurm), {"codes": [0, 0], "waits": False}) as process:
        _, err = process.communicate(timeout=60)
    assert process.returncode == 2
    assert wanted in err
    assert slurm.tasks(0) == []


def test_the_command_for_a_key_works_with_a_space_in_the_path(slurm: Slurm) -> None:
    where = slurm.folder / "my keys" / "key"
    text = script(slurm, key_file=str(where))
    with slurm.submitted(text, {"codes": [0, 0], "waits": False}) as process:
        _, err = process.communicate(timeout=60)
    typed = err.splitlines()[1].replace("manyhands key", "echo open")
    subprocess.run(["bash", "-c", typed], check=True)
    assert where.read_text() == "open\n"
    assert where.stat().st_mode & 0o777 == 0o600


def test_sbatch_options_precede_all_commands(slurm: Slurm) -> None:
    text = script(
        slurm,
        tasks_per_node=8,
        cpus_per_task=4,
        gpus_per_node="a100:8",
        memory="64G",
        time="2-12:00:00",
        partition="gpu,long",
        account="lab-42",
        options=("constraint=a100", "exclusive"),
        warn_s=300,
    )
    head = re.split(r"^(?!#)", text, maxsplit=1, flags=re.MULTILINE)[0]
    asked = [line.removeprefix("#SBATCH ") for line in head.splitlines() if "#SBATCH" in line]
    assert asked == [
        "--job-name=job",
        "--nodes=2",
        "--ntasks-per-node=8",
        "--cpus-per-task=4",
        "--gpus-per-node=a100:8",
        "--mem=64G",
        "--time=2-12:00:00",
        "--partition=gpu,long",
        "--account=lab-42",
        "--constraint=a100",
        "--exclusive",
        "--output=job-%j.log",
        "--open-mode=append",
        "--requeue",
        "--signal=B:USR1@300",
    ]
    assert text.count("#SBATCH") == len(asked)


@pytest.mark.parametrize(
    ("change", "wanted"),
    [
        ({"nodes": 0}, "--nodes 0: it must be at least 1"),
        ({"nodes": -3}, "--nodes -3"),
        ({"tasks_per_node": 0}, "--tasks-per-node 0"),
        ({"cpus_per_task": -1}, "--cpus -1"),
        ({"warn_s": 0}, "--warn 0"),
        ({"requeues": -1}, "--requeues -1"),
        ({"name": "two words"}, "--name 'two words': it must look like"),
        ({"name": ""}, "--name ''"),
        ({"gpus_per_node": "many"}, "--gpus 'many': it must look like 4 or a100:4"),
        ({"gpus_per_node": "0"}, "--gpus '0'"),
        ({"memory": "64 GB"}, "--memory '64 GB': it must look like 64G"),
        ({"time": "tomorrow"}, "--time 'tomorrow'"),
        ({"time": "1-"}, "--time '1-'"),
        ({"partition": "a b"}, "--partition 'a b'"),
        ({"account": "x\n#SBATCH --uid=0"}, "--account"),
        ({"options": ("a b",)}, "--sbatch 'a b'"),
        ({"options": ("comment=x\nrm -rf /",)}, "--sbatch"),
        ({"job": "job.py\nid"}, "line breaks and control characters are not allowed"),
        ({"job": " "}, "JOB is empty"),
        ({"setup": ("a\nb",)}, "--setup"),
        ({"run_dir": ""}, "--run-dir is empty"),
        ({"flags": ("--set", "text=a\nb")}, "The value 'text=a\\nb': line breaks"),
    ],
)
def test_invalid_values_are_refused(slurm: Slurm, change: dict[str, Any], wanted: str) -> None:
    with pytest.raises(UsageError) as caught:
        script(slurm, **change)
    assert wanted in str(caught.value)
