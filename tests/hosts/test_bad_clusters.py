"""Hosts of a lab that were told something wrong, or can't reach each other: said on each, within seconds."""

from __future__ import annotations

import sys
from pathlib import Path

from in_lab import Cast
from together import LONG_S, until

from manyhands.testing.harness import train_arguments
from manyhands.testing.lab import Lab

LISTENS = """
import socket, time
while True:
    try:
        socket.create_connection(("host-0", 29500), timeout=5)
        break
    except OSError:
        time.sleep(0.1)
"""


def command(run: Path, *flags: str) -> list[str]:
    given = ("--on", "env", *flags)
    return train_arguments("Regression", run, *given, strategy="allreduce", workers=3)


def test_a_host_that_does_not_reach_the_coordinator(tmp_path: Path, lab: Lab) -> None:
    lab.cut("host-0", "host-2")
    cast = Cast(lab, tmp_path, command(tmp_path / "run", "--wait", "5"), tmp_path / "run")
    assert cast.codes() == {"host-0": 2, "host-1": 2, "host-2": 1}
    assert "Not all processes joined within 5 s: rank-2 of 3 did not connect" in cast.out("host-0")
    assert "host-1 exits with code 2; see the output of host-0" in cast.out("host-1")
    lost = "host-2 found no coordinator at tcp://host-0:29500 within 5 s: timed out"
    assert lost in cast.out("host-2")


def test_two_hosts_with_rank_0(tmp_path: Path, lab: Lab) -> None:
    first, *others = lab.hosts
    run = tmp_path / "run"
    cast = Cast(lab, tmp_path, command(run), run, environ={"RANK": "0"}, hosts=[first])
    others[0].run([sys.executable, "-S", "-c", LISTENS])
    for host in others:
        cast.start(host)
    until(lambda: cast.ended("host-1") and cast.ended("host-2"), LONG_S)
    for name in ("host-1", "host-2"):
        text = f"{name} is rank 0 by RANK and WORLD_SIZE, and so is another process, the coordinator at "
        assert f"{text}tcp://host-0:29500" in cast.out(name)
    assert not cast.ended("host-0"), "it waits for the others"
