"""Priority channels: urgent frames go first, over several connections, and a lost link ends them all."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from manyhands.errors import LinkClosed
from manyhands.transport import Link, Listener, Received, connect
from manyhands.transport.event_loop import PriorityChannel

LONG_S = 20.0
BIG = 8 << 20
"""Bytes: more than a socket takes before the peer reads."""


@contextlib.contextmanager
def linked(folder: Path, count: int) -> Iterator[tuple[list[Link], list[Link]]]:
    """Links: the ends of this side, and of the other."""
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(Listener(f"unix:{folder}/links"))
        near, far = [], []
        for _ in range(count):
            near.append(stack.enter_context(connect(listener.address, timeout_s=LONG_S)))
            far.append(stack.enter_context(listener.accept(LONG_S)))
        yield near, far


def wait_until_released(links: list[Link]) -> None:
    """Until no event loop uses the sockets of closed links."""
    deadline = time.monotonic() + LONG_S
    while any(link._sock.fileno() >= 0 for link in links):
        assert time.monotonic() < deadline
        time.sleep(0.005)


def recv(link: Link) -> Received:
    return link.recv(timeout_s=LONG_S)


def test_urgent_frames_overtake_others_and_equals_keep_their_order(tmp_path: Path) -> None:
    with linked(tmp_path, 1) as (near, (far,)):
        channel = PriorityChannel(near)
        channel.put(9, {"i": "big"}, memoryview(bytes(BIG)))
        deadline = time.monotonic() + LONG_S
        while channel._queue:  # it is being sent, and blocks the link until the peer reads
            assert time.monotonic() < deadline
            time.sleep(0.001)
        for priority, i in [(5, "a"), (1, "b"), (5, "c"), (0, "d"), (1, "e")]:
            channel.put(priority, {"i": i}, memoryview(b"x"))
        assert [recv(far).message["i"] for _ in range(6)] == ["big", "d", "b", "e", "a", "c"]
        channel.close()
        wait_until_released(near)


def test_a_large_transfer_on_one_link_does_not_delay_the_other(tmp_path: Path) -> None:
    with linked(tmp_path, 2) as (near, far):
        channel = PriorityChannel(near)
        channel.put(0, {"i": 0}, memoryview(bytes(BIG)))
        channel.put(1, {"i": 1}, memoryview(b"x"))
        deadline = time.monotonic() + LONG_S
        while channel.bytes_sent == 0:  # counted when a whole frame has left; nobody reads yet
            assert time.monotonic() < deadline
            time.sleep(0.001)
        small = next(link for link, sent in zip(far, near, strict=True) if sent.bytes_sent)
        assert recv(small).message["i"] == 1
        channel.close()
        wait_until_released(near)


def test_payloads_are_not_copied_before_they_are_sent(tmp_path: Path) -> None:
    """A change before that reaches the peer."""
    with linked(tmp_path, 1) as (near, (far,)):
        channel = PriorityChannel(near)
        memory = bytearray(4)
        channel.put(0, {}, memoryview(bytes(BIG)))
        channel.put(1, {}, memoryview(memory))
        memory[:] = b"late"
        recv(far)
        payload = recv(far).payload
        assert payload is not None
        assert bytes(payload) == b"late"
        assert channel.bytes_sent > BIG
        channel.close()
        wait_until_released(near)


def test_a_broken_link_closes_all_links_of_the_channel(
    tmp_path: Path,
) -> None:
    with linked(tmp_path, 2) as (near, far):
        channel = PriorityChannel(near)
        far[0].close()
        deadline = time.monotonic() + LONG_S
        while not all(link.closed for link in near):  # also the one that had nothing to send
            channel.put(0, {}, memoryview(b"x"))
            assert time.monotonic() < deadline
            time.sleep(0.005)
        wait_until_released(near)
        for link in near:
            with pytest.raises(LinkClosed):
                link.recv(timeout_s=LONG_S)
        channel.put(0, {}, memoryview(b"dropped"))
        channel.close()


def test_close_ends_a_transfer_in_the_middle(tmp_path: Path) -> None:
    with linked(tmp_path, 2) as (near, _):
        channel = PriorityChannel(near)
        for i in range(4):
            channel.put(i, {}, memoryview(bytes(BIG)))
        channel.close()
        channel.close()
        wait_until_released(near)
