"""Parcels: whatever an optimizer remembers arrives as it was, and nonsense is refused."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from manyhands.errors import LinkError
from manyhands.ps.block_store import BlockState
from manyhands.ps.tensor_messages import PARAMS, TYPES, TensorMessages, pack

Message = tuple[dict[str, Any], memoryview | None]


def travelled(messages: list[Message]) -> list[Message]:
    """Through JSON and other memory, as over a link."""
    return [
        (json.loads(json.dumps(head)), None if payload is None else memoryview(bytearray(payload)))
        for head, payload in messages
    ]


def unpacked(messages: list[Message]) -> tuple[tuple[str, int], BlockState]:
    tensor_messages = TensorMessages()
    *first, last = travelled(messages)
    for head, payload in first:
        assert tensor_messages.add(head, payload) is None
    key = tensor_messages.add(*last)
    assert key is not None
    assert not tensor_messages._partial
    return key, tensor_messages.complete[key]


def assert_equal(mine: Any, theirs: Any) -> None:
    if isinstance(theirs, Tensor):
        assert (mine.dtype, mine.shape) == (theirs.dtype, theirs.shape)
        assert torch.equal(mine, theirs)
    else:
        assert type(mine) is type(theirs)
        assert mine == theirs


@pytest.mark.parametrize("name", TYPES)
def test_every_type_arrives_bit_by_bit(name: str) -> None:
    numbers = torch.tensor([0.0, 1.0, -2.5, 3.0, 7.0, 100.0])
    if not TYPES[name].is_signed:
        numbers = numbers.abs()
    tensor = numbers.to(TYPES[name]).reshape(2, 3)
    if tensor.is_complex():
        tensor = tensor * (1 + 2j)
    _, got = unpacked(
        list(pack("block", 3, BlockState(tensor, {"own": tensor, "one": tensor[0, 0]})))
    )
    assert_equal(got.params, tensor)
    assert_equal(got.state["own"], tensor)
    assert_equal(got.state["one"], tensor[0, 0])


shapes = st.lists(st.integers(0, 4), max_size=4)
tensors = st.builds(lambda shape: torch.arange(math.prod(shape)).reshape(shape).float(), shapes)
values = st.one_of(
    tensors, st.none(), st.booleans(), st.integers(-9, 9), st.floats(allow_nan=False), st.text()
)
states = st.dictionaries(
    st.text(max_size=5).filter(lambda name: name != PARAMS), values, max_size=5
)


@given(st.integers(0, 99), st.sampled_from(["own", "replica"]), tensors, states)
def test_tensors_of_any_shape_scalars_and_nothing_arrive(
    number: int, role: str, params: Tensor, state: dict[str, Any]
) -> None:
    messages = list(pack("block", number, BlockState(params, state), role=role))
    assert [head["last"] for head, _ in messages] == [False] * len(state) + [True]
    key, got = unpacked(messages)
    assert key == (role, number)
    assert_equal(got.params, params)
    assert got.state.keys() == state.keys()
    for name, value in state.items():
        assert_equal(got.state[name], value)


def test_memory_that_does_not_lie_in_one_piece_is_sent_as_it_reads() -> None:
    tensor = torch.arange(12.0).reshape(3, 4).t()
    assert not tensor.is_contiguous()
    _, got = unpacked(list(pack("block", 0, BlockState(tensor, {"x": tensor[1:, ::2]}))))
    assert_equal(got.params, tensor)
    assert_equal(got.state["x"], tensor[1:, ::2])


def test_parameters_may_stay_at_home() -> None:
    messages = list(pack("state", 1, BlockState(torch.ones(5), {"step": 3}), params=False))
    assert all(payload is None for _, payload in messages)
    _, got = unpacked(messages)
    assert (got.params.numel(), got.state) == (0, {"step": 3})


def test_what_can_be_sent_as_it_lies_is_not_copied() -> None:
    tensor = torch.zeros(4)
    ((_, payload),) = pack("block", 0, BlockState(tensor, {}))
    assert payload is not None
    payload[:4] = b"\x00\x00\x80\x3f"
    assert tensor[0] == 1.0


def test_blocks_may_arrive_side_by_side() -> None:
    sent = {
        (role, n): BlockState(torch.full((3,), float(n)), {"step": n, "role": role})
        for role in ("own", "replica")
        for n in (1, 2)
    }
    rows = [list(pack("block", n, m, role=role)) for (role, n), m in sent.items()]
    tensor_messages = TensorMessages()
    done = [
        tensor_messages.add(*message)
        for turn in zip(*rows, strict=True)
        for message in travelled(list(turn))
    ]
    assert [key for key in done if key is not None] == list(sent)
    for key, block_state in sent.items():
        assert tensor_messages.complete[key].state == block_state.state


GOOD: dict[str, Any] = {
    "k": "block", "n": 0, "role": "own", "name": PARAMS, "last": True,
    "dtype": "float32", "shape": [2],
}  # fmt: skip


@pytest.mark.parametrize(
    ("wrong", "payload"),
    [
        ({"dtype": "object"}, b"12345678"),
        ({"dtype": "__class__"}, b"12345678"),
        ({"dtype": ["float32"]}, b"12345678"),
        ({"dtype": None}, b"12345678"),
        ({"shape": [3]}, b"12345678"),
        ({"shape": [-1]}, b"12345678"),
        ({"shape": [-2]}, b"12345678"),
        ({"shape": [2.0]}, b"12345678"),
        ({"shape": "2"}, b"12345678"),
        ({"shape": None}, b"12345678"),
        ({"shape": 2}, b"12345678"),
        ({}, b"1234567"),
        ({}, b""),
        ({}, None),
        ({"shape": [1 << 50]}, None),
        ({"shape": [0]}, b"12345678"),
    ],
    ids=str,
)
def test_nonsense_is_refused_before_memory_is_asked_for(
    wrong: dict[str, Any], payload: bytes | None
) -> None:
    view = None if payload is None else memoryview(bytearray(payload))
    with pytest.raises(LinkError, match=r"a tensor of (type|shape) "):
        TensorMessages().add({**GOOD, **wrong}, view)


def test_the_same_without_the_mistake_is_taken() -> None:
    tensor_messages = TensorMessages()
    assert tensor_messages.add(GOOD, memoryview(bytearray(8))) == ("own", 0)
    assert torch.equal(tensor_messages.complete["own", 0].params, torch.zeros(2))
    assert tensor_messages.add({**GOOD, "shape": [0, 3]}, memoryview(b"")) == ("own", 0)
