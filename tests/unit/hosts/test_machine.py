"""What a process tells of its machine, and who fits whom."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from manyhands.hosts.machine import Machine, identity, unfit

OURS = {"manyhands": "0.1.0", "torch": "2.13.0+cpu", "python": "3.11.7"}


@pytest.mark.parametrize(
    ("theirs", "why"),
    [
        ({}, ""),
        ({"torch": "2.13.4+cu126", "python": "3.12.1"}, ""),
        ({"torch": "2.12.0"}, "it has torch 2.12.0, and the coordinator torch 2.13.0+cpu"),
        ({"manyhands": "0.1.1"}, "it has manyhands 0.1.1, and the coordinator manyhands 0.1.0"),
        ({"manyhands": "0.10"}, "it has manyhands 0.10, and the coordinator manyhands 0.1.0"),
    ],
)
def test_versions_that_fit(theirs: dict[str, str], why: str) -> None:
    assert unfit(OURS, OURS | theirs) == why


def test_a_missing_version_does_not_fit() -> None:
    assert "it has manyhands none" in unfit(OURS, {})


def test_processes_of_one_machine_have_one_identity(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = "from manyhands.hosts.machine import identity; print(identity())"

    def other() -> str:
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
        return done.stdout.decode().strip()

    assert other() == identity()
    monkeypatch.setenv("TMPDIR", str(tmp_path))  # its temporary files are its own
    assert other() != identity()


def test_a_machine_in_words() -> None:
    assert str(Machine("a", "id", 1, 0, {})) == "1 core"
    assert str(Machine("a", "id", 8, 2, {})) == "8 cores, 2 GPUs"
