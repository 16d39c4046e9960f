"""TF_CONFIG: what becomes what, and what is said of each way to get it wrong."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from manyhands.errors import ClusterError
from manyhands.hosts.discovery.tf_config import parse
from manyhands.hosts.spec import COORDINATOR, EVALUATOR, SERVER, WORKER

CHIEF = {"chief": ["a:1"], "worker": ["b:1", "c:1"], "ps": ["d:1", "e:1"], "evaluator": ["f:1"]}
TWO = {"worker": ["a:1", "b:1"]}


def config(cluster: Any = None, task: Any = None, **more: Any) -> str:
    parts = {"cluster": TWO if cluster is None else cluster}
    parts["task"] = {"type": "worker", "index": 0} if task is None else task
    return json.dumps(parts | more)


def task(kind: Any, index: Any) -> dict[str, Any]:
    return {"type": kind, "index": index}


def test_roles_are_mapped() -> None:
    spec = parse(config(CHIEF, task("ps", 1)))
    assert [(e.rank, e.name, e.role, e.host) for e in spec.entries] == [
        (0, "chief-0", COORDINATOR, "a"),
        (1, "worker-0", WORKER, "b"),
        (2, "worker-1", WORKER, "c"),
        (3, "ps-0", SERVER, "d"),
        (4, "ps-1", SERVER, "e"),
        (5, "evaluator-0", EVALUATOR, "f"),
    ]
    assert (spec.host, spec.port, spec.me.name) == ("a", 1, "ps-1")


def test_evaluators_are_not_counted() -> None:
    spec = parse(config(CHIEF, task("chief", 0)))
    assert (spec.size, spec.num_workers, spec.num_servers) == (5, 3, 2)


def test_without_a_chief_the_first_worker_leads() -> None:
    spec = parse(config(TWO | {"ps": ["d:7"]}, task("worker", 1)))
    assert [e.role for e in spec.entries] == [COORDINATOR, WORKER, SERVER]
    assert (spec.coordinator.name, spec.host, spec.me.rank) == ("worker-0", "a", 1)


def test_an_evaluator_need_not_be_in_the_cluster() -> None:
    spec = parse(config(TWO, task("evaluator", 0)), hostname="mine")
    assert (spec.me.role, spec.me.host, spec.size) == (EVALUATOR, "mine", 2)


def test_local_ranks_count_on_one_host() -> None:
    spec = parse(config({"worker": ["a:1", "b:1", "a:2"], "ps": ["a:3"]}))
    assert [e.local_rank for e in spec.entries] == [0, 0, 1, 2]


def test_a_chief_alone_is_a_cluster() -> None:
    assert parse(config({"chief": ["[fd00::1]:9"]}, task("chief", 0))).rendezvous == "[fd00::1]:9"


def test_other_keys_are_ignored_and_an_index_may_be_a_string() -> None:
    spec = parse(config(task=task("worker", "1"), environment="cloud", rpc_layer="grpc"))
    assert spec.me.name == "worker-1"


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("", "TF_CONFIG is set, but empty"),
        ("  ", "unset TF_CONFIG"),
        ("{'cluster': {}}", "can't be read as JSON"),
        ('{"cluster": {"worker": ["a:1"]', "can't be read as JSON"),
        ('["a:1"]', 'TF_CONFIG is a list: it must be an object with "cluster" and "task"'),
        ("null", "TF_CONFIG is null"),
        ('{"task": {"type": "worker", "index": 0}}', 'TF_CONFIG has no "cluster"'),
        ('{"cluster": {"worker": ["a:1"], "worker": ["b:1"]}}', "'worker' is there 2 times"),
        (config(["a:1"]), '"cluster" in TF_CONFIG is a list: it must be an object of roles'),
        (config({}), '"cluster" in TF_CONFIG is empty'),
        (config({"worker": []}), '"cluster" in TF_CONFIG is empty'),
        (config({"workers": ["a:1"]}), "has the role 'workers'; allowed are chief, worker, ps"),
        (config({"workers": ["a:1"]}), "did you mean 'worker'?"),
        (config({"worker": "a:1"}), '"worker" in TF_CONFIG is a text: it must be a list'),
        (config({"worker": {"0": "a:1"}}), '"worker" in TF_CONFIG is an object'),
        (config({"worker": [5]}), "worker[0] in TF_CONFIG is the number 5"),
        (config({"worker": ["a"]}), "worker[0] in TF_CONFIG is 'a': it has no port: write a:2222"),
        (
            config({"worker": ["a:1", "b:x"]}),
            "worker[1] in TF_CONFIG is 'b:x': its port 'x' is not",
        ),
        (config({"worker": ["a:"]}), "its port '' is not a number"),
        (config({"worker": ["a:0"]}), "its port is 0, and ports go from 1 to 65535"),
        (config({"worker": ["a:65536"]}), "its port is 65536"),
        (config({"worker": ["fd00::1"]}), "with an IPv6 host in brackets"),
        (config({"worker": ["grpc://a:1"]}), "it must be HOST:PORT"),
        (config({"worker": [" :1"]}), "it must be HOST:PORT"),
        (
            config({"worker": ["a:1"], "ps": ["a:1"]}),
            "the address a:1 twice, as worker[0] and as ps[0]",
        ),
        (config({"chief": ["a:1", "b:1"]}), "has 2 addresses as 'chief': only one is allowed"),
        (config(TWO | {"evaluator": ["x:1", "y:1"]}), "has 2 addresses as 'evaluator'"),
        (config({"ps": ["a:1"]}, task("ps", 0)), "has no chief and no worker, only ps"),
        (config({"evaluator": ["a:1"]}, task("evaluator", 0)), "no process would train"),
        (json.dumps({"cluster": TWO}), 'TF_CONFIG has no "task"'),
        (config(task="worker"), '"task" in TF_CONFIG is a text'),
        (config(task={"type": "worker"}), '"task" in TF_CONFIG has no "index"'),
        (config(task={"index": 0}), '"task" in TF_CONFIG has no "type"'),
        (config(task=task("server", 0)), "type in TF_CONFIG is 'server'; allowed are chief"),
        (config(task=task(["worker"], 0)), "type in TF_CONFIG is a list"),
        (config(task=task("chief", 0)), 'The task in TF_CONFIG is a chief, and "cluster" has none'),
        (config(task=task("ps", 0)), 'only worker. Add  "ps": ["HOST:PORT"]'),
        (config(task=task("worker", "first")), "index in TF_CONFIG is 'first': it must be a whole"),
        (config(task=task("worker", 0.5)), "index in TF_CONFIG is the number 0.5"),
        (config(task=task("worker", True)), "index in TF_CONFIG is true"),
        (config(task=task("worker", None)), "index in TF_CONFIG is null"),
        (config(task=task("worker", -1)), "index in TF_CONFIG is -1: worker goes from 0 to 1"),
        (config(task=task("worker", 2)), "index in TF_CONFIG is 2: worker goes from 0 to 1"),
        (config(task=task("evaluator", 1)), "index in TF_CONFIG is 1: evaluator goes from 0 to 0"),
    ],
)
def test_every_mistake_is_named(text: str, wanted: str) -> None:
    with pytest.raises(ClusterError) as caught:
        parse(text)
    assert wanted in str(caught.value)


NAMES = st.integers(0, 60).map(lambda n: f"host-{n}")


@given(
    st.lists(st.tuples(NAMES, st.integers(1, 65535)), min_size=1, max_size=12, unique=True),
    st.booleans(),
    st.data(),
)
def test_all_processes_read_the_same_cluster(
    places: list[tuple[str, int]], has_chief: bool, data: st.DataObject
) -> None:
    addresses = [f"{host}:{port}" for host, port in places]
    num_servers = data.draw(st.integers(0, len(addresses) - 1))
    trainers, servers = addresses[num_servers:], addresses[:num_servers]
    cluster: dict[str, list[str]] = {"ps": servers, "worker": trainers}
    if has_chief:
        cluster = {"ps": servers, "worker": trainers[1:], "chief": trainers[:1]}
    seen, ranks = set(), []
    for role, members in cluster.items():
        for index in range(len(members)):
            spec = parse(config(cluster, task(role, index)))
            seen.add((spec.entries, spec.host, spec.port))
            ranks.append(spec.me.rank)
            assert f"{spec.me.host}:{spec.me.port}" == members[index]
    assert len(seen) == 1
    assert sorted(ranks) == list(range(len(addresses)))
    assert next(iter(seen))[0][0].role == COORDINATOR


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["cluster", "task", "worker", "chief", "ps", "type", "index"])
            | st.text(),
            inner,
            max_size=4,
        )
    ),
)


@given(ANYTHING | st.fixed_dictionaries({"cluster": ANYTHING, "task": ANYTHING}))
def test_garbage_gets_an_error_and_never_a_crash(value: Any) -> None:
    try:
        spec = parse(json.dumps(value))
    except ClusterError:
        return
    assert spec.workers
