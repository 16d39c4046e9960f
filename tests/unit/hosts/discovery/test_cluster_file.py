"""Cluster files: what is understood, whose entry is whose, and what is said of wrong ones."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from manyhands.errors import ClusterError
from manyhands.hosts.discovery.file import parse, read
from manyhands.hosts.spec import COORDINATOR, EVALUATOR, SERVER, WORKER, ClusterSpec

GOOD = """
port = 4000
[[hosts]]
name = "ps"
role = "server"
[[hosts]]
name = "eva"
role = "evaluator"
[[hosts]]
name = "gpu-a"
address = "10.0.0.1"
role = "coordinator"
devices = ["cuda:0", "cuda:1"]
[[hosts]]
name = "gpu-b.site.org"
slots = 3
port = 5000
"""


def of(text: str, **how: Any) -> ClusterSpec:
    return parse(tomllib.loads(text), source="c.toml", **how)


def test_every_key_of_a_host() -> None:
    spec = of(GOOD, hostname="ps")
    assert [(e.rank, e.name, e.role, e.host, e.slots) for e in spec.entries] == [
        (0, "gpu-a", COORDINATOR, "10.0.0.1", 2),
        (1, "ps", SERVER, "ps", 1),
        (2, "gpu-b.site.org", WORKER, "gpu-b.site.org", 3),
        (3, "eva", EVALUATOR, "eva", 1),
    ]
    assert spec.entries[0].devices == ("cuda:0", "cuda:1")
    assert (spec.host, spec.port, spec.entries[2].port) == ("10.0.0.1", 4000, 5000)
    assert (spec.size, spec.num_workers, spec.num_servers, spec.me.name) == (3, 5, 1, "ps")


@pytest.mark.parametrize(
    ("hostname", "mine"),
    [
        ("gpu-a", "gpu-a"),
        ("10.0.0.1", "gpu-a"),
        ("gpu-b", "gpu-b.site.org"),
        ("GPU-B.other.net", "gpu-b.site.org"),
        ("10.0.0.2", None),
        ("", None),
    ],
)
def test_mine_is_found_by_the_hosts_own_name(hostname: str, mine: str | None) -> None:
    spec = of(GOOD, hostname=hostname)
    assert (spec.mine.name if spec.mine else None) == mine


def test_mine_by_name_counts_before_the_hostname() -> None:
    assert of(GOOD, hostname="ps", name="gpu-a").me.name == "gpu-a"


def test_an_unlisted_host_gets_an_error_with_the_flag() -> None:
    with pytest.raises(ClusterError, match=r"--as NAME, one of gpu-a, ps, gpu-b\.site\.org, eva"):
        _ = of(GOOD, hostname="laptop").me


def test_two_entries_of_one_host_need_a_name() -> None:
    twice = '[[hosts]]\nname="a"\naddress="h"\n[[hosts]]\nname="b"\naddress="h"\nrole="server"\n'
    assert of(twice, hostname="h").mine is None
    assert of(twice, hostname="h", name="b").me.role == SERVER


def test_the_first_worker_coordinates_by_default() -> None:
    spec = of('[[hosts]]\nname="s"\nrole="server"\n[[hosts]]\nname="w"\n[[hosts]]\nname="v"\n')
    assert [e.name for e in spec.entries] == ["w", "s", "v"]
    assert (spec.host, spec.port) == ("w", 29600)


def test_a_coordinator_without_slots_only_coordinates() -> None:
    spec = of('[[hosts]]\nname="c"\nrole="coordinator"\nslots=0\n[[hosts]]\nname="w"\n')
    assert [e.name for e in spec.workers] == ["w"]


def test_ranks_may_be_given() -> None:
    spec = of('[[hosts]]\nname="a"\nrank=1\n[[hosts]]\nname="b"\nrank=0\nrole="coordinator"\n')
    assert [e.name for e in spec.entries] == ["b", "a"]


def test_json_is_the_same(tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text(GOOD)
    (tmp_path / "c.json").write_text(json.dumps(tomllib.loads(GOOD)))
    toml, as_json = (read(tmp_path / name, hostname="ps") for name in ("c.toml", "c.json"))
    assert toml.entries == as_json.entries
    assert toml.source == str(tmp_path / "c.toml")


HOST = '[[hosts]]\nname="a"\n'


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("", "c.toml has no list of hosts. Write for each of them  [[hosts]]"),
        ("hosts = []", "has no list of hosts"),
        ('hosts = ["a"]', "has no list of hosts"),
        ('[hosts.a]\nrole = "worker"', "has no list of hosts"),
        (
            '[[host]]\nname="a"',
            "c.toml has 'host'; allowed are hosts, port; did you mean 'hosts'?",
        ),
        ("[[hosts]]\n", "hosts[0] of c.toml has no name"),
        (HOST + "[[hosts]]\nname=7\n", "hosts[1] of c.toml has no name"),
        (HOST + "rolle='worker'", "hosts[0] of c.toml has 'rolle'; allowed are name"),
        (HOST + HOST, "has 2 hosts with the name 'a': names tell them apart"),
        (
            HOST + 'role="chief"',
            "is 'chief'; allowed are coordinator, worker, server, evaluator",
        ),
        (HOST + 'role="ps"', "did you mean 'server'?"),
        (HOST + "role=1", "The role of 'a' in c.toml is 1"),
        (HOST + 'address="10.0.0.1:80"', "The address of 'a' in c.toml is '10.0.0.1:80'"),
        (HOST + 'address="a b"', "without a port; a port is  port = 29600"),
        (HOST + "address=5", "The address of 'a' in c.toml is 5"),
        (HOST + "port=0", "port of 'a' in c.toml is 0: it must be a whole number from 1 to 65535"),
        ("port=65536\n" + HOST, "port of c.toml is 65536"),
        ("port='x'\n" + HOST, "port of c.toml is 'x'"),
        (
            HOST + "slots=0",
            "'a' in c.toml has slots = 0, and is a worker. Only the coordinator can",
        ),
        (HOST + "slots=true", "slots of 'a' in c.toml is True"),
        (HOST + "slots=-2", "slots of 'a' in c.toml is -2"),
        (
            HOST + 'devices="cuda:0"',
            "The devices of 'a' in c.toml are 'cuda:0': they must be a list",
        ),
        (HOST + 'devices=["gpu0"]', "they must be a list of cpu, cuda or cuda:N"),
        (HOST + 'slots=2\ndevices=["cpu"]', "has slots = 2 and 1 devices"),
        (HOST + 'role="server"', "has no worker and no coordinator: no process would train"),
        (HOST + 'role="coordinator"\nslots=0', "and 'a' has slots = 0: no process would train"),
        (
            HOST + 'role="coordinator"\n[[hosts]]\nname="b"\nrole="coordinator"',
            "has 2 coordinators: a, b. Only one is allowed",
        ),
        (HOST + "rank=0\n[[hosts]]\nname='b'\nrank=0", "'a' and 'b' in c.toml both have rank 0"),
        (HOST + "rank=0\n[[hosts]]\nname='b'", "'b' in c.toml has no rank, and others have"),
        (HOST + "rank=2\n[[hosts]]\nname='b'\nrank=0", "rank of 'a' in c.toml is 2: it must be"),
        (HOST + "rank=-1", "rank of 'a' in c.toml is -1"),
        (
            HOST + "rank=1\nrole='coordinator'\n[[hosts]]\nname='b'\nrank=0",
            "'a' in c.toml is the coordinator, and its rank is 1: it must be 0",
        ),
        (
            HOST
            + "rank=0\n[[hosts]]\nname='e'\nrank=1\nrole='evaluator'\n[[hosts]]\nname='c'\nrank=2",
            "'e' in c.toml is an evaluator, which is not counted",
        ),
    ],
)
def test_every_mistake_is_named(text: str, wanted: str) -> None:
    with pytest.raises(ClusterError) as caught:
        of(text)
    assert wanted in str(caught.value)


def test_a_name_that_is_not_there_gets_the_closest() -> None:
    with pytest.raises(
        ClusterError, match=r"--as gpu-c: .* there are gpu-a, .* did you mean 'gpu-a'"
    ):
        of(GOOD, name="gpu-c")


@pytest.mark.parametrize(
    ("name", "text", "wanted"),
    [
        ("none.toml", None, "can't be read: No such file or directory"),
        ("c.toml", b"hosts = [", "can't be read as TOML"),
        ("c.json", b"{", "can't be read as JSON"),
        (
            "c.json",
            b'{"hosts": [{"name": "a", "name": "b"}]}',
            "'name' is there 2 times in one object",
        ),
        ("c.json", b"[]", "must be an object"),
        ("c.toml", b"\xff", "it is not text in UTF-8"),
    ],
)
def test_files_that_can_not_be_read(
    tmp_path: Path, name: str, text: bytes | None, wanted: str
) -> None:
    if text is not None:
        (tmp_path / name).write_bytes(text)
    with pytest.raises(ClusterError) as caught:
        read(tmp_path / name)
    assert wanted in str(caught.value)
    assert name in str(caught.value)


SCALARS = st.none() | st.booleans() | st.integers() | st.text("abw:0. ", max_size=5)
HOSTS = st.dictionaries(
    st.sampled_from(["name", "address", "role", "rank", "slots", "devices", "port"]),
    SCALARS | st.sampled_from(["worker", "server", "coordinator"]) | st.lists(SCALARS, max_size=2),
)


@given(st.fixed_dictionaries({"hosts": st.lists(HOSTS | SCALARS, max_size=4)}) | SCALARS)
def test_garbage_gets_an_error_and_never_a_crash(value: Any) -> None:
    try:
        spec = parse(value, source="it")
    except ClusterError:
        return
    assert spec.workers
