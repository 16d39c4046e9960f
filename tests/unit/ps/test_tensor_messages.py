"""Any state of an optimizer arrives as it was, and malformed messages are refused."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from manyhands.errors import ProtocolError
from manyhands.ps.block_store import BlockState
from manyhands.ps.protocol import TensorMessage
from manyhands.ps.tensor_messages import PARAMS, TensorMessages, pack
from manyhands.runs.encoding import DTYPES
from manyhands.transport.fields import read, write

Message = tuple[TensorMessage, memoryview | None]


def travelled(messages: list[Message]) -> list[Message]:
    """Through JSON and other memory, as over a link."""
    return [
        (
            read(TensorMessage, json.loads(json.dumps(write(message)))),
            None if payload is None else memoryview(bytearray(payload)),
        )
        for message, payload in messages
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


@pytest.mark.parametrize("name", DTYPES)
def test_every_type_arrives_bit_by_bit(name: str) -> None:
    numbers = torch.tensor([0.0, 1.0, -2.5, 3.0, 7.0, 100.0])
    if not DTYPES[name].is_signed:
        numbers = numbers.abs()
    tensor = numbers.to(DTYPES[name]).reshape(2, 3)
    if tensor.is_complex():
        tensor = tensor * (1 + 2j)
    _, got = unpacked(list(pack(3, BlockState(tensor, {"own": tensor, "one": tensor[0, 0]}))))
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
def test_tensors_of_any_shape_scalars_and_none_arrive(
    number: int, role: str, params: Tensor, state: dict[str, Any]
) -> None:
    messages = list(pack(number, BlockState(params, state), role=role))
    sent = [value for value in (params, *state.values()) if isinstance(value, Tensor)]
    assert len(messages) == 1 + sum(bool(tensor.numel()) for tensor in sent)
    key, got = unpacked(messages)
    assert key == (role, number)
    assert_equal(got.params, params)
    assert got.state.keys() == state.keys()
    for name, value in state.items():
        assert_equal(got.state[name], value)


def test_non_contiguous_tensors_arrive_unchanged() -> None:
    tensor = torch.arange(12.0).reshape(3, 4).t()
    assert not tensor.is_contiguous()
    _, got = unpacked(list(pack(0, BlockState(tensor, {"x": tensor[1:, ::2]}))))
    assert_equal(got.params, tensor)
    assert_equal(got.state["x"], tensor[1:, ::2])


def test_parameters_can_be_left_out() -> None:
    messages = list(pack(1, BlockState(torch.ones(5), {"step": 3}), params=False))
    assert all(payload is None for _, payload in messages)
    _, got = unpacked(messages)
    assert (got.params.numel(), got.state) == (0, {"step": 3})


def test_contiguous_tensors_are_not_copied() -> None:
    tensor = torch.zeros(4)
    _, (_, payload) = pack(0, BlockState(tensor, {}))
    assert payload is not None
    payload[:4] = b"\x00\x00\x80\x3f"
    assert tensor[0] == 1.0


def test_messages_of_blocks_may_interleave() -> None:
    sent = {
        (role, n): BlockState(torch.full((3,), float(n)), {"step": n, "role": role})
        for role in ("own", "replica")
        for n in (1, 2)
    }
    rows = [list(pack(n, m, role=role)) for (role, n), m in sent.items()]
    tensor_messages = TensorMessages()
    done = [
        tensor_messages.add(*message)
        for turn in zip(*rows, strict=True)
        for message in travelled(list(turn))
    ]
    assert [key for key in done if key is not None] == list(sent)
    for key, block_state in sent.items():
        assert tensor_messages.complete[key].state == block_state.state


HEAD = TensorMessage(0, "own")
GOOD = {"~tensor": 0, "dtype": "float32", "shape": [2]}


def first(params: Any) -> TensorMessage:
    return TensorMessage(0, "own", json.dumps({PARAMS: params}))


def add_all(head: TensorMessage, payload: bytes) -> None:
    messages = TensorMessages()
    messages.add(head, None)
    messages.add(HEAD, memoryview(bytearray(payload)))


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
        ({"shape": [1 << 50]}, b""),
        ({"~tensor": 1}, b"12345678"),
        ({"~tensor": -1}, b"12345678"),
    ],
    ids=str,
)
def test_a_wrong_tensor_is_refused_before_memory_is_allocated(
    wrong: dict[str, Any], payload: bytes
) -> None:
    with pytest.raises(
        ProtocolError, match=r"(a tensor of (type|shape)|tensors with the indices) "
    ):
        add_all(first({**GOOD, **wrong}), payload)


@pytest.mark.parametrize(
    "state",
    ["", "{", "[]", "{}", "[" * 100_000, '{"=": {"~pairs": 3}}', '{"=": {"~pairs": []}}'],
    ids=lambda state: state[:12],
)
def test_a_wrong_state_is_refused(state: str) -> None:
    with pytest.raises(ProtocolError, match="block"):
        TensorMessages().add(TensorMessage(0, "own", state), None)


def test_messages_out_of_order_are_refused() -> None:
    payload = memoryview(bytearray(8))
    for head, carried in [(HEAD, payload), (HEAD, None), (first(GOOD), payload)]:
        with pytest.raises(ProtocolError, match="out of order"):
            TensorMessages().add(head, carried)


def test_the_same_state_without_the_mistake_is_accepted() -> None:
    messages = TensorMessages()
    assert messages.add(first(GOOD), None) is None
    assert messages.add(HEAD, memoryview(bytearray(8))) == ("own", 0)
    assert torch.equal(messages.complete["own", 0].params, torch.zeros(2))
    assert messages.add(first({**GOOD, "shape": [0, 3]}), None) == ("own", 0)


def test_a_block_may_be_sent_again() -> None:
    """The connection broke in the middle of it, and it is sent by the next one."""
    messages = TensorMessages()
    state = BlockState(torch.ones(2), {"momentum": torch.full((2,), 3.0)})
    whole = travelled(list(pack(0, state)))
    for head, payload in [*whole[:2], *whole]:
        done = messages.add(head, payload)
    assert done == ("own", 0)
    assert_equal(messages.complete["own", 0].state["momentum"], state.state["momentum"])
