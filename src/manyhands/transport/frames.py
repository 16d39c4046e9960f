"""Frames: what one message looks like as bytes. Pure: no socket, no clock.

    magic    4  b"MHND"
    version  1  1
    flags    1  bit 0: a payload follows (so that an empty payload differs from none)
    zero     2  reserved
    head     4  length of the head in bytes
    payload  8  length of the payload in bytes
    ---- 20 bytes, big-endian, then
    the head      JSON in UTF-8: always an object
    the payload   raw bytes, as they lie in memory

`incoming` reads one frame without doing any input itself: it yields the buffers to be filled, one
after the other, and returns the Message. Whoever drives it may stop between any two bytes and go
on later, which is how a receive that timed out in the middle of a frame is resumed.

Nothing that arrives is unpickled, and a length is compared with its limit before a byte is
allocated for it. Memory then grows with what has come: whoever announces a gigabyte and sends nothing
costs a megabyte. The cost of a frame is 20 bytes and one JSON object; a payload that has a place, or is
no larger than GROW_BYTES, is never copied.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from typing import Any

from manyhands.errors import BadFrame, LinkError

MAGIC = b"MHND"
VERSION = 1
_HEADER = struct.Struct("!4sBBHIQ")
HEADER_BYTES = _HEADER.size
_HAS_PAYLOAD = 1
WELCOME = {"link": "welcome"}
"""The head of a link's first frame, from the listener's side."""

Payload = bytes | bytearray | memoryview
Place = Callable[[dict[str, Any], int], memoryview | None]
"""place(head, nbytes): the writable block of exactly nbytes for the payload; None: a new one."""


@dataclass(frozen=True)
class Limits:
    """The largest frame that is sent or taken."""

    head_bytes: int = 1 << 20
    payload_bytes: int = 1 << 30


DEFAULT_LIMITS = Limits()
GROW_BYTES = 1 << 20
"""So much is allocated at once for what was only announced."""


@dataclass(frozen=True, slots=True)
class Header:
    head_bytes: int
    payload_bytes: int | None
    """None: no payload follows."""


@dataclass(frozen=True, slots=True)
class Message:
    head: dict[str, Any]
    payload: memoryview | None = None


@dataclass(frozen=True, slots=True)
class Wanted:
    """The next bytes of a frame: the buffer they go to; and for messages, what they are, how many bytes of
    it came before these, and how many it has."""

    view: memoryview
    what: str
    before: int
    whole: int


def pack_header(header: Header) -> bytes:
    has_payload = header.payload_bytes is not None
    flags = _HAS_PAYLOAD if has_payload else 0
    return _HEADER.pack(MAGIC, VERSION, flags, 0, header.head_bytes, header.payload_bytes or 0)


def parse_header(data: bytes | bytearray | memoryview, limits: Limits) -> Header:
    """The header in `data`, every field checked; BadFrame says which one is wrong."""
    if len(data) != HEADER_BYTES:
        raise BadFrame(f"a header has {HEADER_BYTES} bytes, and this one {len(data)}")
    magic, version, flags, zero, head_bytes, payload_bytes = _HEADER.unpack(data)
    if magic != MAGIC:
        raise BadFrame(f"it starts with {magic!r}, not with {MAGIC!r}")
    if version != VERSION:
        raise BadFrame(
            f"its version is {version}, and this side speaks {VERSION}: "
            "every member needs the same version of manyhands"
        )
    if flags & ~_HAS_PAYLOAD or zero:
        raise BadFrame(f"unknown flags {flags:#04x} {zero:#06x}")
    if head_bytes > limits.head_bytes:
        raise BadFrame(f"a head of {head_bytes} bytes, over the limit of {limits.head_bytes}")
    if payload_bytes > limits.payload_bytes:
        raise BadFrame(
            f"a payload of {payload_bytes} bytes, over the limit of {limits.payload_bytes}"
        )
    if not flags & _HAS_PAYLOAD:
        if payload_bytes:
            raise BadFrame(f"a payload of {payload_bytes} bytes that its flags deny")
        return Header(head_bytes, None)
    return Header(head_bytes, payload_bytes)


def parse_head(data: bytes | bytearray | memoryview) -> dict[str, Any]:
    """The JSON object in `data`."""
    try:
        head = json.loads(str(data, "utf-8"))
    except (ValueError, RecursionError) as error:  # JSON and UTF-8 errors are ValueErrors
        raise BadFrame(f"its head is not JSON: {error}") from error
    if not isinstance(head, dict):
        raise BadFrame(f"its head is a JSON {type(head).__name__}, not an object")
    return head


def as_bytes(payload: Payload) -> memoryview:
    """A flat view of the payload's memory, whatever its item type and shape; no copy."""
    view = memoryview(payload)
    # A view with a zero in its shape can't be cast; it has nothing to send either.
    return view.cast("B") if view.nbytes else memoryview(b"")


def pack(
    head: Mapping[str, Any], payload: Payload | None = None, *, limits: Limits = DEFAULT_LIMITS
) -> list[memoryview]:
    """The frame as the buffers to send one after the other; the payload's is the caller's own."""
    text = json.dumps(dict(head), separators=(",", ":")).encode()
    body = None if payload is None else as_bytes(payload)
    if len(text) > limits.head_bytes:
        raise LinkError(
            f"A head of {len(text)} bytes is over the limit of {limits.head_bytes}; nothing was "
            "sent. Bulk data belongs in the payload."
        )
    if body is not None and len(body) > limits.payload_bytes:
        raise LinkError(
            f"A payload of {len(body)} bytes is over the limit of {limits.payload_bytes}; nothing "
            "was sent. Send it in several frames."
        )
    header = pack_header(Header(len(text), None if body is None else len(body)))
    # The two small parts become one; the payload stays where it is.
    parts = [memoryview(header + text)]
    if body:
        parts.append(body)
    return parts


def incoming(limits: Limits, place: Place | None = None) -> Generator[Wanted, None, Message]:
    """Read one frame: yields each buffer to be filled, is resumed when it is full."""
    header = parse_header((yield from _new(HEADER_BYTES, "a frame")), limits)
    head = parse_head((yield from _new(header.head_bytes, "a frame's head")))
    if header.payload_bytes is None:
        return Message(head)
    target = place(head, header.payload_bytes) if place is not None else None
    if target is None:
        return Message(head, (yield from _new(header.payload_bytes, "a payload")))
    if target.nbytes != header.payload_bytes or target.readonly:
        raise LinkError(
            f"place() gave a {'read-only ' if target.readonly else ''}block of {target.nbytes} "
            f"bytes for a payload of {header.payload_bytes}: it must be writable and of that size."
        )
    view = target.cast("B") if target.nbytes else target
    yield Wanted(view, "a payload", 0, target.nbytes)
    return Message(head, target)


def _new(num_bytes: int, what: str) -> Generator[Wanted, None, memoryview]:
    """New memory of that size, filled; it doubles as it fills."""
    view = memoryview(bytearray(min(num_bytes, GROW_BYTES)))
    filled = 0
    while True:
        yield Wanted(view[filled:], what, filled, num_bytes)
        filled = len(view)
        if filled == num_bytes:
            return view
        larger = memoryview(bytearray(min(num_bytes, 2 * filled)))
        larger[:filled] = view
        view = larger


class FrameReader:
    """Reads one frame after the other; a frame that is half received is continued by the next call."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        """Take no frame larger than this, from the next one on."""
        self.bytes_received = 0
        self._frame: Generator[Wanted, None, Message] | None = None
        self._wanted = Wanted(memoryview(b""), "", 0, 0)
        self._filled = 0
        self._place: Place | None = None

    def read(self, recv_into: Callable[[memoryview], int], place: Place | None) -> Message:
        """The next message. `recv_into` fills some of a buffer; what it raises passes through. EOFError if it
        returns 0."""
        self._place = place
        if self._frame is None:
            self._frame = incoming(self.limits, self._ask_place)
            self._wanted, self._filled = next(self._frame), 0
        while True:
            view = self._wanted.view
            while self._filled < len(view):
                got = recv_into(view[self._filled :])
                if not got:
                    raise EOFError
                self._filled += got
                self.bytes_received += got
            try:
                self._wanted, self._filled = next(self._frame), 0
            except StopIteration as end:
                self._frame = None
                message: Message = end.value
                return message

    def _ask_place(self, head: dict[str, Any], nbytes: int) -> memoryview | None:
        return None if self._place is None else self._place(head, nbytes)

    @property
    def missing(self) -> str:
        """What is being received, for messages."""
        return self._wanted.what

    @property
    def num_missing(self) -> int:
        """Bytes that complete the buffer which is being filled."""
        return len(self._wanted.view) - self._filled

    @property
    def progress(self) -> str:
        return f"{self._wanted.before + self._filled} of {self._wanted.whole} bytes"

    @property
    def between_frames(self) -> bool:
        return self._wanted.what == "a frame" and not self._wanted.before + self._filled
