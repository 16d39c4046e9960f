"""What members say is read field by field: as it should be, or not at all."""

from __future__ import annotations

import copy
import dataclasses
import json
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from manyhands.contract import WHOLE, AppliedPart
from manyhands.control.messages import (
    FROM_MEMBER,
    TO_MEMBER,
    CheckpointOrder,
    EvaluateOrder,
    HandOverOrder,
    LeaveOrder,
    Order,
    Portion,
    Ready,
    RehearseOrder,
    RestOrder,
    StepsReport,
    StopOrder,
    TrainOrder,
    ViewJoined,
)
from manyhands.errors import ProtocolError
from manyhands.hosts.agent_messages import FROM_AGENT, TO_AGENT, AgentHello
from manyhands.transport.fields import encode, read, write

parse = FROM_MEMBER.read
ROW = [3, 8.0, 4.5, 0.1, 0.01, 0.009, None, 120, 0, 0, False]
APPLIED = {
    "version": 4,
    "parts": [[3, 0, None], [4, -1, [8.0, 2.0]], [5, 1, None, 3]],
    "pushes": {"worker-0": 3},
}
SEAT = {"name": "worker-1", "host": "h", "role": "worker", "device": "cpu", "device_id": "cpu"}
FIELDS = {"batch_size": 8, "epochs": 2, "eval_every": 1, "monitor": "loss", "patience": None}
FACTS = {
    "job": "Regression",
    "fields": FIELDS,
    "all_fields": {**FIELDS, "lr": 0.1},
    "device": "cpu",
    "torch": "2",
    "parameters": 7,
    "train_samples": 100,
    "eval_samples": 10,
    "unit": ["samples", 1],
    "tables": {},
    "built": {"metrics": ["loss"], "optimizer": [["SGD", "lr=0.1"]], "notes": []},
}
READY = {"kind": "Ready", "seat": SEAT, "facts": FACTS}
FAILED = {
    "kind": "Failed",
    "reason": "x",
    "traceback": "",
    "usage": False,
    "consequence": False,
    "weights_lost": False,
    "exit_code": 1,
}


def report(kind: str, **fields: Any) -> dict[str, Any]:
    return {"kind": kind, "view": 2, **fields}


GOOD: list[dict[str, Any]] = [
    {"kind": "Hello", "member": "worker-1", "pid": 3, "host": "h", "python": "3"},
    {"kind": "Beat", "phase": "training", "since_s": 0.2, "ticks": 4},
    {"kind": "BoardPost", "key": "a", "value": "b"},
    {"kind": "Bye"},
    FAILED,
    READY,
    {"kind": "Ready", "seat": {**SEAT, "role": "server"}},
    report("ViewJoined", transport="", applied=APPLIED, placement="", catching_up=False),
    report("ViewJoined", transport="", applied=None, placement="", whole_steps=True),
    report("CaughtUp"),
    report("StepsReport", rows=[ROW, ROW]),
    report("EvaluationReport", samples=3, sums={"loss": [1.0, 3.0]}, seconds=0.1),
    report("Saving", step=20),
    report(
        "Saved", step=20, files={"a": {"bytes": 3, "crc32": "00"}}, bytes=3, stall_s=0, write_s=1
    ),
    report("Saved", step=20, error="no room"),
    report("HandedOver", number=1),
    report("Notice", message="a loader process was killed"),
    report("Rehearsed"),
    report("Rehearsed", model={"parameters": [["a", [2, 3], "float32", 4, 0, 0, None]]}),
    report("Stopped"),
    report("Left", applied=APPLIED),
    report("LinkBroken", peer="worker-0"),
    report("PeerRefused", peer="worker-0", why="a push in slot 9"),
]
BAD: list[tuple[dict[str, Any], str]] = [
    ({}, "its kind is 'None'"),
    ({"kind": "reports"}, "its kind is 'reports'"),
    (report("stepz"), "its kind is 'stepz'"),
    ({"kind": "CaughtUp"}, "view is missing"),
    ({"kind": "LinkBroken", "peer": "x"}, "view is missing"),
    ({"kind": "ViewJoined", "transport": ""}, "view is missing"),
    (report("StepsReport", rows=[[1]]), r"rows\[0\] has 1 fields of 8 to 13"),
    (report("StepsReport", rows=[[*ROW, {}, "", 1]]), r"rows\[0\] has 14 fields"),
    (report("StepsReport", rows=[["1", *ROW[1:]]]), r"rows\[0\].step is '1', not a whole number"),
    (report("StepsReport", rows=[[True, *ROW[1:]]]), r"rows\[0\].step is True"),
    (report("StepsReport", rows=[[10**30, *ROW[1:]]]), "not a whole number"),
    (
        report("StepsReport", rows=[[1, float("nan"), *ROW[2:]]]),
        r"rows\[0\].weight is not a weight: nan",
    ),
    (report("StepsReport", rows=[[*ROW[:4], float("inf"), *ROW[5:]]]), "step_s is not a time"),
    (report("StepsReport", rows={}), "rows is {}, not a list"),
    (
        report("Left", applied={**APPLIED, "parts": [[5, 1, None, 0]]}),
        r"applied.parts\[0\] is wrong: it is a part of 0 steps",
    ),
    ({"kind": "Failed"}, "reason is missing"),
    ({"kind": "Ready"}, "seat is missing"),
    ({**READY, "facts": {**FACTS, "unit": ["samples"]}}, r"unit is \['samples'\], not a list of 2"),
    ({**READY, "facts": {**FACTS, "fields": {}}}, "fields.batch_size is missing"),
    (report("LinkBroken", peer=7), "peer is 7, not a text"),
    ({"kind": "BoardPost", "key": "a", "value": "x" * (1 << 19)}, "over the limit"),
]


@pytest.mark.parametrize("head", GOOD, ids=lambda head: str(head["kind"]))
def test_messages_of_members_are_read(head: dict[str, Any]) -> None:
    message = parse(json.loads(json.dumps(head)))
    assert dataclasses.is_dataclass(message)
    assert parse({**head, "of a newer version": 1}) == message


def test_all_kinds_are_tried() -> None:
    assert {head["kind"] for head in GOOD} == set(FROM_MEMBER.kinds)


def test_messages_are_typed() -> None:
    message = parse(report("StepsReport", rows=[ROW]))
    assert isinstance(message, StepsReport)
    assert message.rows[0].bytes_sent == 120
    message = parse(report("ViewJoined", transport="", applied=APPLIED))
    assert isinstance(message, ViewJoined)
    assert message.applied is not None
    assert message.applied.parts == [
        AppliedPart(3, 0),
        AppliedPart(4, WHOLE, (8.0, 2.0)),
        AppliedPart(5, 1, num_steps=3),
    ]
    message = parse(READY)
    assert isinstance(message, Ready)
    assert message.seat.name == "worker-1"


ORDERS_SENT: list[Order] = [
    TrainOrder([Portion(3, 1, 8, ((0, 4), (6, 8)), 1, 0.5, 2), Portion(4, 1, 8, ())]),
    RestOrder(),
    EvaluateOrder(8, 1, (0.0, 0.5, 1.0)),
    CheckpointOrder(8),
    HandOverOrder(1, {"worker-2": "worker-0"}),
    RehearseOrder(),
    StopOrder(),
    LeaveOrder(),
]


@pytest.mark.parametrize("order", ORDERS_SENT, ids=lambda order: type(order).__name__)
def test_an_order_arrives_as_it_was_sent(order: Order) -> None:
    assert TO_MEMBER.read(json.loads(encode(order))) == order


def test_all_orders_are_tried_and_others_refused() -> None:
    assert {type(order) for order in ORDERS_SENT} == set(get_args(Order))
    for kind in ("dance", 3, "TrainOrder", "CheckpointOrder"):
        with pytest.raises(ProtocolError):
            TO_MEMBER.read({"kind": kind})


def test_a_report_is_written_as_it_is_read() -> None:
    for head in GOOD:
        message = parse(head)
        assert parse(json.loads(encode(message))) == message
    rows = write(parse(report("StepsReport", rows=[ROW])))["rows"]
    assert rows[0][: len(ROW)] == ROW, "many of one kind travel as lists"


@pytest.mark.parametrize(("head", "why"), BAD, ids=lambda value: str(value)[:40])
def test_a_wrong_field_is_named_in_the_error(head: dict[str, Any], why: str) -> None:
    with pytest.raises(ProtocolError, match=why):
        parse(head)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4)
    ),
    max_leaves=12,
)
MUTATIONS = st.tuples(st.integers(0, 10**6), JSON | st.just("~remove"))


def places(value: Any, here: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The way to each item of a message."""
    keys = (
        value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    )
    return [(*here, key) for key in keys] + [
        place for key in keys for place in places(value[key], (*here, key))
    ]


def mutate(head: dict[str, Any], mutations: list[tuple[int, Any]]) -> dict[str, Any]:
    head = copy.deepcopy(head)
    for number, value in mutations:
        found = [place for place in places(head) if place not in (("kind",),)]
        if not found:
            break
        *way, last = found[number % len(found)]
        inner: Any = head
        for key in way:
            inner = inner[key]
        if value == "~remove":
            del inner[last]
        else:
            inner[last] = value
    return head


@given(head=st.sampled_from(GOOD), mutations=st.lists(MUTATIONS, min_size=1, max_size=4))
def test_any_change_of_a_message_is_read_or_refused(
    head: dict[str, Any], mutations: list[tuple[int, Any]]
) -> None:
    changed = mutate(head, mutations)
    try:
        message = parse(changed)
    except ProtocolError:
        return
    assert dataclasses.is_dataclass(message)


@given(st.dictionaries(st.sampled_from(["kind", "view", "rows", "applied"]), JSON))
def test_anything_is_read_or_refused(head: dict[str, Any]) -> None:
    for read_any in (
        parse,
        FROM_AGENT.read,
        TO_AGENT.read,
        lambda head: read(AgentHello, head),
    ):
        try:
            read_any(head)
        except ProtocolError:
            pass


MACHINE = {"host": "h", "identity": "i", "cores": 2, "gpus": 0, "versions": {"torch": "2"}}
ENTRY = {"name": "rank-1", "role": "worker", "rank": 1, "slots": 1, "devices": []}
AGENT = {"machine": MACHINE, "entry": ENTRY, "process": "p"}


def test_the_hello_of_an_agent_is_checked() -> None:
    assert read(AgentHello, AGENT).entry.devices == ()
    for wrong in (
        {"rank": -1},
        {"slots": 10**9},
        {"role": "king"},
        {"devices": [1]},
        {"rank": None},
    ):
        with pytest.raises(ProtocolError):
            read(AgentHello, {**AGENT, "entry": {**ENTRY, **wrong}})


@given(mutations=st.lists(MUTATIONS, min_size=1, max_size=3))
def test_any_change_of_an_agents_hello_is_read_or_refused(
    mutations: list[tuple[int, Any]],
) -> None:
    try:
        agent = read(AgentHello, mutate(AGENT, mutations))
    except ProtocolError:
        return
    assert 0 <= agent.entry.slots <= 4096


@pytest.mark.parametrize(
    "head",
    [
        {"kind": "MemberEnded", "name": "worker-0", "code": 10**9},
        {"kind": "MemberEnded", "name": "worker-0"},
        {"kind": "Started", "name": "worker-0", "pid": -1},
        {"kind": "Ready", "sees_run": "yes"},
        {"kind": "Leaving"},
        {"kind": "what"},
        {"kind": []},
    ],
    ids=str,
)
def test_wrong_messages_of_an_agent_are_refused(head: dict[str, Any]) -> None:
    with pytest.raises(ProtocolError):
        FROM_AGENT.read(head)
