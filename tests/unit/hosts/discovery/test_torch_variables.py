"""RANK, WORLD_SIZE and the rest: what is understood, and what is said of wrong ones."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from manyhands.errors import ClusterError
from manyhands.hosts.discovery import detect
from manyhands.hosts.spec import COORDINATOR, WORKER

PLAIN = {"RANK": "1", "WORLD_SIZE": "3", "MASTER_ADDR": "node-a", "MASTER_PORT": "29500"}
TORCHRUN = PLAIN | {
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "GROUP_RANK": "0",
    "TORCHELASTIC_RUN_ID": "none",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}


def test_plain_variables_give_the_rank_and_the_address_of_rank_0() -> None:
    spec = detect(PLAIN, hostname="here")
    assert [entry.role for entry in spec.entries] == [COORDINATOR, WORKER, WORKER]
    assert [entry.host for entry in spec.entries] == ["node-a", "here", ""]
    assert (spec.host, spec.port, spec.store) == ("node-a", 29500, None)
    assert (spec.me.name, spec.me.rank, spec.size) == ("rank-1", 1, 3)
    assert spec.rendezvous == "node-a:29500"
    assert spec.source == "RANK and WORLD_SIZE"


def test_under_torchrun_the_port_is_taken_by_its_store_and_neighbours_are_known() -> None:
    spec = detect(TORCHRUN, hostname="here")
    assert (spec.port, spec.store, spec.rendezvous) == (None, "node-a:29500", "node-a:29500")
    assert [entry.host for entry in spec.entries] == ["here", "here", ""]
    assert [entry.local_rank for entry in spec.entries] == [0, 1, None]
    assert spec.source == "torchrun"


def test_without_a_local_rank_the_rank_picks_the_device() -> None:
    assert detect(PLAIN, hostname="here").me.local_rank == 1


def test_an_ipv6_master_gets_its_brackets() -> None:
    assert detect(PLAIN | {"MASTER_ADDR": "fd00::1"}).rendezvous == "[fd00::1]:29500"


def test_a_process_that_nothing_describes_can_be_a_cluster_of_one() -> None:
    spec = detect({}, hostname="here", or_alone=True)
    assert (spec.size, spec.me.rank, spec.me.local_rank, spec.rendezvous) == (1, 0, 0, None)


@pytest.mark.parametrize(
    ("change", "wanted"),
    [
        ({"WORLD_SIZE": None}, "RANK or WORLD_SIZE is set, but WORLD_SIZE is not"),
        ({"RANK": None}, "but RANK is not"),
        ({"MASTER_ADDR": None}, "set MASTER_ADDR, or unset RANK and WORLD_SIZE"),
        ({"MASTER_PORT": None}, "but MASTER_PORT is not"),
        ({"WORLD_SIZE": "two"}, "WORLD_SIZE is 'two': it must be a whole number, from 1 to"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE is 0: it must be from 1 to"),
        ({"WORLD_SIZE": ""}, "WORLD_SIZE is ''"),
        ({"RANK": "-1"}, "RANK is '-1': it must be a whole number, 0 or more"),
        ({"RANK": "1.0"}, "RANK is '1.0'"),
        ({"RANK": "3"}, "RANK is 3 and WORLD_SIZE is 3: ranks go from 0 to 2"),
        ({"LOCAL_RANK": "x"}, "LOCAL_RANK is 'x'"),
        ({"LOCAL_WORLD_SIZE": "4"}, "LOCAL_WORLD_SIZE is 4: it must be from 1 to 3"),
        (
            {"LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "1"},
            "LOCAL_RANK is 1 and LOCAL_WORLD_SIZE is 1: local ranks go from 0 to 0",
        ),
        (
            {"MASTER_PORT": "http"},
            "MASTER_PORT is 'http': it must be a whole number, from 1 to 65535",
        ),
        ({"MASTER_PORT": "65536"}, "MASTER_PORT is 65536: it must be from 1 to 65535"),
        ({"MASTER_ADDR": ""}, "MASTER_ADDR is ''"),
        ({"MASTER_ADDR": "node:1"}, "MASTER_ADDR is 'node:1': it must be the name or the address"),
        ({"MASTER_ADDR": "tcp://node"}, "MASTER_ADDR is 'tcp://node'"),
    ],
)
def test_errors_name_the_wrong_variable(change: dict[str, str | None], wanted: str) -> None:
    environ = {name: value for name, value in (PLAIN | change).items() if value is not None}
    with pytest.raises(ClusterError) as caught:
        detect(environ)
    assert wanted in str(caught.value)


def test_without_variables_the_error_lists_them() -> None:
    with pytest.raises(ClusterError, match="torchrun"):
        detect({"HOME": "/root"})


@given(st.integers(1, 8), st.data())
def test_every_rank_of_a_torchrun_sees_the_same_cluster(
    num_hosts: int, data: st.DataObject
) -> None:
    """Each process fills in what it knows, and no two contradict each other."""
    sizes = data.draw(st.lists(st.integers(1, 4), min_size=num_hosts, max_size=num_hosts))
    world, rank = sum(sizes), 0
    known: dict[int, set[tuple[str, int | None]]] = {}
    for group, size in enumerate(sizes):
        for local in range(size):
            spec = detect(
                TORCHRUN
                | {"RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(local)}
                | {
                    "LOCAL_WORLD_SIZE": str(size),
                    "GROUP_RANK": str(group),
                    "MASTER_ADDR": "host-0",
                },
                hostname=f"host-{group}",
            )
            assert spec.me.rank == rank
            for entry in spec.entries:
                if entry.local_rank is not None:
                    known.setdefault(entry.rank, set()).add((entry.host, entry.local_rank))
            rank += 1
    assert sorted(known) == list(range(world))
    assert all(len(seen) == 1 for seen in known.values())
