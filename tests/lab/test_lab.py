"""Hosts of a lab: names, slow and cut links, counters; and nothing is left behind."""

from __future__ import annotations

import errno
import os
import signal
import socket
import subprocess
import threading

import pytest

from hosts import Talk, left_over, listen, python, reach, until
from manyhands.errors import LabError, UsageError
from manyhands.lab.records import Record
from manyhands.testing import harness
from manyhands.testing.lab import Lab, Traffic

SOON_S = 0.3
"""Long enough for an answer of a link that is not cut."""
RESOLVE = """
import socket, sys
print(socket.gethostname(), *map(socket.gethostbyname, sys.argv[1:]))
"""
OUTSIDE = """
import socket
print(socket.socket().connect_ex(("192.0.2.1", 80)))
try:
    socket.gethostbyname("example.org")
except socket.gaierror:
    print("unknown")
"""
SINK = """
import socket, sys, threading, time
listener = socket.create_server(("", PORT))
print("listens", flush=True)
left, times = int(sys.argv[1]), []
def take(one):
    global left
    while data := one.recv(1 << 20):
        times.append(time.monotonic())
        left -= len(data)
takers = [threading.Thread(target=take, args=listener.accept()[:1]) for _ in range(int(sys.argv[2]))]
for act in (threading.Thread.start, threading.Thread.join):
    for taker in takers:
        act(taker)
print(left, min(times), max(times), flush=True)
"""
"""Takes so many bytes from so many connections; says what is missing, and when they came."""
SEND = """
import socket, sys
with socket.create_connection((sys.argv[1], PORT), timeout=30) as link:
    link.sendall(bytes(int(sys.argv[2])))
"""


def test_each_host_has_its_own_name_and_knows_the_others(lab: Lab) -> None:
    names = [host.name for host in lab.hosts]
    addresses = [host.address for host in lab.hosts]
    assert names == ["host-0", "host-1", "host-2"]
    assert len(set(addresses)) == 3
    before = socket.gethostname()
    for host in lab.hosts:
        assert host.run(python(RESOLVE, *names)).stdout.split() == [host.name, *addresses]
    assert socket.gethostname() == before


def test_outside_addresses_fail_at_once(lab: Lab) -> None:
    assert lab.hosts[0].run(python(OUTSIDE)).stdout.split() == [str(errno.ENETUNREACH), "unknown"]


def test_hosts_reach_each_other_and_themselves(lab: Lab) -> None:
    for host in lab.hosts:
        listen(host)
    there = [*(host.name for host in lab.hosts), "localhost"]
    ways = [(here, name) for here in lab.hosts for name in there]
    assert reach(*ways) == ["connected"] * len(ways)


def test_a_cut_host_is_silent_until_it_is_healed(lab: Lab) -> None:
    a, b, c = lab.hosts
    assert reach((a, "host-1")) == ["ConnectionRefusedError"]  # nobody listens, and is told so
    listen(b)
    listen(c)
    talk = Talk(a, b)
    assert talk.say("one", 5) == "one"
    lab.cut(b)
    assert lab.cuts() == [("host-1",)]
    assert talk.say("two", 0.1) == "TimeoutError"
    assert reach((a, "host-1"), (b, "host-2"), within_s=SOON_S) == ["TimeoutError"] * 2
    assert reach((b, "localhost"), (a, "host-2")) == ["connected"] * 2
    lab.heal(b)
    assert lab.cuts() == []
    assert talk.say("-", 20) == "two"  # the kernel had sent it again and again
    assert reach((b, "host-2")) == ["connected"]


def test_a_cut_between_two_does_not_affect_others(lab: Lab) -> None:
    a, b, c = lab.hosts
    for host in lab.hosts:
        listen(host)
    talk = Talk(a, b)
    lab.cut("host-1", "host-0")
    assert lab.cuts() == [("host-0", "host-1")]
    assert talk.say("one", 0.1) == "TimeoutError"
    assert reach((b, "host-0"), within_s=SOON_S) == ["TimeoutError"]
    assert reach((a, "host-2"), (c, "host-0"), (b, "host-2")) == ["connected"] * 3
    # Another cut, and its end, do not undo this one.
    lab.cut(a)
    assert lab.cuts() == [("host-0",), ("host-0", "host-1")]
    lab.heal(a)
    assert lab.cuts() == [("host-0", "host-1")]
    assert reach((a, "host-1"), within_s=SOON_S) == ["TimeoutError"]
    lab.heal(a, b)
    assert talk.say("-", 20) == "one"
    assert reach((b, "host-0")) == ["connected"]


def test_heal_without_a_name_heals_all(lab: Lab) -> None:
    a, b, c = lab.hosts
    lab.cut(a)
    lab.cut(b)
    lab.cut(b, c)
    lab.heal()
    assert lab.cuts() == []
    listen(c)
    assert reach((a, "host-2"), (b, "host-2")) == ["connected"] * 2


@pytest.mark.parametrize("shared", ["sender", "receiver"])
def test_the_bandwidth_of_a_link_is_shared_by_its_connections(shared: str) -> None:
    """Two times 5 MB over one link of 80 Mbit/s take a second; over two links they would take half."""
    with Lab(hosts=3, bandwidth="80mbit") as lab:
        a, b, c = lab.hosts
        ways = [(b, a), (c, a)] if shared == "receiver" else [(a, b), (a, c)]
        sinks = list(dict.fromkeys(there for _, there in ways))
        command = python(SINK, str(10_000_000 // len(sinks)), str(2 // len(sinks)))
        servers = [sink.start(command, stdout=subprocess.PIPE, text=True) for sink in sinks]
        for server in servers:
            assert server.stdout.readline() == "listens\n"
        for here, there in ways:
            here.start(python(SEND, there.name, "5000000"))
        told = [server.stdout.readline().split() for server in servers]
    assert [missing for missing, _, _ in told] == ["0"] * len(sinks)
    took_s = max(float(last) for _, _, last in told) - min(float(first) for _, first, _ in told)
    assert took_s > 0.9


def test_traffic_counts_what_was_sent_and_nothing_else(lab: Lab) -> None:
    a, b, c = lab.hosts
    sink = b.start(python(SINK, "1000000", "1"), stdout=subprocess.PIPE, text=True)
    assert sink.stdout.readline() == "listens\n"
    assert [host.traffic() for host in lab.hosts] == [Traffic(0, 0)] * 3
    a.run(python(SEND, b.name, "1000000"))
    assert sink.stdout.readline().split()[0] == "0"
    assert 1_000_000 < a.traffic().sent_bytes < 1_200_000
    assert 1_000_000 < b.traffic().received_bytes < 1_200_000
    assert 0 < b.traffic().sent_bytes < 200_000
    assert c.traffic() == Traffic(0, 0)


def test_kill_all_kills_only_the_processes_of_the_host(lab: Lab) -> None:
    a, b, _ = lab.hosts
    daemon = ["sh", "-c", "setsid sleep 1000 & sleep 1000"]
    here, there = a.start(daemon), b.start(daemon)
    until(lambda: len(a.processes()) == len(b.processes()) == 3)
    doomed, spared = a.processes(), b.processes()
    assert not set(doomed) & set(spared)
    a.kill_all()
    assert here.wait(5) == -signal.SIGKILL
    assert harness.gone(doomed)
    assert a.processes() == []
    assert b.processes() == spared
    assert there.poll() is None
    assert a.run(["hostname"]).stdout == "host-0\n"  # the host itself is still there


def test_a_process_gets_its_environment_and_gives_its_exit_code(lab: Lab) -> None:
    host = lab.hosts[1]
    done = host.run(
        ["sh", "-c", 'echo "$COLOUR $HOME"; read line; echo "$line" >&2; exit 3'],
        env={"COLOUR": "red"},
        input="hello\n",
        check=False,
    )
    assert done.stdout == f"red {os.environ.get('HOME', '')}\n"
    assert done.stderr == "hello\n"
    assert done.returncode == 3
    with pytest.raises(subprocess.CalledProcessError):
        host.run(["false"])
    with pytest.raises(subprocess.TimeoutExpired):
        host.run(["sleep", "1000"], timeout_s=0.1)
    until(lambda: host.processes() == [])
    with pytest.raises(UsageError, match="no program 'nonesuch'"):
        host.start(["nonesuch"])


def test_a_process_outlives_the_thread_that_started_it(lab: Lab) -> None:
    host, started = lab.hosts[0], []

    def start() -> None:
        started.append(host.start(["sleep", "1000"]))
        until(host.processes)  # from here on the kernel knows whom it dies with

    thread = threading.Thread(target=start)
    thread.start()
    thread.join()
    with pytest.raises(subprocess.TimeoutExpired):
        started[0].wait(0.2)


def test_two_labs_at_once_do_not_meet(lab: Lab) -> None:
    with Lab(hosts=2) as other:
        assert other.number != lab.number
        listen(other.hosts[0])
        assert reach((other.hosts[1], "host-0")) == ["connected"]
        here = lab.hosts[1]
        answers = reach((here, "host-0"), (here, other.hosts[0].address))
        assert answers == ["ConnectionRefusedError", "OSError"]  # the second: no way there
        other.cut("host-0")
        assert lab.cuts() == []
        process = lab.hosts[0].start(["sleep", "1000"])
        record = other.record
    assert left_over(record) == []
    assert process.poll() is None
    assert lab.hosts[1].run(["hostname"]).stdout == "host-1\n"


def test_nothing_is_left_over_when_an_exception_leaves_the_lab() -> None:
    lab = Lab(hosts=2, bandwidth="1gbit")
    used: list[Record] = []
    pids: list[int] = []

    def use() -> None:
        with lab:
            lab.hosts[0].start(["sh", "-c", "setsid sleep 1000 & sleep 1000"])
            until(lambda: len(lab.hosts[0].processes()) == 3)
            lab.cut("host-0")
            used.append(lab.record)
            pids.extend(lab.hosts[0].processes())
            assert left_over(lab.record)
            _ = 1 / 0

    with pytest.raises(ZeroDivisionError):
        use()
    assert left_over(used[0]) == []
    assert harness.gone(pids, within_s=0)
    with pytest.raises(LabError, match="does not exist"):
        _ = lab.hosts


def test_a_lab_is_made_again_after_it_was_left() -> None:
    lab = Lab(hosts=1)
    for _ in range(2):
        with lab:
            assert lab.hosts[0].run(["hostname"]).stdout == "host-0\n"


def test_mistakes_are_reported(lab: Lab) -> None:
    with pytest.raises(UsageError, match="no host 'host-9'"):
        lab.cut("host-9")
    with pytest.raises(UsageError, match="host-1 twice"):
        lab.cut("host-1", "host-1")
    with pytest.raises(UsageError, match="name both"):
        lab.heal(None, "host-1")
    with pytest.raises(UsageError, match="list of words"):
        lab.hosts[0].start("echo hello")
    with pytest.raises(LabError, match="already exists"):
        lab.up()
    assert lab.hosts[0].run(["hostname"]).stdout == "host-0\n"
