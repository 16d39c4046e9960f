"""`manyhands doctor --cluster` on several hosts: what works between them, and who is not there."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest
from in_lab import Cast
from test_agents import OTHER_VERSION
from together import KEY, Process, Together, manyhands, place, together, until

from manyhands.testing.lab import Lab
from manyhands.testing.ports import reserve_port

DOCTOR = ("doctor", "--cluster", "env")


def shown(text: str) -> dict[str, Any]:
    return json.loads(text[text.index("\n{") if not text.startswith("{") else 0 :])


class Cluster:
    """Doctors that stand for hosts, on this machine."""

    def __init__(self, hosts: Together, world: int, *flags: str) -> None:
        self._hosts = hosts
        self._world = world
        self._flags = flags
        self._port = reserve_port()

    def start(self, rank: int, program: str | None = None, **environ: str) -> Process:
        command = manyhands(*DOCTOR, *self._flags)
        if program is not None:
            command[1:3] = ["-c", program]
        given = place(rank, self._world, self._port, **environ)
        return self._hosts.start(command, environ=given)


# A network that is slower than the cores: however busy they are, all hosts are equally fast.
@pytest.mark.parametrize("lab", ["100mbit"], indirect=True)
def test_every_pair_of_a_lab_is_measured(tmp_path: Path, lab: Lab) -> None:
    cast = Cast(lab, tmp_path, [*DOCTOR, "--json"], tmp_path)
    told = shown(cast.finish().out)
    assert [host["host"] for host in told["hosts"]] == ["host-0", "host-1", "host-2"]
    assert [host["address"] for host in told["hosts"]] == [host.address for host in lab.hosts]
    assert {host["interface"] for host in told["hosts"]} == {"eth0"}
    pairs = {(pair["one"], pair["other"]): pair for pair in told["pairs"]}
    assert pairs.keys() == {("host-0", "host-1"), ("host-0", "host-2"), ("host-1", "host-2")}
    for pair in pairs.values():
        assert not pair["trouble"] + pair["trouble_back"]
        assert pair["round_trip_s"] > 0
        assert abs(pair["clock_s"]) < 10, "they share a clock"
        assert min(pair["there_bytes_per_s"], pair["back_bytes_per_s"]) > 0
    assert all(host.traffic().sent_bytes > 1e6 for host in lab.hosts)
    assert not [finding for finding in told["findings"] if finding["ok"] is False]


def test_two_hosts_that_do_not_reach_each_other_are_named(tmp_path: Path, lab: Lab) -> None:
    lab.cut("host-1", "host-2")
    cast = Cast(lab, tmp_path, DOCTOR, tmp_path)
    assert cast.codes() == {"host-0": 1, "host-1": 1, "host-2": 1}
    out = cast.out("host-0")
    assert f"host-1  does not reach host-2 ({lab.host('host-2').address}, eth0): timed out" in out
    assert f"host-2  does not reach host-1 ({lab.host('host-1').address}, eth0): timed out" in out
    assert "Let TCP through between them" in out
    assert "To fix: host-1, host-2." in out


def test_another_key_or_version_is_reported_by_host(tmp_path: Path) -> None:
    with together(tmp_path) as hosts:
        cluster = Cluster(hosts, 3)
        lead = cluster.start(0)
        stranger = cluster.start(1, MANYHANDS_KEY="another key than the others")
        older = cluster.start(2, OTHER_VERSION)
        assert (stranger.wait(), lead.wait(), older.wait()) == (2, 1, 1)
        assert "do not have the same key" in stranger.out
        assert "(127.0.0.1) was refused: it has another key" in lead.out
        assert "rank-1  did not connect to tcp://127.0.0.1:" in lead.out
        assert "it has manyhands 9.9, and the coordinator manyhands 0" in lead.out
        assert 'pip install "manyhands==0' in lead.out
        for text in (KEY, "another key than the others"):
            assert text not in lead.out + stranger.out + older.out


def test_a_rank_given_twice_is_reported_with_both_hosts(tmp_path: Path) -> None:
    with together(tmp_path) as hosts:
        cluster = Cluster(hosts, 3)
        lead, first = cluster.start(0), cluster.start(1)
        second = cluster.start(1)
        codes = sorted([first.wait(), second.wait()])
        assert (lead.wait(), codes) == (1, [1, 2])
        text = "rank-1 is both the process on "
        assert text in lead.out
        assert text in first.out + second.out
        assert "rank-2  did not connect" in lead.out


@pytest.mark.long
def test_missing_processes_are_named_even_after_a_stop(tmp_path: Path) -> None:
    with together(tmp_path) as hosts:
        lead = Cluster(hosts, 2, "--wait", "1").start(0)
        assert lead.wait() == 1
        assert "rank-1  did not connect" in lead.out
        assert "To fix: rank-1." in lead.out
        guest = Cluster(hosts, 2, "--wait", "-9").start(1)
        assert guest.wait() == 1
        assert "found no coordinator at tcp://127.0.0.1:" in guest.out
        lead = Cluster(hosts, 2, "--wait", "600").start(0)
        until(lambda: "waiting at tcp://127.0.0.1:" in lead.out)
        lead.signal(signal.SIGTERM)
        assert lead.wait() == 128 + signal.SIGTERM
        assert "Stopped before the end." in lead.out


def test_a_process_that_trains_is_refused_by_the_doctor(
    tmp_path: Path,
) -> None:
    job = tmp_path / "job.py"
    job.touch()
    training = manyhands("train", str(job), "--on", "env")
    with together(tmp_path) as hosts:
        cluster = Cluster(hosts, 2)
        lead = cluster.start(0)
        agent = hosts.start(training, environ=place(1, 2, cluster._port))
        assert (lead.wait(), agent.wait()) == (1, 2)
        assert "Start the same command on every host" in agent.out
        assert "(rank-1) trains, and " in lead.out
        assert "Nothing to fix" not in lead.out


def test_a_process_killed_during_the_test_is_a_finding(tmp_path: Path) -> None:
    with together(tmp_path) as hosts:
        cluster = Cluster(hosts, 3)
        lead, lost = cluster.start(0), cluster.start(1)
        until(lambda: " is probed by " in lost.out)
        lost.signal(signal.SIGKILL)
        cluster.start(2)
        assert lead.wait() == 1
        assert "rank-1 joined and was lost: its process closed its link" in lead.out
        assert "rank-1  did not connect" not in lead.out
