"""Process groups that the doctor forms: they work, they fail in time, and no process is left."""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path

import pytest

from manyhands.doctor import adder, collectives


def left_over(mark: str) -> list[int]:
    """Processes other than this one whose environment holds `mark`."""
    pids = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            environ = (folder / "environ").read_bytes()
        except OSError:
            continue
        if mark.encode() in environ and int(folder.name) != os.getpid():
            pids.append(int(folder.name))
    return pids


@pytest.fixture
def mark(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """A word in the environment of every process that a check starts; logs go to tmp_path."""
    word = f"checkup-{os.getpid()}-{time.monotonic_ns()}"
    monkeypatch.setenv("TEST_MARK", word)
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return word


def test_two_processes_all_reduce_and_leave_nothing(mark: str, tmp_path: Path) -> None:
    found = collectives.check_gloo()
    assert found.ok is True, found
    assert "2 processes all-reduced on lo" in found.detail
    assert left_over(mark) == []
    assert list(tmp_path.iterdir()) == []


def test_an_interface_that_is_not_there_fails_in_time(
    mark: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nope7")
    began = time.monotonic()
    found = collectives.check_gloo(deadline_s=50.0)
    assert time.monotonic() - began < 50
    assert found.ok is False
    assert "Unable to find address for: nope7" in found.detail
    assert found.remedy.startswith("unset GLOO_SOCKET_IFNAME")
    assert "nope7 is not" in found.remedy
    assert left_over(mark) == []


def test_the_deadline_ends_the_processes_and_the_logs_stay(mark: str, tmp_path: Path) -> None:
    began = time.monotonic()
    found = collectives.check_gloo(deadline_s=0.05)
    assert time.monotonic() - began < 10
    assert "rank 0 and rank 1 not done after 0.05 s, the last step: " in found.detail
    assert left_over(mark) == []
    (logs,) = tmp_path.iterdir()
    assert f"(logs: {logs})" in found.detail
    assert {path.name for path in logs.iterdir()} >= {"rank-0.log", "rank-1.log"}


def test_a_failed_group_is_reported_by_the_first_process_that_failed(mark: str) -> None:
    began = time.monotonic()
    found = collectives.check_group(
        "carrier-pigeon", 2, where="here", remedy="none", deadline_s=50.0
    )
    assert time.monotonic() - began < 50
    assert found.ok is False
    assert found.detail.startswith("on here: rank ")
    assert "carrier-pigeon" in found.detail.lower()
    assert left_over(mark) == []


@pytest.mark.parametrize(
    ("interface", "word"),
    [
        ("lo", "ip link set lo up"),
        ("eth0", "ip addr show eth0"),
        ("lo,eth7", "eth7"),
        ("", "nothing"),
    ],
)
def test_what_to_do_when_gloo_fails(interface: str, word: str) -> None:
    assert word in collectives.gloo_remedy(interface, ["lo", "eth0"])


def test_an_error_of_torch_in_one_line() -> None:
    nccl = (
        "NCCL error in: a.cpp:1\nncclInvalidUsage: usually.\nLast error:\nBootstrap : no socket\n"
    )
    assert adder.reason(nccl) == "NCCL error in: a.cpp:1: Bootstrap : no socket"
    assert adder.reason("refused\nframe #0: x") == "refused"
    assert adder.reason("") == ""
