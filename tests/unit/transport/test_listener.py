"""Listeners and addresses: who may come in, what is left behind, what is no address."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import stat
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from manyhands.errors import LinkClosed, LinkError, LinkTimeout, UsageError
from manyhands.transport import Listener, connect, parse_address
from manyhands.transport.refusals import MAX_REASONS, Refusals

LONG_S = 20.0
InThread = Callable[[Callable[[], Any]], tuple[threading.Thread, list[Any]]]


def test_a_unix_socket_is_private_and_removed_with_its_listener(tmp_path: Path) -> None:
    path = tmp_path / "s"
    before = os.umask(0)
    try:
        listener = Listener(f"unix:{path}")
    finally:
        os.umask(before)
    with listener, connect(listener.address, timeout_s=LONG_S), listener.accept(LONG_S) as far:
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert far.peer == f"process {os.getpid()}"
        with pytest.raises(LinkError, match="in use"):
            Listener(f"unix:{path}")
    assert not path.exists()
    listener.close()


def test_another_user_is_refused_by_both_sides(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = os.getuid()
    with Listener(f"unix:{tmp_path}/s") as listener:
        # What the kernel says of the other end stays true: it is this side that is someone else.
        monkeypatch.setattr(os, "getuid", lambda: mine + 1)
        with pytest.raises(LinkError, match=rf"refused.*of user {mine}, not of {mine + 1}"):
            connect(listener.address, timeout_s=LONG_S)
        with socket.socket(socket.AF_UNIX) as stranger:
            stranger.settimeout(LONG_S)
            stranger.connect(f"{tmp_path}/s")
            assert stranger.recv(1) == b"", "no welcome for another user"
        assert listener.refused >= 1
        with pytest.raises(LinkTimeout, match="No connection"):
            listener.accept(0.05)


def test_a_socket_left_by_a_dead_listener_is_taken_over(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(f"{tmp_path}/s")
        dead.listen()
    with Listener(f"unix:{tmp_path}/s") as listener:
        connect(listener.address, timeout_s=LONG_S).close()
    (tmp_path / "s").write_text("a file of someone")
    with pytest.raises(LinkError, match="Can't listen"):
        Listener(f"unix:{tmp_path}/s")
    assert (tmp_path / "s").read_text() == "a file of someone"


def test_closing_a_listener_wakes_accept_and_drops_waiting_links(
    tmp_path: Path, in_thread: InThread
) -> None:
    listener = Listener(f"unix:{tmp_path}/s")
    with connect(listener.address, timeout_s=LONG_S) as first:
        listener.accept(LONG_S).close()
        with connect(listener.address, timeout_s=LONG_S) as untaken:
            listener.close()
            with pytest.raises(LinkClosed):
                untaken.recv(timeout_s=LONG_S)
        with pytest.raises(LinkClosed):
            first.recv(timeout_s=LONG_S)
    listener = Listener(f"unix:{tmp_path}/s")
    waiting = [in_thread(listener.accept) for _ in range(2)]
    listener.close()
    for thread, results in waiting:
        thread.join(LONG_S)
        assert isinstance(results[0], LinkClosed)


@pytest.mark.parametrize("address", ["tcp://127.0.0.1:0", "tcp://[::1]:0"])
def test_tcp_without_credentials_must_be_asked_for(address: str) -> None:
    for refused in (lambda: Listener(address), lambda: connect(address, timeout_s=LONG_S)):
        with pytest.raises(UsageError, match="insecure=True"):
            refused()
    with Listener(address, insecure=True) as listener:
        assert parse_address(listener.address).port > 0
        with connect(listener.address, timeout_s=LONG_S, insecure=True) as near:
            assert near.peer == listener.address


@pytest.mark.parametrize(
    "text",
    ["unix:/tmp/a b", "tcp://localhost:1", "tcp://[fe80::1]:65535", "tcp://node-7.lan:0"],
)
def test_an_address_is_written_as_it_is_read(text: str) -> None:
    assert str(parse_address(text)) == text


@pytest.mark.parametrize(
    "text",
    ["", "localhost:1", "unix:s", "unix:", "tcp://:1", "tcp://h", "tcp://h:65536", "tcp://::1:5"],
)
def test_the_error_for_a_wrong_address_shows_a_right_one(text: str) -> None:
    with pytest.raises(UsageError, match="Write unix:/path/to/socket") as caught:
        parse_address(text)
    assert repr(text) in str(caught.value)


def test_a_unix_path_too_long_for_the_kernel_is_refused() -> None:
    assert parse_address("unix:/" + "x" * 106).path
    for text in ("unix:/" + "x" * 107, "unix:/" + "é" * 54):
        with pytest.raises(UsageError, match="the kernel allows 107"):
            parse_address(text)


def test_refused_connections_are_counted_and_not_logged_one_by_one(
    caplog: pytest.LogCaptureFixture,
) -> None:
    refusals = Refusals(logging.getLogger("manyhands.test"), "the door")
    for number in range(5000):
        refusals.add(f"10.0.0.1:{number}", f"a payload of {number} bytes")
    refusals.close()
    refusals.close()
    assert [record.getMessage() for record in caplog.records] == [
        "the door refused a connection from 10.0.0.1:0: a payload of 0 bytes",
        "the door refused 10 connections, now 10.0.0.1:9: a payload of 9 bytes",
        "the door refused 100 connections, now 10.0.0.1:99: a payload of 99 bytes",
        "the door refused 1,000 connections, now 10.0.0.1:999: a payload of 999 bytes",
        "the door refused 5,000 connections in all",
    ]
    caplog.clear()
    for number in range(5000):
        refusals.add("somebody", "word " + "x" * number)
    assert len(caplog.records) < 2 * MAX_REASONS


def test_noise_counts_as_one_reason_and_hides_no_other(caplog: pytest.LogCaptureFixture) -> None:
    """However many ways there are in which bytes are no text."""
    refusals = Refusals(logging.getLogger("manyhands.test"), "the door")
    for number in range(256):
        with pytest.raises(UnicodeDecodeError) as caught:
            (bytes(number % 7) + bytes([128 + number % 128])).decode("utf-8", "strict")
        refusals.add(
            "somebody", f"it sent what is not a frame: its head is not JSON: {caught.value}"
        )
    refusals.add("somebody", "it says that it is 'worker-1', who is here already: process 7")
    said = [record.getMessage() for record in caplog.records]
    assert [line for line in said[:-1] if "not JSON" not in line] == []
    assert len(said) == 4  # the first, the 10th and the 100th of the noise; and the other
    assert "who is here already" in said[-1]


def test_a_listener_counts_refused_connections(caplog: pytest.LogCaptureFixture) -> None:
    with Listener("tcp://127.0.0.1:0", secret="s" * 32) as listener:
        where = parse_address(listener.address)
        for _ in range(40):
            with (
                contextlib.suppress(ConnectionResetError),
                socket.create_connection((where.host, where.port), timeout=LONG_S) as stranger,
            ):
                stranger.sendall(b"GET / HTTP/1.1" + bytes(64))
                while stranger.recv(4096):
                    pass
    assert listener.refused == 40
    assert 1 <= len(caplog.records) <= 6
