"""Event loops deliver and send whole frames, however they arrive, and never hold up other links."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from manyhands.errors import LinkClosed, LinkTimeout, ProtocolError
from manyhands.transport import Authority, Link, Listener, Received, connect
from manyhands.transport.event_loop import Frame, LinkReader, LinkWriter

LONG_S = 20.0
BIG = 6 << 20
"""Bytes: more than sockets take before somebody reads."""
KINDS = ["unix", "secret", "tls"]


@contextlib.contextmanager
def linked(kind: str, folder: Path) -> Iterator[tuple[Link, Link]]:
    """Both ends of a new link."""
    ours: dict[str, Any] = {}
    theirs: dict[str, Any] = {}
    if kind == "tls":
        authority = Authority.create("run")
        ours, theirs = ({"credentials": authority.issue(name)} for name in ("a", "b"))
    elif kind == "secret":
        ours, theirs = {"secret": "of a run"}, {"secret": "of a run", "name": "b"}
    address = f"unix:{folder}/s" if kind == "unix" else "tcp://127.0.0.1:0"
    with (
        Listener(address, **ours) as listener,
        connect(listener.address, timeout_s=LONG_S, **theirs) as near,
        listener.accept(LONG_S) as far,
    ):
        yield near, far


class Inbox:
    """Reads a link by an event loop, and keeps what was delivered."""

    def __init__(self, link: Link, **options: Any) -> None:
        self.messages: queue.SimpleQueue[Received] = queue.SimpleQueue()
        self.errors: queue.SimpleQueue[Exception] = queue.SimpleQueue()
        self.reader = LinkReader(
            link,
            on_message=options.pop("on_message", self.messages.put),
            on_end=self.errors.put,
            place=options.pop("place", None),
        )
        self.reader.start(**options)

    def next(self) -> Received:
        return self.messages.get(timeout=LONG_S)


@pytest.mark.parametrize("kind", KINDS)
def test_small_and_large_messages_arrive_in_order(kind: str, tmp_path: Path) -> None:
    memory = memoryview(bytearray(BIG))
    with linked(kind, tmp_path) as (near, far):
        received = Inbox(far, place=lambda head, nbytes: memory if nbytes == BIG else None)
        payload = bytes(range(256)) * (BIG // 256)
        for i in range(50):
            near.send({"i": i}, payload if i % 10 == 9 else bytes(i) if i % 2 else None)
        for i in range(50):
            message = received.next()
            assert message.message == {"i": i}
            placed = message.payload is not None and message.payload.obj is memory.obj
            assert placed == (i % 10 == 9)
        assert memory == payload
        near.close()
        assert isinstance(received.errors.get(timeout=LONG_S), LinkClosed)
        assert received.reader.ended.wait(LONG_S)
        assert far._sock.fileno() < 0


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_delivered_while_a_reader_pauses(kind: str, tmp_path: Path) -> None:
    with linked(kind, tmp_path) as (near, far):
        heard: queue.SimpleQueue[int] = queue.SimpleQueue()

        def on_message(message: Received) -> None:
            heard.put(message.message["i"])
            received.reader.pause()

        received = Inbox(far, on_message=on_message)
        for i in range(3):
            near.send({"i": i})
        for i in range(3):
            assert heard.get(timeout=LONG_S) == i
            time.sleep(0.05)
            assert heard.empty()
            received.reader.resume()


def test_a_reader_that_pauses_notices_that_its_link_is_closed(tmp_path: Path) -> None:
    with linked("unix", tmp_path) as (near, far):
        received = Inbox(far, on_message=lambda message: received.reader.pause())
        near.send({})
        time.sleep(0.05)
        far.close()
        assert isinstance(received.errors.get(timeout=LONG_S), LinkClosed)


def test_a_link_without_a_first_message_is_closed(tmp_path: Path) -> None:
    with linked("unix", tmp_path) as (near, far):
        received = Inbox(far, first_within_s=0.05)
        assert isinstance(received.errors.get(timeout=LONG_S), LinkTimeout)
        with pytest.raises(LinkClosed):
            near.recv(timeout_s=LONG_S)


def test_a_link_whose_handler_fails_is_closed_and_others_are_not(tmp_path: Path) -> None:
    def fail(message: Received) -> None:
        raise ProtocolError("no")

    (tmp_path / "other").mkdir()
    with linked("unix", tmp_path) as (near, far), linked("unix", tmp_path / "other") as others:
        failing, good = Inbox(far, on_message=fail), Inbox(others[1])
        near.send({})
        assert isinstance(failing.errors.get(timeout=LONG_S), ProtocolError)
        with pytest.raises(LinkClosed):
            near.recv(timeout_s=LONG_S)
        others[0].send({"i": 1})
        assert good.next().message == {"i": 1}


@pytest.mark.parametrize("kind", KINDS)
def test_frames_of_a_writer_and_of_threads_are_not_mixed(kind: str, tmp_path: Path) -> None:
    frames: list[Frame] = [({"from": "writer", "i": i}, bytes(BIG)) for i in range(4)]
    with linked(kind, tmp_path) as (near, far):
        ended: queue.SimpleQueue[Exception] = queue.SimpleQueue()
        writer = LinkWriter(
            near,
            take=lambda: frames.pop(0) if frames else None,
            on_end=ended.put,
        )
        writer.notify()

        def send() -> None:
            for i in range(20):
                near.send({"from": "thread", "i": i}, bytes(1 << 16))

        thread = threading.Thread(target=send)
        thread.start()
        heard = [far.recv(timeout_s=LONG_S) for _ in range(24)]
        thread.join(LONG_S)
        for sender, count in (("writer", 4), ("thread", 20)):
            numbers = [m.message["i"] for m in heard if m.message["from"] == sender]
            assert numbers == list(range(count))
        near.close()
        assert isinstance(ended.get(timeout=LONG_S), LinkClosed)


def test_a_slow_receiver_does_not_hold_up_other_links(tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack:
        writers = []
        for number in range(4):
            (tmp_path / str(number)).mkdir()
            near, far = stack.enter_context(linked("unix", tmp_path / str(number)))
            frames: list[Frame] = [({"i": number}, bytes(BIG if number < 2 else 8))]
            writers.append((far, frames))
            LinkWriter(
                near,
                take=lambda frames=frames: frames.pop(0) if frames else None,
                on_end=lambda error: None,
            ).notify()
        for far, _ in reversed(writers):  # nobody reads the large ones until the others are here
            assert far.recv(timeout_s=LONG_S).message["i"] == len(writers) - 1
            writers.pop()
