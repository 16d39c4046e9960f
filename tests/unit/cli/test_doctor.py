"""`manyhands doctor` as people run it: a process, its lines, its exit code, nothing left behind."""

from __future__ import annotations

import json
import os
import pty
import re
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from manyhands.doctor import checks, wants_colour

DEADLINE_S = 90.0
NAMES = [check.name for check in checks()]
LINE = re.compile(r"(ok|fix|note) +(\S+(?: \S+)*?)  +(\S.*)")
Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start the doctor in a folder of its own; it outlives neither the test nor the deadline."""
    started: list[subprocess.Popen[str]] = []
    (tmp_path / "here").mkdir()
    (tmp_path / "tmp").mkdir()

    def start_one(
        *arguments: str, environ: dict[str, str] | None = None, **options: Any
    ) -> subprocess.Popen[str]:
        inherited = {k: v for k, v in os.environ.items() if k not in ("GLOO_SOCKET_IFNAME",)}
        process = subprocess.Popen(
            [sys.executable, "-m", "manyhands.cli.main", "doctor", *arguments],
            text=True,
            cwd=tmp_path / "here",
            env=inherited
            | {"TMPDIR": str(tmp_path / "tmp"), "TERM": "xterm"}
            | {"TEST_MARK": str(tmp_path)}
            | (environ or {}),
            **{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options},
        )
        started.append(process)
        return process

    yield start_one
    for process in started:
        process.kill()
        process.communicate(timeout=10)
    assert left_over(str(tmp_path)) == []


def left_over(mark: str) -> list[int]:
    """Processes whose environment holds `mark`; zombies have none."""
    pids = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if mark.encode() in (folder / "environ").read_bytes():
                pids.append(int(folder.name))
        except OSError:
            continue
    return pids


def test_lines_are_printed_as_checks_finish(start: Start, tmp_path: Path) -> None:
    process = start()
    assert process.stdout is not None
    first = process.stdout.readline()
    assert process.poll() is None, "the first line came before the rest was checked"
    assert first.split()[:2] == ["ok", "manyhands"]
    # Not communicate(): it would pass by what readline() has read ahead.
    out = process.stdout.read()
    assert process.wait(timeout=DEADLINE_S) == 0, out
    lines = (first + out).splitlines()
    matches = [match for line in lines if (match := LINE.fullmatch(line))]
    assert [match[2] for match in matches] == NAMES
    assert {match[1] for match in matches} <= {"ok", "note"}
    assert len({match.start(3) for match in matches}) == 1, "the details are aligned"
    assert lines[-1] == "Nothing to fix."
    assert "\x1b" not in out
    assert list((tmp_path / "here").iterdir()) == []
    assert list((tmp_path / "tmp").iterdir()) == []


def test_problems_are_shown_with_a_remedy_and_exit_code_1(start: Start, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    process = start(
        str(tmp_path / "file" / "runs"), "--json", environ={"GLOO_SOCKET_IFNAME": "nope7"}
    )
    resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (300, hard))
    out, err = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 1, out + err
    findings = json.loads(out)
    assert [finding["name"] for finding in findings] == NAMES
    remedies = {f["name"]: f["remedy"] for f in findings if f["ok"] is False}
    assert list(remedies) == ["open files", "run folder", "gloo group"]
    assert remedies["open files"].startswith("ulimit -n ")
    assert "--run-dir" in remedies["run folder"]
    assert "unset GLOO_SOCKET_IFNAME" in remedies["gloo group"]


def test_a_fault_has_a_second_line_with_its_remedy(start: Start, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    out, err = start(str(tmp_path / "file")).communicate(timeout=DEADLINE_S)
    lines = out.splitlines()
    at = next(i for i, line in enumerate(lines) if line.startswith("fix"))
    assert "run folder" in lines[at]
    assert lines[at + 1].strip().startswith("-> manyhands train JOB --run-dir")
    assert lines[-1] == "To fix: run folder."
    assert err == ""


def test_ctrl_c_during_the_all_reduce_check_leaves_no_process(start: Start, tmp_path: Path) -> None:
    """At several moments: how long the processes of the check take is not for this test to know."""
    codes = []
    for delay_s in (0.05, 0.3, 0.8):
        process = start()
        assert process.stdout is not None
        for line in process.stdout:
            if "TLS links" in line:
                break
        time.sleep(delay_s)
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=DEADLINE_S)
        codes.append(process.returncode)
        assert left_over(str(tmp_path)) == []
        assert list((tmp_path / "tmp").iterdir()) == []
    assert set(codes) <= {0, 130}
    assert 130 in codes, "it was always done before it could be interrupted"


def test_on_a_terminal_marks_have_colour_and_the_check_in_progress_is_shown(start: Start) -> None:
    near, far = pty.openpty()
    process = start(stdout=far, environ={"NO_COLOR": ""})
    os.close(far)
    text = ""
    try:
        while part := os.read(near, 65536):
            text += part.decode()
    except OSError:
        pass  # how the kernel says that the other end of a terminal is closed
    finally:
        os.close(near)
    assert process.wait(timeout=DEADLINE_S) == 0
    assert "\x1b[32mok" in text
    assert text.index("...   gloo group") < text.index("gloo group     2 processes")


def test_colour_is_for_terminals_that_want_it(monkeypatch: pytest.MonkeyPatch) -> None:
    near, far = pty.openpty()
    try:
        with open(far, "w") as terminal, open(os.devnull, "w") as file:
            monkeypatch.setenv("TERM", "xterm")
            monkeypatch.delenv("NO_COLOR", raising=False)
            assert wants_colour(terminal)
            assert not wants_colour(file)
            monkeypatch.setenv("NO_COLOR", "1")
            assert not wants_colour(terminal)
            monkeypatch.delenv("NO_COLOR")
            monkeypatch.setenv("TERM", "dumb")
            assert not wants_colour(terminal)
    finally:
        os.close(near)
