"""`manyhands launch`: files that are written, never overwritten, and mistakes that are refused early."""

from __future__ import annotations

import shlex
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

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
    """Run the command in this process: it starts nothing, and a new Python for each case would be slow."""

    def run(*arguments: str) -> Done:
        try:
            code = main(["launch", *arguments])
        except SystemExit as end:
            code = int(end.code or 0)
        return Done(code, *capfd.readouterr())

    return run


def test_a_script_for_slurm(launch: Launch, tmp_path: Path) -> None:
    arguments = ["slurm", DIGITS, "--nodes", "3", "--gpus", "a100:4"]
    passed = ["--", "--strategy", "ps:sync", "--workers", "12", "--set", "lr=0.05"]
    passed += ["--set", "hidden=8", "--no-equal-shares"]
    printed = launch(*arguments, *passed)
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
    written = launch(*arguments, "--output", str(file), *passed)
    assert file.read_text() == printed.stdout
    assert written.stdout == f"Wrote {file}. Submit it with:  sbatch {file}\n"
    assert subprocess.run(["bash", "-n", str(file)], check=False).returncode == 0


def test_an_existing_file_is_not_overwritten(launch: Launch, tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text("mine")
    arguments = ["kubernetes", "job.py", *IMAGE, "--output", str(file)]
    done = launch(*arguments)
    assert done.returncode == 2
    assert "the file exists" in done.stderr
    assert file.read_text() == "mine"
    assert launch(*arguments, "--force").returncode == 0
    assert "kind: Job" in file.read_text()


def test_a_manifest_for_kubernetes_has_a_name_that_is_allowed_there(launch: Launch) -> None:
    done = launch("kubernetes", "/opt/jobs/My_Job 2.py:Large", *IMAGE, "--pods", "3", "--gpus", "2")
    assert (done.returncode, done.stderr) == (0, "")
    assert 'name: "my-job-2-large"\n' in done.stdout
    assert "exec manyhands train '/opt/jobs/My_Job 2.py:Large' --on env" in done.stdout
    assert 'name: MANYHANDS_SLOTS\n              value: "2"' in done.stdout
    numbered = launch("kubernetes", "42.py", *IMAGE)
    assert 'name: "run-42"\n' in numbered.stdout


def test_a_ray_job_asks_for_a_worker_in_every_slot(launch: Launch) -> None:
    asked = [*IMAGE, "--kind", "rayjob", "--pods", "3"]
    done = launch("kubernetes", "job.py", *asked, "--slots", "2")
    assert done.returncode == 0
    assert "kind: RayJob" in done.stdout
    assert "--workers 6\n" in done.stdout
    assert "secretKeyRef" not in done.stdout, "Ray hands the key to the agents"
    done = launch("kubernetes", "job.py", *asked, "--", "--workers", "2:3")
    assert "--workers 2:3\n" in done.stdout
    assert "--workers 3\n" not in done.stdout


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        (["slrum", DIGITS], "there is no scheduler 'slrum'; did you mean 'slurm'?"),
        (["slurm", "nowhere.py"], "There is no file nowhere.py"),
        (["slurm", DIGITS, "--nodes", "-2"], "--nodes -2: it must be at least 1"),
        (["slurm", DIGITS, "--", "--strategy", "alreduce"], "did you mean 'allreduce'?"),
        (["slurm", DIGITS, "--", "--set", "lr"], "write it as NAME=VALUE"),
        (["slurm", DIGITS, "--", "--workers", "3"], "--workers 3: this file starts 2 tasks"),
        (["slurm", DIGITS, "--", "--workers", "0"], "at least 1 worker"),
        (["slurm", DIGITS, "--", "--keep", "0"], "--keep 0: it must be at least 1"),
        (["slurm", DIGITS, "--", "--device", "tpu"], "allowed are auto, cpu, cuda and cuda:N"),
        (
            ["slurm", DIGITS, "--output", "/nowhere/x"],
            "can't be written: No such file or directory",
        ),
        (["slurm", DIGITS, "--", "--stratgy", "single"], "did you mean '--strategy'?"),
        (["slurm", DIGITS, "--", "--on", "ray"], "--on can't stand after --"),
        (["slurm", DIGITS, "--", "--lr", "0.1"], "Type  --set lr=0.1"),
        (["slurm", DIGITS, "--", "job.py"], "unexpected argument 'job.py'"),
        (["kubernetes", "job.py"], "--image"),
        (["kubernetes", "job.py", *IMAGE, "--name", "My Job"], "lowercase letters, digits and -"),
        (["kubernetes", "job.py", *IMAGE, "--pods", "0"], "--pods 0"),
        (
            ["kubernetes", "job.py", *IMAGE, "--pods", "2", "--slots", "2", "--", "--workers", "5"],
            "--workers 5: this file starts 4 slots",
        ),
        (
            ["kubernetes", "job.py", *IMAGE, "--", "--workers", "2", *DEDICATED],
            "--workers 2 and 1 dedicated servers: this file starts 2 slots",
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


def test_flags_after_two_dashes_reach_train_as_they_are(launch: Launch) -> None:
    words = ["--strategy", "ps:sync", "--workers", "2:4", "--device", "cuda,cpu", "--set", "lr=0.1"]
    words += ["--chaos", "kill worker every 10s; pause worker 2s", "--no-trust-network", "--quiet"]
    done = launch("kubernetes", "job.py", *IMAGE, "--", *words)
    command = done.stdout.partition("exec manyhands train job.py --on env")[2]
    line = command.partition("volumeMounts")[0].replace("\\\n", " ")
    assert shlex.split(line)[2:] == words


@pytest.mark.parametrize(
    ("old", "instead"),
    [
        ("JOB --nodes 2 --strategy ps:sync", "JOB --nodes 2 -- --strategy ps:sync"),
        ("--set lr=0.1 JOB --quiet --nodes 2", "JOB --nodes 2 -- --set lr=0.1 --quiet"),
        ("--keep=2 JOB --run-dir here -- --set a=b", "JOB --run-dir here -- --keep=2 --set a=b"),
        ("JOB --no-equal-shares --gpus 4", "JOB --gpus 4 -- --no-equal-shares"),
    ],
)
def test_flags_of_train_before_two_dashes_are_refused_with_what_to_type(
    launch: Launch, old: str, instead: str
) -> None:
    done = launch("slurm", *old.replace("JOB", DIGITS).split())
    assert (done.returncode, done.stdout) == (2, "")
    assert "is a flag of  manyhands train, and those come after --. Type:" in done.stderr
    typed = done.stderr.splitlines()[1].strip()
    assert typed == f"manyhands launch slurm {instead.replace('JOB', DIGITS)}"
    assert launch(*typed.split()[2:]).returncode == 0


def test_a_range_of_workers_may_be_larger_than_what_is_there_at_first(launch: Launch) -> None:
    done = launch("slurm", DIGITS, "--", "--workers", "2:8")
    assert done.returncode == 0
    assert "--workers 2:8\n" in done.stdout


def test_help_has_examples(launch: Launch) -> None:
    for scheduler in ([], ["slurm"], ["kubernetes"]):
        done = launch(*scheduler, "--help")
        assert done.returncode == 0
        assert "examples:" in done.stdout
