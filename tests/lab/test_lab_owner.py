"""A lab whose program is killed at any moment leaves nothing behind."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest

from hosts import left_over, record_of, until
from manyhands.lab.records import Owner, Record, records
from manyhands.testing import harness
from manyhands.testing.lab import Lab

OWNER = """
import json, signal, time
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under nohup it would be ignored, and stay so
from manyhands.testing.lab import Lab
with Lab(hosts=2) as lab, Lab(hosts=1) as other:
    host = lab.hosts[0]
    started = host.start(["sh", "-c", "setsid sleep 1000 & sleep 1000"])
    while len(host.processes()) < 3:
        time.sleep(0.01)
    print(json.dumps([lab.number, other.number, started.pid, host.processes()]), flush=True)
    started.wait()
"""


@dataclass(frozen=True)
class Program:
    """One that has two labs, and waits for a process on a host."""

    process: subprocess.Popen[str]
    labs: tuple[Record, Record]
    started: int
    pids: list[int]


@contextmanager
def program() -> Iterator[Program]:
    with subprocess.Popen(
        [sys.executable, "-c", OWNER], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            first, second, started, pids = json.loads(process.stdout.readline())
            yield Program(process, (record_of(first), record_of(second)), started, pids)
        finally:
            process.kill()


def say(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "manyhands.cli.main", "lab", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_nothing_is_left_over_when_a_signal_ends_the_program(number: signal.Signals) -> None:
    with program() as owner:
        assert all(left_over(lab) for lab in owner.labs)
        owner.process.send_signal(number)
        assert owner.process.wait(20) == -number  # it ends as it would have without a lab
        assert [left_over(lab) for lab in owner.labs] == [[], []]
        assert harness.gone(owner.pids)


def test_the_next_lab_removes_what_a_killed_program_left_over() -> None:
    with program() as owner:
        owner.process.kill()
        owner.process.wait(20)
        assert harness.gone([owner.started])  # the kernel saw to that
        assert all(left_over(lab) for lab in owner.labs)
        assert not harness.gone(owner.pids, within_s=0)
        with Lab(hosts=1):
            assert harness.gone(owner.pids, within_s=0)
        assert [left_over(lab) for lab in owner.labs] == [[], []]


def test_down_all_spares_the_labs_of_living_programs() -> None:
    if theirs := [record.number for record in records() if record.owner is None]:
        pytest.skip(f"labs {theirs} are somebody's, and would go, too")
    with program() as dead, program() as living:
        kept = Lab(hosts=1).up().record
        dead.process.kill()
        dead.process.wait(20)
        done = say("down", "--all")
        assert done.returncode == 0, done.stderr
        for lab in (*dead.labs, kept):
            assert left_over(lab) == []
        assert f"removed lab {kept.number}\n" in done.stdout
        assert harness.gone(dead.pids, within_s=0)
        for lab in living.labs:
            number = lab.number
            assert f"kept lab {number}: of process {living.process.pid}" in done.stdout
            assert left_over(lab)
        again = Lab(hosts=1).up().record
        only = say("down")  # the one that can be taken down
        assert only.stdout == f"removed lab {again.number}\n"
        refused = say("down", "--lab", str(living.labs[0].number))
        assert refused.returncode == 2
        assert f"of process {living.process.pid}" in refused.stderr
        assert living.process.poll() is None
        assert not harness.gone(living.pids, within_s=0)
        living.process.terminate()
        living.process.wait(20)


def test_an_owner_is_a_process_and_its_start_time() -> None:
    with subprocess.Popen(["sleep", "1000"]) as process:
        owner = Owner.of(process.pid)
        assert owner.lives
        assert not Owner(owner.pid, owner.started + 1).lives  # another that got the same number
        process.kill()
        until(lambda: not owner.lives)  # though its number is not free before it is waited for
        assert process.returncode is None
