"""The same job on one host and on several: by hand, by torchrun, by TF_CONFIG, in a lab; and hosts that
fail."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from in_lab import Cast
from together import (
    KEY,
    LONG_S,
    Process,
    Together,
    manyhands,
    place,
    step_reached,
    together,
    until,
)

from manyhands.events.jsonl import read_events
from manyhands.testing.harness import Finished, train, train_arguments
from manyhands.testing.lab import Lab
from manyhands.testing.ports import reserve_port

END_S = 180.0


def ended(first: Process, run: Path) -> Finished:
    return Finished(first.wait(END_S), first.out, first.out, 0.0, run)


def arguments(run: Path, strategy: str, *flags: str, **fields: object) -> list[str]:
    """Without --workers: one in each slot."""
    given = train_arguments("Regression", run, *flags, strategy=strategy, **fields)
    at = given.index("--workers")
    return [*given[:at], *given[at + 2 :], "--on", "env"]


def by_hand(hosts: Together, world: int, command: Sequence[str]) -> list[Process]:
    port = reserve_port()
    return [
        hosts.start(manyhands(*command), environ=place(rank, world, port)) for rank in range(world)
    ]


def by_torchrun(hosts: Together, command: Sequence[str]) -> list[Process]:
    start = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nnodes",
        "2",
        "--nproc-per-node",
        "1",
    ]
    start += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{reserve_port()}"]
    start += ["--rdzv-id", "test", "--local-addr", "127.0.0.1", "--no-python"]
    environ = {"MANYHANDS_KEY": KEY}
    return [hosts.start([*start, *manyhands(*command)], environ=environ) for _ in range(2)]


def by_tf_config(
    hosts: Together, shape: dict[str, int], command: Sequence[str]
) -> dict[str, Process]:
    """So many processes of each kind, by their names."""
    cluster = {
        kind: [f"127.0.0.1:{reserve_port()}" for _ in range(number)]
        for kind, number in shape.items()
    }
    started = {}
    for kind, number in shape.items():
        for index in range(number):
            config = {"cluster": cluster, "task": {"type": kind, "index": index}}
            environ = {"TF_CONFIG": json.dumps(config), "MANYHANDS_KEY": KEY}
            started[f"{kind}-{index}"] = hosts.start(manyhands(*command), environ=environ)
    return started


def hosts_of(done: Finished) -> set[str]:
    return {event["host"] for event in done.of("MemberStarted")}


def check_curve(done: Finished, alone: Finished, num_hosts: int = 2) -> None:
    assert done.code == 0, done.out
    assert len(done.losses) == len(alone.losses) > 0
    assert done.losses == pytest.approx(alone.losses, abs=1e-5)
    assert len(hosts_of(done)) == num_hosts
    config = (done.run / "config.json").read_text() + (done.run / "events.jsonl").read_text()
    assert KEY not in config + done.out


def check_every_sample(done: Finished) -> None:
    assert done.code == 0, done.out
    uses = done.uses_by_epoch()
    assert uses
    for epoch, used in uses.items():
        assert sorted(used) == list(range(98)), f"epoch {epoch}"


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    return train("Regression", tmp_path_factory.mktemp("alone") / "run")


def long(*values: object) -> object:
    return pytest.param(*values, marks=pytest.mark.long)


@pytest.mark.parametrize("strategy", ["allreduce", long("ps:sync"), long("ps:sync(servers=1)")])
def test_two_processes_by_hand(tmp_path: Path, alone: Finished, strategy: str) -> None:
    with together(tmp_path) as hosts:
        first, second = by_hand(hosts, 2, arguments(tmp_path / "run", strategy))
        done = ended(first, tmp_path / "run")
        assert second.wait() == 0
    check_curve(done, alone)
    assert {path.name for path in (done.run / "logs").iterdir()} == {"worker-0.log", "worker-1.log"}


@pytest.mark.long
@pytest.mark.parametrize("strategy", ["allreduce", "ps:sync"])
def test_torchrun_on_two_hosts(tmp_path: Path, alone: Finished, strategy: str) -> None:
    with together(tmp_path) as hosts:
        started = by_torchrun(hosts, arguments(tmp_path / "run", strategy))
        codes = [one.wait(END_S) for one in started]
        out = "\n".join(one.out for one in started)
    assert codes == [0, 0], out
    check_curve(Finished(0, out, out, 0.0, tmp_path / "run"), alone)


@pytest.mark.long
@pytest.mark.parametrize("strategy", ["allreduce", "ps:sync"])
def test_three_hosts_of_a_lab(tmp_path: Path, alone: Finished, lab: Lab, strategy: str) -> None:
    run = tmp_path / "run"
    done = Cast(lab, tmp_path, arguments(run, strategy), run).finish()
    check_curve(done, alone, num_hosts=3)
    assert hosts_of(done) == {"host-0", "host-1", "host-2"}


SHAPE = {"chief": 1, "worker": 2, "ps": 2}


def test_synchronous_servers_by_tf_config(tmp_path: Path, alone: Finished) -> None:
    run = tmp_path / "run"
    with together(tmp_path) as hosts:
        started = by_tf_config(hosts, SHAPE, arguments(run, "ps:sync"))
        done = ended(started["chief-0"], run)
        assert [one.wait() for one in started.values()] == [0] * 5
    check_curve(done, alone, num_hosts=5)
    view = done.of("ViewChanged")[0]
    assert (len(view["members"]), view["servers"]) == (5, 2)


@pytest.mark.long
@pytest.mark.parametrize("flags", [[], ["--trust-network"]])
def test_asynchronous_servers_by_tf_config(tmp_path: Path, flags: list[str]) -> None:
    run = tmp_path / "run"
    with together(tmp_path) as hosts:
        started = by_tf_config(hosts, {**SHAPE, "evaluator": 1}, arguments(run, "ps:async", *flags))
        done = ended(started["chief-0"], run)
        assert [one.wait() for one in started.values()] == [0] * 6
        assert "the workers evaluate" in started["evaluator-0"].out
    check_every_sample(done)
    assert len(hosts_of(done)) == 5
    transport = "tcp, authenticated only" if flags else "tcp with TLS"
    assert done.of("ViewChanged")[0]["transport"] == transport


@pytest.mark.long
def test_inside_one_host_they_share_memory_and_need_no_key(tmp_path: Path) -> None:
    with together(tmp_path) as hosts:
        port, started = reserve_port(), []
        for rank in range(2):
            environ = {**place(rank, 2, port), "MANYHANDS_KEY": ""}
            given = manyhands(*arguments(tmp_path / "run", "ps:sync"))
            started.append(hosts.start(given, environ=environ, own_host=False))
        done = ended(started[0], tmp_path / "run")
        assert started[1].wait() == 0
    assert done.code == 0, done.out
    assert done.of("ViewChanged")[0]["transport"] == "shared memory"


def test_the_workers_of_each_host_share_memory(tmp_path: Path) -> None:
    """Also after the death of one that speaks for its host."""
    run, fields = tmp_path / "run", {"pause_s": 0.05, "epochs": 6, "anneal": False}
    with together(tmp_path) as hosts:
        first, second = by_hand(hosts, 2, arguments(run, "allreduce", "--slots", "2", **fields))
        until(lambda: step_reached(run, 10), END_S)
        started = [e for e in read_events(run / "events.jsonl") if e["event"] == "MemberStarted"]
        of_second = [e for e in started if e["host"] != started[0]["host"]]
        os.kill(of_second[0]["pid"], signal.SIGKILL)
        done = ended(first, run)
        assert second.wait() == 0
    alone = train("Regression", tmp_path / "alone", **{**fields, "pause_s": 0})
    check_curve(done, alone)
    check_every_sample(done)
    assert len(started) == 4
    assert [lost["member"] for lost in done.of("MemberLost")] == [of_second[0]["member"]]
    transports = [view["transport"] for view in done.of("ViewChanged")]
    assert len(transports) > 1
    assert {text.rpartition(" on ")[0] for text in transports} == {
        "shared memory, between hosts gloo"
    }


@pytest.mark.long
@pytest.mark.parametrize(
    ("strategy", "slots"), [("allreduce", 1), ("allreduce", 2), ("ps:sync", 1), ("ps:async", 1)]
)
def test_a_host_dies_and_comes_back(tmp_path: Path, strategy: str, slots: int) -> None:
    run = tmp_path / "run"
    with together(tmp_path) as hosts:
        given = arguments(run, strategy, "--slots", str(slots), pause_s=0.05, epochs=30)
        port = reserve_port()
        started = [
            hosts.start(manyhands(*given), environ=place(rank, 3, port)) for rank in range(3)
        ]
        until(lambda: step_reached(run, 20), END_S)
        started[1].signal(signal.SIGKILL)
        until(lambda: any(e["event"] == "Recovered" for e in read_events(run / "events.jsonl")))
        again = hosts.start(manyhands(*given), environ=place(1, 3, port))
        done = ended(started[0], run)
        assert started[2].wait() == 0
        assert again.wait() == 0
    check_every_sample(done)
    assert len(lost := done.of("MemberLost")) == slots
    assert all("is lost" in each["reason"] for each in lost)
    assert len(done.of("ViewChanged")[-1]["members"]) == 3 * slots


@pytest.mark.long
@pytest.mark.parametrize("strategy", ["allreduce", "ps:sync"])
def test_all_members_die_and_begin_again_where_they_were(
    tmp_path: Path, alone: Finished, strategy: str
) -> None:
    """With `ps:sync` two workers and two servers, each in a place of its own."""
    run = tmp_path / "run"
    command = arguments(run, strategy, "--checkpoint-every", "3", pause_s=0.05)
    shape = {"chief": 1, "worker": 1, "ps": 2}
    with together(tmp_path) as hosts:
        if strategy == "allreduce":
            first, *others = by_hand(hosts, 2, command)
        else:
            first, *others = by_tf_config(hosts, shape, command).values()
        until(lambda: step_reached(run, 8))
        started = [e for e in read_events(run / "events.jsonl") if e["event"] == "MemberStarted"]
        for member in started:
            os.kill(member["pid"], signal.SIGKILL)
        done = ended(first, run)
        assert done.code == 0, done.out
        assert [other.wait() for other in others] == [0] * len(others)
    assert len(done.of("Resumed")) == 1
    assert len({member["host"] for member in started}) == 1 + len(others)
    again = [member for member in done.of("MemberStarted") if member not in started]
    assert len({member["host"] for member in again}) == 1 + len(others)
    check_every_sample(done)
    assert done.losses == pytest.approx(alone.losses, abs=1e-5)


@pytest.mark.long
def test_preempted_everywhere_it_saves_and_goes_on_elsewhere(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with together(tmp_path) as hosts:
        started = by_hand(hosts, 2, arguments(run, "allreduce", pause_s=0.05, epochs=6))
        until(lambda: step_reached(run, 10), END_S)
        for one in reversed(started):
            one.signal(signal.SIGTERM)
            time.sleep(0.1)
        assert [one.wait(LONG_S) for one in started] == [75, 75], started[0].out
        assert started[0].out.endswith(f"continue with:  manyhands resume {run} --on env\n")
        port = reserve_port()
        given = manyhands("resume", str(run), "--on", "env", "--device", "cpu")
        started = [hosts.start(given, environ=place(rank, 2, port)) for rank in range(2)]
        done = ended(started[0], run)
        assert started[1].wait() == 0
    check_every_sample(done)


@pytest.mark.long
def test_a_host_more_than_were_announced(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with together(tmp_path) as hosts:
        given = manyhands(*arguments(run, "allreduce", "--workers", "2:3", pause_s=0.05, epochs=30))
        port = reserve_port()
        started = [hosts.start(given, environ=place(rank, 2, port)) for rank in range(2)]
        until(lambda: step_reached(run, 10), END_S)
        started.append(hosts.start(given, environ=place(2, 3, port)))
        done = ended(started[0], run)
        assert [one.wait() for one in started[1:]] == [0, 0]
    check_every_sample(done)
    views = [event["members"] for event in done.of("ViewChanged")]
    assert views[0] == ["worker-0", "worker-1"]
    assert views[-1] == ["worker-0", "worker-1", "worker-2"]
    assert len(hosts_of(done)) == 3
