"""Links over unix sockets, TCP and TLS: whole messages, two threads, deadlines, deaths."""

from __future__ import annotations

import hashlib
import random
import signal
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from manyhands.errors import BadFrame, LinkClosed, LinkError, LinkTimeout
from manyhands.testing.ports import reserve_port
from manyhands.transport import Limits, Link, Listener, Received, connect
from manyhands.transport.link import pack

LONG_S = 20.0
Pair = tuple[Link, Link]
InThread = Callable[[Callable[[], Any]], tuple[threading.Thread, list[Any]]]

heads = st.dictionaries(st.text(), st.none() | st.integers() | st.text(), max_size=3)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=40)
@given(heads, st.none() | st.binary(max_size=100_000))
def test_round_trip_of_any_message(pair: Pair, head: dict[str, Any], payload: bytes | None) -> None:
    for sender, receiver in (pair, pair[::-1]):
        sender.send(head, payload)
        message = receiver.recv(timeout_s=LONG_S)
        assert message.message == head
        assert message.payload == payload
        assert sender.bytes_sent == receiver.bytes_received


def test_place_receives_into_the_given_block(pair: Pair, in_thread: InThread) -> None:
    near, far = pair
    data = random.Random(0).randbytes(3_000_000)
    block = memoryview(bytearray(4_000_000))
    thread, results = in_thread(lambda: near.send({"block": 7}, memoryview(data)))
    message = far.recv(timeout_s=LONG_S, place=lambda head, n: block[head["block"] :][:n])
    thread.join(LONG_S)
    assert results == [None]
    assert message.payload is not None
    assert message.payload.obj is block.obj
    assert block[7 : 7 + len(data)] == data
    assert not any(block[:7])
    assert not any(block[7 + len(data) :])


def test_a_send_that_signals_interrupt_continues(pair: Pair, in_thread: InThread) -> None:
    near, far = pair
    data = random.Random(1).randbytes(8_000_000)

    def receive_late() -> Received:
        time.sleep(0.2)  # the sender blocks, and each signal cuts its system call short
        return far.recv(timeout_s=LONG_S)

    signals: list[int] = []
    before = signal.signal(signal.SIGALRM, lambda number, _: signals.append(number))
    thread, results = in_thread(receive_late)
    signal.setitimer(signal.ITIMER_REAL, 0.02, 0.02)
    try:
        near.send({"large": True}, data)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    thread.join(LONG_S)
    assert signals
    assert results[0].payload == data


def test_two_threads_per_side_send_at_once_and_every_frame_arrives_whole(pair: Pair) -> None:
    num_frames = 200

    def send(link: Link, name: str) -> None:
        rng = random.Random(name)
        pool = memoryview(rng.randbytes(1_000_000))
        for number in range(num_frames):
            # Mostly small, some large: small ones try to slip in between the parts of large ones.
            payload = pool[: rng.randrange(1_000_000) if number % 4 == 0 else rng.randrange(3000)]
            digest = hashlib.blake2b(payload, digest_size=8).hexdigest()
            link.send({"from": name, "number": number, "digest": digest}, payload)

    def receive(link: Link) -> dict[str, list[int]]:
        seen: dict[str, list[int]] = {}
        for _ in range(2 * num_frames):
            message = link.recv(timeout_s=LONG_S)
            assert message.payload is not None
            digest = hashlib.blake2b(message.payload, digest_size=8).hexdigest()
            assert digest == message.message["digest"]
            seen.setdefault(message.message["from"], []).append(message.message["number"])
        return seen

    with ThreadPoolExecutor(6) as pool:
        try:
            received = [pool.submit(receive, link) for link in pair]
            sent = [pool.submit(send, link, f"{i}{j}") for i, link in enumerate(pair) for j in "ab"]
            for job in sent:
                job.result(2 * LONG_S)
            seen = [job.result(2 * LONG_S) for job in received]
        finally:
            for link in pair:  # so that no thread of the pool stays blocked after a failure
                link.close()
    in_order = list(range(num_frames))
    assert seen == [{"1a": in_order, "1b": in_order}, {"0a": in_order, "0b": in_order}]


@pytest.mark.parametrize("where", ["recv", "send"])
def test_close_wakes_a_thread_that_is_blocked(pair: Pair, where: str, in_thread: InThread) -> None:
    near, _ = pair

    def send_until_full() -> None:
        while True:
            near.send({}, bytes(1 << 20))

    thread, results = in_thread(near.recv if where == "recv" else send_until_full)
    time.sleep(0.1)
    assert thread.is_alive()
    began = time.monotonic()
    near.close()
    thread.join(LONG_S)
    assert time.monotonic() - began < 1
    assert isinstance(results[0], LinkClosed)
    assert near._sock.fileno() == -1, "the last thread to leave closes the descriptor"
    near.close()
    for call in (lambda: near.send({}), near.recv):
        with pytest.raises(LinkClosed, match="is closed"):
            call()


def test_a_closed_peer_raises_link_closed_after_its_last_message(pair: Pair) -> None:
    near, far = pair
    near.send({"last": "word"}, b"!")
    near.close()
    assert far.recv(timeout_s=LONG_S).message == {"last": "word"}
    with pytest.raises(LinkClosed, match=r"closed the link\.|broke"):
        far.recv(timeout_s=LONG_S)
    with pytest.raises(LinkClosed):
        far.send({})


def test_a_timeout_names_the_peer_and_the_time_and_the_link_stays_open(pair: Pair) -> None:
    near, far = pair
    began = time.monotonic()
    with pytest.raises(LinkTimeout, match=r"did not send a frame within 0\.05 s") as caught:
        near.recv(timeout_s=0.05)
    assert 0.04 < time.monotonic() - began < 5
    assert near.peer in str(caught.value)
    far.send({"late": 1})
    assert near.recv(timeout_s=LONG_S).message == {"late": 1}


def test_a_frame_byte_by_byte_with_a_timeout_after_each_is_resumed(
    raw: tuple[socket.socket, Link],
) -> None:
    sock, link = raw
    frame = b"".join(pack({"a": 1}, b"payload"))
    block = memoryview(bytearray(7))
    for position in range(len(frame) - 1):
        sock.sendall(frame[position : position + 1])
        with pytest.raises(LinkTimeout, match="raw did not send"):
            link.recv(timeout_s=0.0, place=lambda head, n: block)
    sock.sendall(frame[-1:] + frame)
    assert link.recv(timeout_s=LONG_S).payload == b"payload"
    assert bytes(block) == b"payload"
    assert link.recv(timeout_s=LONG_S).message == {"a": 1}
    assert link.bytes_received == 2 * len(frame)


@pytest.mark.parametrize("cut", [1, 19, 22, 30])
def test_an_end_in_the_middle_of_a_frame_raises_link_closed(
    raw: tuple[socket.socket, Link], cut: int
) -> None:
    sock, link = raw
    sock.sendall(b"".join(pack({"a": 1}, b"payload"))[:cut])
    sock.shutdown(socket.SHUT_WR)
    with pytest.raises(LinkClosed, match="in the middle of a"):
        link.recv(timeout_s=LONG_S)


@settings(max_examples=150)
@given(st.data())
def test_garbage_and_mutations_never_crash_or_hang(data: st.DataObject) -> None:
    good = bytearray(b"".join(pack({"kind": "step", "n": 3}, b"0123456789")))
    if data.draw(st.booleans()):
        sent = data.draw(st.binary(max_size=200))
    else:
        for _ in range(data.draw(st.integers(0, 3))):
            good[data.draw(st.integers(0, len(good) - 1))] = data.draw(st.integers(0, 255))
        sent = bytes(good) * 2
    limits = Limits(head_bytes=512, payload_bytes=2048)
    left, right = socket.socketpair()

    def place(head: dict[str, Any], nbytes: int) -> None:
        assert nbytes <= limits.payload_bytes

    def read_all(link: Link) -> None:
        while True:
            assert isinstance(link.recv(timeout_s=LONG_S, place=place).message, dict)

    with left, Link(right, peer="raw", limits=limits) as link:
        left.sendall(sent)
        left.shutdown(socket.SHUT_WR)
        with pytest.raises((BadFrame, LinkClosed)):
            read_all(link)
        with pytest.raises(LinkClosed, match="is closed"):  # after any failure
            link.recv(timeout_s=LONG_S)


def test_a_bad_frame_names_the_peer_and_closes_the_link(raw: tuple[socket.socket, Link]) -> None:
    sock, link = raw
    sock.sendall(b"GET / HTTP/1.0\r\n\r\n" * 2)
    with pytest.raises(BadFrame, match="raw sent what is not a frame: it starts with b'GET '"):
        link.recv(timeout_s=LONG_S)
    with pytest.raises(LinkClosed, match="is closed"):
        link.send({})
    with pytest.raises(ConnectionResetError):
        sock.recv(1)


def test_an_error_of_place_closes_the_link_and_is_not_hidden(pair: Pair) -> None:
    near, far = pair
    near.send({}, b"abc")
    with pytest.raises(ZeroDivisionError):
        far.recv(timeout_s=LONG_S, place=lambda head, n: memoryview(bytes(1 // 0)))
    with pytest.raises(LinkClosed):
        near.recv(timeout_s=LONG_S)


def test_a_message_that_cannot_be_sent_leaves_the_link_usable(pair: Pair) -> None:
    near, far = pair
    with pytest.raises(TypeError, match="JSON"):
        near.send({"a": object()})
    with pytest.raises(LinkError, match="over the limit"):
        near.send({"a": "x" * (1 << 20)})
    near.send({"fine": True})
    assert far.recv(timeout_s=LONG_S).message == {"fine": True}


def test_a_second_receiver_gets_an_error(pair: Pair, in_thread: InThread) -> None:
    near, _ = pair
    thread, results = in_thread(near.recv)
    while not near._recv_lock.locked() and thread.is_alive():
        time.sleep(0.01)
    with pytest.raises(RuntimeError, match="Two threads receive"):
        near.recv(timeout_s=LONG_S)
    near.close()
    thread.join(LONG_S)
    assert isinstance(results[0], LinkClosed)


@pytest.mark.parametrize("pair", ["tcp"], indirect=True)
def test_no_delay_is_on(pair: Pair) -> None:
    for link in pair:
        assert link._sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_connect_waits_for_a_listener_that_starts_later(
    tmp_path: Path, in_thread: InThread
) -> None:
    address = f"unix:{tmp_path}/s"
    thread, results = in_thread(lambda: connect(address, timeout_s=LONG_S))
    time.sleep(0.2)
    with Listener(address) as listener, listener.accept(LONG_S) as far:
        thread.join(LONG_S)
        with results[0] as near:
            near.send({"here": 1})
            assert far.recv(timeout_s=LONG_S).message == {"here": 1}


def test_the_error_of_connect_names_address_time_and_reason() -> None:
    port = reserve_port()
    with pytest.raises(LinkTimeout) as caught:
        connect(f"tcp://127.0.0.1:{port}", timeout_s=0.2, peer="server0", insecure=True)
    for word in ("server0", f"tcp://127.0.0.1:{port}", "0.2 s", "Connection refused"):
        assert word in str(caught.value)


def test_connect_to_another_server_or_a_silent_one(in_thread: InThread) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        address = f"tcp://127.0.0.1:{other.getsockname()[1]}"
        with pytest.raises(LinkTimeout, match="did not send a frame"):
            connect(address, timeout_s=0.2, insecure=True)
        other.accept()[0].close()
        thread, results = in_thread(lambda: connect(address, timeout_s=LONG_S, insecure=True))
        with other.accept()[0] as talker:
            talker.sendall(b"220 mail.example.org ready\r\n")
            thread.join(LONG_S)
    assert isinstance(results[0], BadFrame)
