"""Whoever waits in a group or in one of its splits is woken when the group is cut, or a peer is dead."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from manyhands.testing.ports import reserve_port

PROGRAM = Path(__file__).with_name("cut_program.py")
AT_ONCE_S = 5.0
"""Instead of the minute that these groups may wait: a loaded machine is slow, too."""
KINDS = [
    *("all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast", "send", "recv"),
    *("barrier", "several", "gather", "connect", "mesh gather", "mesh connect"),
]

Workers = list["subprocess.Popen[str]"]


def start(*arguments: object) -> subprocess.Popen[str]:
    command = [sys.executable, str(PROGRAM), *map(str, arguments)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def end(processes: Workers) -> None:
    for process in processes:
        process.kill()
        process.communicate()


@pytest.fixture(scope="module", params=["", "aaaa", "abbb"])
def four(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Workers]:
    folder = tmp_path_factory.mktemp("cut")
    hosts = [request.param] if request.param else []
    started = [start(rank, folder / "store", *hosts) for rank in range(4)]
    yield started
    end(started)


def answer(process: subprocess.Popen[str]) -> Any:
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line, f"a worker ended with {process.wait(timeout=30)}"
    return json.loads(line)


@pytest.mark.parametrize("kind", KINDS)
def test_a_cut_wakes_those_who_wait_in_a_group_and_in_its_splits(four: Workers, kind: str) -> None:
    for process in four:
        assert process.stdin is not None
        print(json.dumps(kind), file=process.stdin, flush=True)
    found = [answer(process) for process in four][:3]
    for place, end in zip(("group", "split", "split of a split"), found, strict=True):
        assert end["lost"], f"{place}: {end['error']}"
        assert end["after_cut_s"] < AT_ONCE_S, place
        assert end["closed_s"] < AT_ONCE_S, place


def test_a_store_that_died_with_its_worker_is_a_lost_peer() -> None:
    """Between hosts the first worker keeps the store. What torch says then is not what gloo says."""
    port = reserve_port()
    started = [start("tcp", rank, port) for rank in range(2)]
    try:
        found = answer(started[1])
    finally:
        end(started)
    assert len(found) == 3
    assert all(each["lost"] for each in found), found
