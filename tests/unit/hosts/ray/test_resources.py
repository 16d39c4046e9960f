"""What is asked of a Ray cluster, and whether it could ever give it."""

from __future__ import annotations

import re
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from manyhands.errors import UsageError
from manyhands.hosts.ray.broker_client import check_installed
from manyhands.hosts.ray.resources import (
    RayNode,
    RaySlot,
    check_possible,
    describe,
    fitting,
    in_order,
    parse_place,
    slots_for,
    waits,
)
from manyhands.hosts.view import SERVER, WORKER


def node(cpus: float, gpus: float = 0) -> RayNode:
    return RayNode("host", "10.0.0.1", cpus, gpus)


def slots(
    workers: int = 2, *, servers: int = 0, device: str = "cpu", gpus: float = 0
) -> list[RaySlot]:
    return slots_for(workers=workers, servers=servers, threads=1, device=device, gpus=gpus)


# Addresses ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ("ray", ""),
        ("ray=local", "local"),
        ("ray=auto", "auto"),
        ("ray=head:6379", "head:6379"),
        ("ray=[fd00::1]:6379", "[fd00::1]:6379"),
        ("local", None),
        ("rayy", None),
    ],
)
def test_places_with_an_address(given: str, wanted: str | None) -> None:
    assert parse_place(given) == wanted


@pytest.mark.parametrize(
    "given",
    ["ray=", "ray=head", "ray=head:0", "ray=head:65536", "ray=a b:1"],
)
def test_wrong_places(given: str) -> None:
    with pytest.raises(UsageError, match="ray=HOST:PORT"):
        parse_place(given)


@pytest.mark.parametrize("given", ["ray://head:10001", "ray=ray://head:10001"])
def test_addresses_for_clients_are_refused_with_what_to_type(given: str) -> None:
    line = (
        "ray job submit --address http://head:8265 --working-dir . -- manyhands train ... --on ray"
    )
    with pytest.raises(UsageError, match=re.escape(line)):
        parse_place(given)


# Slots --------------------------------------------------------------------------------------------


def test_each_member_has_a_slot_of_its_own_rank() -> None:
    asked = slots(3, servers=2)
    assert [slot.rank for slot in asked] == [1, 2, 3, 4, 5]
    assert [slot.role for slot in asked] == [WORKER] * 3 + [SERVER] * 2


@pytest.mark.parametrize(
    ("device", "gpus", "wanted"),
    [
        ("cpu", 8, "ccc"),
        ("cuda", 0, "ggg"),
        ("cuda,cpu", 1, "gcg"),
        ("auto", 3, "ggg"),
        ("auto", 2, "ccc"),
        ("cuda,auto", 3, "ggg"),
        ("cuda,auto", 2, "gcg"),
    ],
)
def test_which_slots_have_a_gpu(device: str, gpus: float, wanted: str) -> None:
    """`auto` takes GPUs if there is one for each, and otherwise none."""
    asked = slots(3, servers=1, device=device, gpus=gpus)
    assert "".join("g" if slot.gpu else "c" for slot in asked) == wanted + "c"


def test_ray_picks_the_gpu() -> None:
    with pytest.raises(UsageError, match="Which GPU it is, Ray decides"):
        slots(device="cuda:1")


def test_required_slots_come_first_in_a_range() -> None:
    first, spare = in_order(slots(4, servers=1), 2)
    assert [slot.rank for slot in first] == [1, 2, 5]
    assert [slot.rank for slot in spare] == [3, 4]
    assert in_order(slots(4, servers=1), None) == (slots(4, servers=1), [])


@given(
    st.lists(st.tuples(st.integers(1, 4), st.booleans()), max_size=6),
    st.lists(st.tuples(st.integers(0, 8), st.integers(0, 2)), max_size=4),
)
def test_never_more_fit_than_there_is_room_for(
    asked: list[tuple[int, bool]], there: list[tuple[int, int]]
) -> None:
    wanted = [RaySlot(rank, WORKER, cpus, gpu) for rank, (cpus, gpu) in enumerate(asked)]
    nodes = [node(*has) for has in there]
    number = fitting(wanted, nodes)
    assert number <= sum(any(s.cpus <= n.cpus and s.gpu <= n.gpus for n in nodes) for s in wanted)
    assert number <= sum(n.cpus for n in nodes)
    assert number >= bool(wanted and nodes) * any(
        all(s.cpus <= n.cpus and s.gpu <= n.gpus for s in wanted) for n in nodes
    )
    assert fitting(wanted, [*nodes, node(100, 100)]) == len(wanted)


def test_impossible_requests_are_refused() -> None:
    check_possible(slots(3), [node(1), node(2)])
    check_possible(slots(2, device="cuda,cpu"), [node(1, 1), node(1)])
    with pytest.raises(
        UsageError, match=r"(?s)2 workers with 1 CPU and 1 GPU each. .*2 CPUs and 1 GPU"
    ):
        check_possible(slots(device="cuda"), [node(2, 1), node(8)])
    with pytest.raises(UsageError, match="no node at all"):
        check_possible(slots(), [])
    # One large node does not make up for several small ones.
    big = [RaySlot(1, WORKER, 3)]
    with pytest.raises(UsageError, match="--wait 600"):
        check_possible(big, [node(2), node(2)])


def test_texts() -> None:
    asked = slots(3, servers=1, device="cuda,cpu")
    assert describe(asked) == (
        "2 workers with 1 CPU and 1 GPU each and 1 worker with 1 CPU and 1 server with 1 CPU"
    )
    told = "waits for 2 of 4 slots: the cluster has 3 free CPUs, 1 free GPU"
    assert waits(2, 4, {"CPU": 3.0, "GPU": 1.0}) == told


def test_ray_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [])
    monkeypatch.delitem(sys.modules, "ray", raising=False)
    with pytest.raises(UsageError, match=r"pip install 'manyhands\[ray\]'"):
        check_installed()
