"""`manyhands doctor --cluster --show`: what was understood, or what is wrong and exit code 2."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path


def doctor(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "manyhands.cli.main", "doctor", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        env=os.environ | environ,
    )


def test_a_cluster_file_is_shown(tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    path.write_text('[[hosts]]\nname="gpu-a"\ndevices=["cuda:0"]\n[[hosts]]\nname="gpu-b"\n')
    done = doctor("--cluster", str(path), "--as", "gpu-b", "--show")
    assert (done.returncode, done.stderr) == (0, "")
    assert "coordinator  gpu-a:29600" in done.stdout
    assert "cuda:0" in done.stdout
    assert "this is      gpu-b" in done.stdout
    shown = json.loads(doctor("--cluster", str(path), "--json", "--show").stdout)
    assert [entry["name"] for entry in shown["entries"]] == ["gpu-a", "gpu-b"]
    assert shown["mine"] is None


def test_errors_end_with_exit_code_2(tmp_path: Path) -> None:
    done = doctor("--cluster", "env", TF_CONFIG='{"cluster": {"wokrer": ["a:1"]}}')
    assert (done.returncode, done.stdout) == (2, "")
    assert "did you mean 'worker'?" in done.stderr
    done = doctor("--cluster", str(tmp_path / "c.toml"))
    assert done.returncode == 2
    assert "can't be read: No such file" in done.stderr


def test_the_environment_is_read() -> None:
    environ = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "first", "MASTER_PORT": "5000"}
    done = doctor("--cluster", "env", "--show", **environ)
    assert done.returncode == 0
    assert "coordinator  first:5000" in done.stdout
    assert "this is      rank-1" in done.stdout
    done = doctor("--cluster", "env", **environ)
    assert done.returncode == 2
    assert "no key was given" in done.stderr
    assert "manyhands doctor --cluster env --key-file run.key" in done.stderr
