"""Frames without sockets: any message comes back, any garbage is a BadFrame within the limits."""

from __future__ import annotations

import array
import json
import struct
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from manyhands.errors import BadFrame, LinkError
from manyhands.transport.link import (
    HAS_PAYLOAD,
    HEADER,
    MAGIC,
    VERSION,
    FrameReader,
    Limits,
    Payload,
    Place,
    Received,
    pack,
    parse_head,
    parse_header,
)

SMALL = Limits(head_bytes=512, payload_bytes=2048)

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
heads = st.dictionaries(st.text(), json_values, max_size=4)
payloads = st.none() | st.binary(max_size=2048)


class Truncated(Exception):
    pass


def read(data: bytes, limits: Limits, place: Place | None = None) -> Received:
    """Read one frame from `data`; no buffer may be over the limits."""
    position = 0

    def recv_into(view: memoryview) -> int:
        nonlocal position
        assert len(view) <= max(HEADER.size, limits.head_bytes, limits.payload_bytes)
        chunk = data[position : position + len(view)]
        if not chunk:
            raise Truncated
        view[: len(chunk)] = chunk
        position += len(chunk)
        return len(chunk)

    return FrameReader(limits).read(recv_into, place=place)


def joined(head: dict[str, Any], payload: Payload | None = None) -> bytes:
    return b"".join(pack(head, payload))


def header(head_bytes: int, payload_bytes: int | None = None) -> bytes:
    flags = 0 if payload_bytes is None else HAS_PAYLOAD
    return HEADER.pack(MAGIC, VERSION, flags, 0, head_bytes, payload_bytes or 0)


@given(heads, payloads)
def test_any_message_survives_a_round_trip(head: dict[str, Any], payload: bytes | None) -> None:
    message = read(joined(head, payload), Limits())
    assert message.message == head
    assert message.payload == payload  # None and b"" stay apart: b"" != None


@given(st.binary(max_size=4096))
def test_garbage_is_a_bad_frame(data: bytes) -> None:
    with pytest.raises((BadFrame, Truncated)):
        read(data, SMALL)


@given(st.binary(max_size=512))
def test_garbage_after_a_good_header_is_a_bad_frame_or_an_object(data: bytes) -> None:
    try:
        message = read(header(len(data)) + data, SMALL)
    except BadFrame:
        return
    assert message.message == json.loads(data)


@given(heads, st.binary(max_size=64), st.data())
def test_a_mutated_frame_is_a_message_or_a_bad_frame(
    head: dict[str, Any], payload: bytes, data: st.DataObject
) -> None:
    frame = bytearray(joined(head, payload))
    for _ in range(data.draw(st.integers(1, 4))):
        frame[data.draw(st.integers(0, len(frame) - 1))] = data.draw(st.integers(0, 255))
    try:
        message = read(bytes(frame), SMALL)
    except (BadFrame, Truncated):
        return
    assert isinstance(message.message, dict)


@pytest.mark.parametrize(
    ("data", "word"),
    [
        (b"HTTP" + bytes(16), "HTTP"),
        (struct.pack("!4sBBHIQ", b"MHND", 9, 0, 0, 2, 0), "version is 9"),
        (struct.pack("!4sBBHIQ", b"MHND", VERSION, 2, 0, 2, 0), "flags"),
        (struct.pack("!4sBBHIQ", b"MHND", VERSION, 0, 7, 2, 0), "flags"),
        (struct.pack("!4sBBHIQ", b"MHND", VERSION, 0, 0, 513, 0), "head of 513 bytes"),
        (struct.pack("!4sBBHIQ", b"MHND", VERSION, 1, 0, 2, 2049), "payload of 2049 bytes"),
        (struct.pack("!4sBBHIQ", b"MHND", VERSION, 0, 0, 2, 5), "flags deny"),
    ],
)
def test_a_bad_header_says_what_is_wrong(data: bytes, word: str) -> None:
    with pytest.raises(BadFrame, match=word):
        parse_header(data, SMALL)


def test_the_limits_themselves_are_allowed() -> None:
    lengths = (SMALL.head_bytes, SMALL.payload_bytes)
    assert parse_header(header(*lengths), SMALL) == lengths


@pytest.mark.parametrize(
    "text", [b"", b"[]", b"3", b"{", b"\xff\xfe{}", b"{}{}", b"[" * 100_000, b'{"a":' * 100_000]
)
def test_a_bad_head_is_a_bad_frame(text: bytes) -> None:
    with pytest.raises(BadFrame):
        parse_head(memoryview(text))


def test_a_number_of_a_million_digits_is_a_bad_frame() -> None:
    with pytest.raises(BadFrame, match="not JSON"):
        parse_head(memoryview(b'{"a":' + b"9" * 1_000_000 + b"}"))


def test_a_payload_is_not_copied_and_may_have_any_item_type() -> None:
    numbers = array.array("d", [1.0, 2.0])
    parts = pack({}, memoryview(numbers))
    numbers[1] = 5.0  # seen by the part: it is the same memory
    assert array.array("d", parts[1].tobytes()).tolist() == [1.0, 5.0]
    empty = memoryview(bytearray(8)).cast("B", (2, 4))[:0]
    assert read(b"".join(pack({}, empty)), SMALL).payload == b""


@pytest.mark.parametrize(("head", "payload"), [({"a": "x" * 600}, None), ({}, bytes(2049))])
def test_frames_over_the_limits_are_not_packed(head: dict[str, Any], payload: bytes | None) -> None:
    with pytest.raises(LinkError, match="nothing was sent") as caught:
        pack(head, payload, limits=SMALL)
    assert not isinstance(caught.value, BadFrame)


def test_place_gets_head_and_size_and_its_block_is_filled() -> None:
    asked: list[tuple[dict[str, Any], int]] = []
    block = memoryview(bytearray(10))

    def place(head: dict[str, Any], nbytes: int) -> memoryview:
        asked.append((head, nbytes))
        return block[2 : 2 + nbytes]

    message = read(joined({"block": 3}, b"abcd"), SMALL, place)
    assert asked == [({"block": 3}, 4)]
    assert bytes(block) == b"\0\0abcd\0\0\0\0"
    assert message.payload is not None
    assert message.payload.obj is block.obj


@pytest.mark.parametrize("block", [memoryview(bytearray(5)), memoryview(b"abcd")])
def test_a_block_of_the_wrong_size_or_read_only_is_an_error(block: memoryview) -> None:
    with pytest.raises(LinkError, match=r"place\(\) gave"):
        read(joined({}, b"abcd"), SMALL, lambda head, nbytes: block)


@pytest.mark.parametrize("what", ["head", "payload"])
def test_memory_grows_with_received_bytes_not_with_announced_ones(what: str) -> None:
    limits = Limits(head_bytes=1 << 30, payload_bytes=1 << 40)
    start = header(1 << 30) if what == "head" else header(2, 1 << 40) + b"{}"
    arrived = -len(start)

    def recv_into(view: memoryview) -> int:
        nonlocal arrived
        if arrived < 0:
            view[:] = start[arrived : arrived + len(view) or None]
        else:
            assert view.nbytes <= max(1 << 20, arrived)
        arrived += view.nbytes
        if arrived > 20 << 20:
            raise Truncated
        return view.nbytes

    with pytest.raises(Truncated):
        FrameReader(limits).read(recv_into)


def test_a_payload_that_grew_is_as_it_was_sent() -> None:
    payload = bytes(range(256)) * 20_000
    assert read(joined({}, payload), Limits()).payload == payload
