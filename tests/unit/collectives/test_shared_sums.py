"""All-reduce in shared memory by real processes: the sums, and kills in the middle of them."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from manyhands.collectives.shared_sums import SharedTable
from manyhands.errors import LinkError

PROGRAM = Path(__file__).with_name("shared_sums_program.py")
AT_ONCE_S = 10.0
"""Instead of the minute that these groups may wait: a loaded machine is slow, too."""
BYTES_OF_SUMS = 8 + 32_000 + 32_772 + 140_002 + 4_000_000 + 6_000_000 + 36_000 + 1_200_004
"""Of the tensors of the program, in each of its repeats."""
BYTES_ONCE = 600_002
"""Of what it reduces before."""
LEFT = {"maps": 0, "memfd": 0, "socket": 0}


class Crew:
    """Workers, of which those that are killed are replaced."""

    def __init__(self, hosts: str, folder: Path, *, first: list[str] | None = None) -> None:
        """
        Args:
            hosts: The host of each worker, a letter.
            first: A command to start rank 1 with.
        """
        self.hosts, self.size = hosts, len(hosts)
        self._folder = folder
        self._round = 0
        self._processes = [
            self._start(rank, *(first or [] if rank == 1 else [])) for rank in range(self.size)
        ]

    def _start(self, rank: int, *before: str) -> subprocess.Popen[str]:
        command = [sys.executable, str(PROGRAM), str(rank), self.hosts, str(self._folder)]
        return subprocess.Popen(
            [*before, *command], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def begin(self, what: str, repeats: int = 1) -> list[Any]:
        """Have all workers form a group and begin; return what they say about it."""
        self._round += 1
        for process in self._processes:
            assert process.stdin is not None
            print(json.dumps([self._round, what, repeats]), file=process.stdin, flush=True)
        return [self.answer(rank) for rank in range(self.size)]

    def answer(self, rank: int) -> Any:
        process = self._processes[rank]
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line, f"rank {rank} ended with {process.wait(timeout=30)}"
        return json.loads(line)

    def kill(self, rank: int) -> None:
        self._processes[rank].send_signal(signal.SIGKILL)
        self._processes[rank].communicate()
        self._processes[rank] = self._start(rank)

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.communicate()


@pytest.fixture(scope="module", params=["aaa", "abba"])
def crew(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Crew]:
    crew = Crew(request.param, tmp_path_factory.mktemp("sums"))
    yield crew
    crew.close()


def test_sums_have_the_same_bits_as_in_rank_order(crew: Crew) -> None:
    transports = {said["transport"] for said in crew.begin("sums", 4)}
    one_host = len(set(crew.hosts)) == 1
    assert transports == {"shared memory" if one_host else "shared memory, between hosts gloo"}
    found = [crew.answer(rank) for rank in range(crew.size)]
    assert [each["error"] for each in found] == [None] * crew.size
    assert [each["left"] for each in found] == [LEFT] * crew.size
    for rank, host in enumerate(crew.hosts):
        leads = not one_host and crew.hosts.index(host) == rank
        # Others: what gloo exchanged to connect. Of two leaders, each sends as much as one tensor has.
        expected = 4 * BYTES_OF_SUMS + BYTES_ONCE if leads else 0
        assert found[rank]["bytes_sent"] == pytest.approx(expected, rel=0.01, abs=15_000)


def test_workers_that_give_different_tensors_are_told_so(crew: Crew) -> None:
    crew.begin("mismatch")
    errors = [crew.answer(rank)["error"] for rank in range(crew.size)]
    others = [rank for rank, host in enumerate(crew.hosts) if host == crew.hosts[1] and rank != 1]
    expected = f"sum of 11 torch.float32, and ranks {others} with something else"
    assert any(expected in (error or "") for error in errors), errors


@pytest.mark.parametrize("kills", [2, pytest.param(20, marks=pytest.mark.long)])
@pytest.mark.parametrize("hosts", ["aaa", "aabb"])
def test_survivors_of_a_kill_leave_at_once_and_leave_nothing_behind(
    hosts: str, kills: int, tmp_path: Path
) -> None:
    """Wherever it hits, and without anyone else who cuts the group."""
    rng, crew = random.Random(kills), Crew(hosts, tmp_path)
    try:
        for _ in range(kills):
            crew.begin("forever")
            time.sleep(rng.uniform(0.0, 0.05))
            victim = rng.randrange(crew.size)
            began = time.monotonic()
            crew.kill(victim)
            for rank in set(range(crew.size)) - {victim}:
                found = crew.answer(rank)
                assert found["lost"], found["error"]
                assert found["left"] == LEFT
            assert time.monotonic() - began < AT_ONCE_S
        crew.begin("sums")
        assert [crew.answer(rank)["error"] for rank in range(crew.size)] == [None] * crew.size
    finally:
        crew.close()


@pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("unshare") is None, reason="needs root, to hide processes"
)
@pytest.mark.parametrize("hosts", ["aa", "aab"])
def test_a_worker_that_cannot_attach_has_all_use_the_network(hosts: str, tmp_path: Path) -> None:
    """As in two containers that call themselves by one name."""
    hidden = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]
    crew = Crew(hosts, tmp_path, first=hidden)
    try:
        assert {said["transport"].split()[0] for said in crew.begin("sums")} == {"gloo"}
    finally:
        crew.close()


def test_the_memory_of_another_process_is_not_taken_for_that_of_the_group(tmp_path: Path) -> None:
    ours, other = (SharedTable.create(tmp_path, size=2) for _ in range(2))
    where, _, folder = ours.address.split(" ", 2)
    token = other.address.split(" ", 2)[1]
    try:
        assert SharedTable.attach(ours.address, size=2).folder == str(tmp_path)
        with pytest.raises(LinkError, match="is not the shared memory that it was"):
            SharedTable.attach(f"{where} {token} {folder}", size=2)
    finally:
        ours.close()
        other.close()
