"""Every mistake gets an error that says what was given, what is allowed and what to type."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from manyhands.cli.main import COMMANDS
from manyhands.testing import harness

EXAMPLES = Path(__file__).parents[2] / "examples"


def fails(members: ModuleType, tmp_path: Path, *arguments: str, code: int = 2) -> str:
    with members.command(*arguments, run=tmp_path / "run") as running:
        done = running.wait()
    assert done.code == code, f"{done.out}\n{done.err}"
    assert "Traceback" not in done.err
    return done.err


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        (["trian", "x.py"], "did you mean 'train'?"),
        ([], "manyhands needs COMMAND.\nSee: manyhands --help"),
        (["train"], "manyhands train needs JOB.\nSee: manyhands train --help"),
        (["train", "nowhere.py"], "There is no file nowhere.py"),
        (["train", str(EXAMPLES / "digit.py")], "; did you mean 'digits.py'?"),
        (["train", "x.py", "--gpus", "2"], "there is no flag --gpus.\n"),
        (
            ["train", "x.py", "--keyfile", "k"],
            "there is no flag --keyfile; did you mean '--key-file'?",
        ),
        (
            ["lab", "run", "--hosst=2", "--", "true"],
            "did you mean '--hosts'?\nSee: manyhands lab run",
        ),
        (["train", "x.py", "y.py"], "unexpected argument 'y.py'"),
        (
            ["train", str(EXAMPLES / "digits.py"), "--lr", "0.1", "--batch-size=8"],
            "there is no flag --lr: lr is a field of the job. Type  --set lr=0.1 --set batch_size=8",
        ),
        (["train", str(EXAMPLES / "digits.py"), "--set", "lr", "0.1"], "sign:  --set lr=0.1"),
        (
            ["train", str(EXAMPLES / "digits.py"), "--strategy", "ddp"],
            "it is called 'allreduce' here. Type  --strategy allreduce.",
        ),
        (["train", str(EXAMPLES / "digits.py"), "--workers", "0"], "at least 1 worker"),
        (["train", str(EXAMPLES / "digits.py"), "--workers", "-3"], "at least 1 worker"),
        (
            ["train", str(EXAMPLES / "digits.py"), "--workers", "two"],
            "--workers two: it must be a number",
        ),
        (
            ["train", str(EXAMPLES / "digits.py"), "--strategy", "alreduce"],
            "did you mean 'allreduce'?",
        ),
        (["train", str(EXAMPLES / "digits.py"), "--strategy", "allreduce("], "does not parse"),
        (
            ["train", str(EXAMPLES / "digits.py"), "--strategy", "ps:sync+int8"],
            "int8 does not work with ps:sync",
        ),
        (
            ["train", str(EXAMPLES / "digits.py"), "--strategy", "single", "--workers", "2"],
            "--strategy allreduce --workers 2",
        ),
        (["train", str(EXAMPLES / "digits.py"), "--set", "lr"], "NAME=VALUE"),
        (["train", str(EXAMPLES / "digits.py"), "--keep", "0"], "at least 1"),
        (["train", str(EXAMPLES / "digits.py"), "--chaos", "kil worker"], "did you mean 'kill'?"),
        (
            [
                "train",
                str(EXAMPLES / "digits.py"),
                "--strategy",
                "single",
                "--chaos",
                "kill worker",
            ],
            "does not work with single: its workers restart from the last checkpoint if one dies. "
            "Use  --strategy allreduce --chaos",
        ),
        (["resume", "no-such-run"], "There is no run no-such-run"),
    ],
)
def test_mistakes_on_the_command_line(
    members: ModuleType, tmp_path: Path, arguments: list[str], wanted: str
) -> None:
    assert wanted in fails(members, tmp_path, *arguments)


@pytest.mark.parametrize(
    ("flags", "wanted"),
    [
        (["--set", "lrr=1"], "did you mean 'lr'?"),
        (["--set", "lr=fast"], "lr is a number"),
        (["--set", "batch_size=5000"], "--set batch_size=1437"),
        (["--workers", "5", "--set", "batch_size=4"], "5 workers share a global batch of 4"),
        (["--device", "cuda:99"], "--device cuda:99"),
        (["--device", "tpu"], "allowed are auto, cpu, cuda and cuda:N"),
    ],
)
def test_mistakes_that_only_the_job_shows(tmp_path: Path, flags: list[str], wanted: str) -> None:
    run = tmp_path / "run"
    error = fails(
        harness, tmp_path, "train", str(EXAMPLES / "digits.py"), "--run-dir", str(run), *flags
    )
    assert wanted in error
    assert not run.exists(), "nothing was trained, so nothing should be left"


def test_a_monitor_that_is_not_evaluated_is_named(members: ModuleType, tmp_path: Path) -> None:
    done = members.train("Regression", tmp_path / "run", monitor="acuracy")
    assert done.code == 2
    assert "monitor is 'acuracy', and the evaluation gives loss, worst" in done.err


def test_an_unwritable_run_folder_is_reported(members: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    where = str(tmp_path / "file" / "run")
    error = fails(members, tmp_path, "train", str(EXAMPLES / "digits.py"), "--run-dir", where)
    assert "can't be created" in error
    assert "--run-dir" in error


def test_a_run_folder_with_something_in_it_is_not_touched(
    members: ModuleType, tmp_path: Path
) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "thesis.txt").write_text("precious")
    where = str(tmp_path / "run")
    error = fails(members, tmp_path, "train", str(EXAMPLES / "digits.py"), "--run-dir", where)
    assert "is not empty" in error
    assert os.listdir(tmp_path / "run") == ["thesis.txt"]


def test_a_taken_port_is_reported(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        error = fails(
            harness,
            tmp_path,
            *("train", str(EXAMPLES / "digits.py"), "--control", address),
            *("--run-dir", str(tmp_path / "run")),
        )
    assert address in error
    assert "--control tcp" in error


def test_a_truncated_data_file_is_named(
    members: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ["train-images-idx3-ubyte", "train-labels-idx1-ubyte"]
    names += ["t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"]
    monkeypatch.setenv("MANYHANDS_DATA", str(tmp_path))
    for name in names:
        (tmp_path / name).write_bytes(b"\0\0\x08\x03\0\0\xea\x60")
    done = fails(
        members,
        tmp_path,
        *("train", str(EXAMPLES / "mnist.py"), "--strategy", "single"),
        *("--run-dir", str(tmp_path / "run")),
    )
    assert "train-images-idx3-ubyte" in done
    assert not (tmp_path / "run").exists()


def test_flags_override_the_environment(tmp_path: Path) -> None:
    run = tmp_path / "run"
    arguments = harness.train_arguments("Regression", run, epochs=1)
    arguments = [a for a in arguments if a not in ("--strategy", "single")]
    environ = {"MANYHANDS_STRATEGY": "single", "MANYHANDS_WORKERS": "7"}
    with harness.command(*arguments, run=run, environ=environ) as running:
        assert running.wait().code == 0
    options = json.loads((run / "config.json").read_text())["options"]
    assert options["strategy"] == {"value": "single", "from": "MANYHANDS_STRATEGY"}
    assert options["workers"] == {"value": 1, "from": "--workers"}
    assert options["keep"] == {"value": 3, "from": "default"}


@pytest.mark.parametrize("verb", [["train", str(EXAMPLES / "digits.py")], ["resume", "run"]])
def test_torchrun_without_on_trains_nothing(tmp_path: Path, verb: list[str]) -> None:
    torchrun = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        "2",
        "--standalone",
    ]
    done = subprocess.run(
        [*torchrun, "-m", "manyhands", *verb],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 1, "torchrun's own"
    assert f"torchrun ... -m manyhands {' '.join(verb)} --on env" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_two_runs_never_share_a_folder(tmp_path: Path) -> None:
    run = tmp_path / "run"
    arguments = harness.train_arguments("Regression", run, pause_s=0.05, epochs=50)
    with harness.command(*arguments, run=run) as running:
        running.wait_for_step(2)
        config = (run / "config.json").read_bytes()
        second = harness.resume(run, "--set", "lr=9")
        assert second.code == 2
        assert (run / "config.json").read_bytes() == config
        assert f"by process {running.process.pid}" in second.err
        running.signal(signal.SIGINT)
        assert running.wait().code == 130


def test_every_command_has_help_with_examples() -> None:
    for command in ([], *([name] for name in COMMANDS)):
        done = subprocess.run(
            [sys.executable, "-m", "manyhands.cli.main", *command, "--help"],
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 0
        assert "example" in done.stdout
