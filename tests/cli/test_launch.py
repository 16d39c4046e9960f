"""`manyhands launch`: files that are written, never written over, and mistakes that are refused here."""

from __future__ import annotations

import argparse
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from manyhands.cli import train
from manyhands.cli.main import main

EXAMPLES = Path(__file__).parents[2] / "examples"
DIGITS = str(EXAMPLES / "digits.py")
IMAGE = ["--image", "train:1.0"]
DEDICATED = ["--strategy", "ps:sync(placement=dedicated,servers=1)"]


@dataclass(frozen=True)
class Done:
    returncode: int
    stdout: str
    stderr: str


Launch = Callable[..., Done]


@pytest.fixture
def launch(capfd: pytest.CaptureFixture[str]) -> Launch:
    """The command in this process: it starts nothing, and a fresh Python for each case would be slow."""

    def run(*arguments: str) -> Done:
        try:
            code = main(["launch", *arguments])
        except SystemExit as end:
            code = int(end.code or 0)
        return Done(code, *capfd.readouterr())

    return run


def test_a_script_for_slurm(launch: Launch, tmp_path: Path) -> None:
    arguments = ["slurm", DIGITS, "--nodes", "3", "--gpus", "a100:4", "--strategy", "ps:sync"]
    arguments += ["--workers", "12", "--set", "lr=0.05", "--set", "hidden=8", "--no-equal-shares"]
    printed = launch(*arguments)
    assert (printed.returncode, printed.stderr) == (0, "")
    for part in (
        "#SBATCH --nodes=3\n#SBATCH --ntasks-per-node=4\n",
        f"manyhands train {DIGITS} --on env",
        "--strategy ps:sync\n",
        "--set lr=0.05\n        --set hidden=8\n",
        "--no-equal-shares\n",
    ):
        assert part in printed.stdout
    file = tmp_path / "digits.sbatch"
    written = launch(*arguments, "--output", str(file))
    assert file.read_text() == printed.stdout
    assert written.stdout == f"{file} is written. Submit it with:  sbatch {file}\n"
    assert subprocess.run(["bash", "-n", str(file)], check=False).returncode == 0


def test_a_file_that_is_there_is_not_written_over(launch: Launch, tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text("mine")
    arguments = ["kubernetes", "job.py", *IMAGE, "--output", str(file)]
    done = launch(*arguments)
    assert done.returncode == 2
    assert "it is there already" in done.stderr
    assert file.read_text() == "mine"
    assert launch(*arguments, "--force").returncode == 0
    assert "kind: Job" in file.read_text()


def test_a_manifest_for_kubernetes_has_a_name_that_is_allowed_there(launch: Launch) -> None:
    done = launch("kubernetes", "/opt/jobs/My_Job 2.py:Large", *IMAGE, "--pods", "3", "--gpus", "2")
    assert (done.returncode, done.stderr) == (0, "")
    assert "name: my-job-2-large\n" in done.stdout
    assert "exec manyhands train '/opt/jobs/My_Job 2.py:Large' --on env" in done.stdout
    assert 'name: MANYHANDS_SLOTS\n              value: "2"' in done.stdout
    numbered = launch("kubernetes", "42.py", *IMAGE)
    assert "name: run-42\n" in numbered.stdout


def test_a_ray_job_asks_for_a_worker_in_every_slot(launch: Launch) -> None:
    asked = [*IMAGE, "--kind", "rayjob", "--pods", "3"]
    done = launch("kubernetes", "job.py", *asked, "--slots", "2")
    assert done.returncode == 0
    assert "kind: RayJob" in done.stdout
    assert "--workers 6\n" in done.stdout
    assert "secretKeyRef" not in done.stdout, "Ray hands the key to the agents"
    done = launch("kubernetes", "job.py", *asked, "--workers", "2:3")
    assert "--workers 2:3\n" in done.stdout
    assert "--workers 3\n" not in done.stdout


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        (["slrum", DIGITS], "there is no scheduler 'slrum'; did you mean 'slurm'?"),
        (["slurm", "nowhere.py"], "There is no file nowhere.py"),
        (["slurm", DIGITS, "--nodes", "-2"], "--nodes -2: it must be at least 1"),
        (["slurm", DIGITS, "--strategy", "alreduce"], "did you mean 'allreduce'?"),
        (["slurm", DIGITS, "--set", "lr"], "write it as NAME=VALUE"),
        (["slurm", DIGITS, "--workers", "3"], "--workers 3: this file starts 2 tasks"),
        (["slurm", DIGITS, "--workers", "0"], "at least 1 worker"),
        (["slurm", DIGITS, "--keep", "0"], "--keep 0: it must be at least 1"),
        (["slurm", DIGITS, "--device", "tpu"], "allowed are auto, cpu, cuda and cuda:N"),
        (
            ["slurm", DIGITS, "--output", "/nowhere/x"],
            "can't be written: No such file or directory",
        ),
        (["kubernetes", "job.py"], "--image"),
        (["kubernetes", "job.py", *IMAGE, "--name", "My Job"], "small letters, digits and -"),
        (["kubernetes", "job.py", *IMAGE, "--pods", "0"], "--pods 0"),
        (
            ["kubernetes", "job.py", *IMAGE, "--pods", "2", "--slots", "2", "--workers", "5"],
            "--workers 5: this file starts 4 slots",
        ),
        (
            ["kubernetes", "job.py", *IMAGE, "--workers", "2", *DEDICATED],
            "--workers 2 and 1 servers of their own: this file starts 2 slots",
        ),
    ],
)
def test_mistakes_are_refused_before_anything_is_submitted(
    launch: Launch, arguments: list[str], wanted: str
) -> None:
    done = launch(*arguments)
    assert done.returncode == 2
    assert wanted in done.stderr
    assert done.stdout == ""
    assert "Traceback" not in done.stderr


def test_what_is_passed_on_is_what_train_takes(launch: Launch) -> None:
    words = ["--strategy", "ps:sync", "--workers", "2:4", "--device", "cuda", "--set", "lr=0.1"]
    words += ["--scale-batch", "sqrt", "--threads", "2", "--max-restarts", "5", "--keep", "2"]
    words += ["--checkpoint-every", "9", "--scale-reference", "3", "--scale-warmup", "4"]
    words += ["--equal-shares", "--no-trust-network", "--quiet"]
    done = launch("kubernetes", "job.py", *IMAGE, *words)
    command = done.stdout.partition("exec manyhands train job.py --on env")[2]
    given = command.partition("volumeMounts")[0].replace("\\\n", " ").split()[2:]
    parser = argparse.ArgumentParser()
    train.add_arguments(parser)
    assert parser.parse_args(["job.py", *given]) == parser.parse_args(["job.py", *words])
    assert len(given) == len(words)


def test_a_range_of_workers_may_be_larger_than_what_is_there_at_first(launch: Launch) -> None:
    done = launch("slurm", DIGITS, "--workers", "2:8")
    assert done.returncode == 0
    assert "--workers 2:8\n" in done.stdout


def test_help_has_examples(launch: Launch) -> None:
    for scheduler in ([], ["slurm"], ["kubernetes"]):
        done = launch(*scheduler, "--help")
        assert done.returncode == 0
        assert "examples:" in done.stdout
