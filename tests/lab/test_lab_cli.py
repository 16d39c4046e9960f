"""`manyhands lab` as people type it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from hosts import left_over, python, record_of, until
from manyhands.cli.main import main

ALL_REDUCE = """
import socket
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
numbers = torch.full((250_000,), float(dist.get_rank() + 1))
dist.all_reduce(numbers)
print(socket.gethostname(), dist.get_rank(), numbers.unique().tolist())
dist.destroy_process_group()
"""
LINE = re.compile(r"(host-\d) +exit (\d+) +sent +(\S+ \S+) +received +(\S+ \S+)")


def start(*words: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "manyhands.cli.main", "lab", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def say(*words: str) -> subprocess.CompletedProcess[str]:
    with start(*words) as process:
        out, err = process.communicate(timeout=120)
    return subprocess.CompletedProcess(words, process.returncode, out, err)


def test_an_all_reduce_over_three_hosts(tmp_path: Path) -> None:
    script = tmp_path / "all_reduce.py"
    script.write_text(ALL_REDUCE)
    done = say("run", "--hosts", "3", "--bandwidth", "1gbit", "--", sys.executable, str(script))
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    for rank in range(3):
        assert f"host-{rank} | host-{rank} {rank} [6.0]\n" in done.stdout
    ends = LINE.findall(done.stdout)
    assert [(name, code) for name, code, _, _ in ends] == [(f"host-{i}", "0") for i in range(3)]
    # A ring over n hosts sends 2 (n - 1) / n of the megabyte from each.
    assert all(unit == "MB" for end in ends for unit in (end[2].split()[1], end[3].split()[1]))


def test_the_first_failure_ends_the_others_and_is_the_exit_code(tmp_path: Path) -> None:
    command = f"""
        cd {tmp_path}; echo "rank $RANK of $WORLD_SIZE"; touch $RANK
        while [ $RANK = 1 ]; do [ -e 0 ] && [ -e 2 ] && exit 3; sleep 0.01; done
        sleep 1000
    """
    done = say("run", "--hosts", "3", "--", "sh", "-c", command)
    assert done.returncode == 3
    assert "error: host-1 failed first, with exit code 3" in done.stderr
    for rank in range(3):
        assert f"host-{rank} | rank {rank} of 3\n" in done.stdout
    codes = {name: int(code) for name, code, _, _ in LINE.findall(done.stdout)}
    assert codes == {"host-0": 128 + 15, "host-1": 3, "host-2": 128 + 15}


def test_sigterm_is_passed_on_to_the_hosts() -> None:
    save = 'trap "echo saved; exit 0" TERM; echo $TORCHELASTIC_RUN_ID; sleep 1000 & wait'
    with start("run", "--hosts", "2", "--", "sh", "-c", save) as process:
        assert process.stdout is not None
        first, second = sorted(process.stdout.readline() for _ in range(2))
        number = int(first.removeprefix("host-0 | lab-"))
        assert second == f"host-1 | lab-{number}\n"
        record = record_of(number)
        assert left_over(record)
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 143, err
    assert sorted(out.splitlines()) == ["host-0 | saved", "host-1 | saved"]
    assert left_over(record) == []


def test_a_lab_that_stays(capsys: pytest.CaptureFixture[str]) -> None:
    def told(*words: str) -> str:
        assert main(["lab", *words]) == 0
        return capsys.readouterr().out

    up = told("up", "--hosts", "3", "--bandwidth", "100mbit")
    found = re.match(r"lab (\d+): 3 hosts, 100mbit, .*kept until taken down", up)
    assert found
    this = ("--lab", found[1])
    record = record_of(int(found[1]))
    named = say("exec", *this, "host-2", "--", "sh", "-c", "hostname; exit 7")
    assert (named.stdout, named.returncode) == ("host-2\n", 7)
    cores = str(max(1, len(os.sched_getaffinity(0)) // 3))
    part = say(
        "exec", *this, "host-1", "--", "sh", "-c", "echo $OMP_NUM_THREADS $MANYHANDS_THREADS"
    )
    assert part.stdout.split() == [cores, cores]
    send = "import socket; socket.socket(type=2).sendto(bytes(958), ('host-2', 9))"
    assert say("exec", *this, "host-0", "--", *python(send)).returncode == 0
    assert told("cut", *this, "host-1") == "cut: host-1\n"
    assert told("cut", *this, "host-0", "host-2") == "cut: host-1; host-0 - host-2\n"
    status = told("status", *this)
    assert "cut: host-1; host-0 - host-2" in status
    assert re.search(r"host-0 .*sent +1.0 kB  .*0 running", status)
    assert re.search(r"host-1 .*sent +0 B  received +0 B  0 running", status)
    assert re.search(r"host-2 .*received +1.0 kB  0 running", status)
    assert told("heal", *this, "host-1") == "cut: host-0 - host-2\n"
    assert told("heal", *this) == "nothing is cut\n"
    with start("exec", *this, "host-0", "--", "sleep", "1000") as sleeper:
        until(lambda: "1 running" in told("status", *this))
        assert told("down", *this) == f"removed lab {found[1]}\n"
        assert sleeper.wait(10) == -signal.SIGKILL
    assert left_over(record) == []


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["run", "--latency", "10ms", "--", "true"], "--latency: a lab can't delay"),
        (["up", "--loss", "1%"], "--loss: a lab can't delay or lose single packets"),
        (["up", "--bandwidth", "100mbps"], "such as 100mbit"),
        (["run", "--hosts", "2"], "manyhands lab run -- hostname"),
        (["exec", "host-0", "--lab", "255", "--", "true"], "--lab would be the command"),
        (["run", "--", "nonesuch"], "no program 'nonesuch'"),
        (["exec", "--lab", "255", "host-0", "--", "true"], "There is no lab"),
    ],
)
def test_impossible_options_are_refused(
    words: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["lab", *words]) == 2
    said = capsys.readouterr()
    assert told in said.err
    assert said.out == ""
