"""Credentials and handshakes: who is let in, who is not, and where a key is never found."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import ssl
import tempfile
import time
from pathlib import Path

import pytest

from manyhands.errors import LinkError, LinkTimeout, UsageError
from manyhands.transport import Authority, Credentials, Listener, connect
from manyhands.transport.fields import read, to_json
from manyhands.transport.listener import HANDSHAKE_S

ADDRESS = "tcp://127.0.0.1:0"
LONG_S = 10.0


@pytest.fixture(scope="module")
def authority() -> Authority:
    return Authority.create("run")


@pytest.fixture(scope="module")
def coordinator(authority: Authority) -> Credentials:
    return authority.issue("coordinator")


def host_and_port(listener: Listener) -> tuple[str, int]:
    host, port = listener.address.removeprefix("tcp://").rsplit(":", 1)
    return host, int(port)


def until_refused(listener: Listener, count: int) -> None:
    deadline = time.monotonic() + LONG_S
    while listener.refused < count and time.monotonic() < deadline:
        time.sleep(0.01)
    assert listener.refused == count


def test_both_sides_learn_the_name_in_the_others_certificate(
    authority: Authority, coordinator: Credentials
) -> None:
    worker = read(Credentials, json.loads(to_json(authority.issue("worker0"))))
    with (
        Listener(ADDRESS, credentials=coordinator) as listener,
        connect(listener.address, credentials=worker, timeout_s=LONG_S, peer="x") as near,
        listener.accept(LONG_S) as far,
    ):
        assert (near.peer, far.peer) == ("coordinator", "worker0")
        assert isinstance(near._sock, ssl.SSLSocket)
        assert near._sock.version() == "TLSv1.3"
        assert listener.refused == 0


def test_another_authority_of_the_same_name_is_refused_by_the_client(
    coordinator: Credentials,
) -> None:
    stranger = Authority.create("run").issue("worker0")
    with Listener(ADDRESS, credentials=coordinator) as listener:
        began = time.monotonic()
        with pytest.raises(LinkError, match=r"refused.*CERTIFICATE_VERIFY_FAILED") as caught:
            connect(listener.address, credentials=stranger, timeout_s=LONG_S)
        assert not isinstance(caught.value, LinkTimeout)
        assert time.monotonic() - began < LONG_S / 2, "a refusal must not be tried again"
        until_refused(listener, 1)


def test_another_authority_is_refused_by_the_server_and_the_client_is_told(
    coordinator: Credentials, caplog: pytest.LogCaptureFixture
) -> None:
    stranger = Authority.create("run").issue("worker0")
    # It trusts the run's authority and so comes through its own check: only the server can refuse.
    mixed = Credentials(coordinator.authority, stranger.certificate, stranger.key)
    with (
        caplog.at_level(logging.WARNING, "manyhands.transport"),
        Listener(ADDRESS, credentials=coordinator) as listener,
    ):
        with pytest.raises(LinkError, match=r"refused.*ALERT"):
            connect(listener.address, credentials=mixed, timeout_s=LONG_S)
        until_refused(listener, 1)
        with pytest.raises(LinkTimeout, match="1 refused"):
            listener.accept(0.05)
    assert "127.0.0.1:" in caplog.text
    assert "CERTIFICATE_VERIFY_FAILED" in caplog.text


def test_no_certificate_is_refused(coordinator: Credentials) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.load_verify_locations(cadata=coordinator.authority)
    with (
        Listener(ADDRESS, credentials=coordinator) as listener,
        socket.create_connection(host_and_port(listener), timeout=LONG_S) as raw,
        context.wrap_socket(raw) as sock,
    ):
        with pytest.raises(ssl.SSLError, match=r"(?i)certificate.required"):
            sock.recv(1)
        until_refused(listener, 1)


def test_tls_1_2_is_refused(authority: Authority, coordinator: Credentials) -> None:
    context = authority.issue("old").client_context()
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    with (
        Listener(ADDRESS, credentials=coordinator) as listener,
        socket.create_connection(host_and_port(listener), timeout=LONG_S) as raw,
    ):
        with pytest.raises(ssl.SSLError, match=r"(?i)protocol.version"):
            context.wrap_socket(raw)
        until_refused(listener, 1)


def test_a_first_byte_that_is_not_tls_is_refused_at_once(coordinator: Credentials) -> None:
    """OpenSSL takes it for a hello of SSLv2, whose length it claims, and waits for the rest."""
    with (
        Listener(ADDRESS, credentials=coordinator) as listener,
        socket.create_connection(host_and_port(listener), timeout=LONG_S) as raw,
    ):
        began = time.monotonic()
        raw.sendall(b"\xff\xff\x01" + bytes(20))
        with contextlib.suppress(ConnectionResetError):
            assert raw.recv(1) == b""
        assert time.monotonic() - began < HANDSHAKE_S / 2
        until_refused(listener, 1)


def test_garbage_in_place_of_a_handshake_is_refused_and_the_next_one_served(
    authority: Authority, coordinator: Credentials
) -> None:
    with Listener(ADDRESS, credentials=coordinator) as listener:
        with socket.create_connection(host_and_port(listener), timeout=LONG_S) as raw:
            raw.sendall(b"GET / HTTP/1.0\r\n\r\n" * 20)
            until_refused(listener, 1)
        with socket.create_connection(host_and_port(listener), timeout=LONG_S):
            pass  # gone before its handshake
        until_refused(listener, 2)
        good = authority.issue("worker0")
        with connect(listener.address, credentials=good, timeout_s=LONG_S):
            listener.accept(LONG_S).close()


def test_half_open_clients_do_not_block_a_good_one(
    authority: Authority, coordinator: Credentials, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("manyhands.transport.listener.HANDSHAKE_S", 2.0)
    good = authority.issue("worker0")
    with Listener(ADDRESS, credentials=coordinator) as listener, contextlib.ExitStack() as stack:
        for said in (b"", b"\x16\x03\x01", b""):
            raw = socket.create_connection(host_and_port(listener), timeout=LONG_S)
            stack.enter_context(raw)
            raw.sendall(said)
        with connect(listener.address, credentials=good, timeout_s=1.8):
            listener.accept(LONG_S).close()
        assert listener.refused == 0, "the good one came in while the others were still half-open"
        until_refused(listener, 3)


def test_too_many_half_open_clients_drop_the_oldest(
    authority: Authority, coordinator: Credentials, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("manyhands.transport.listener.MAX_HALF_OPEN", 2)
    with Listener(ADDRESS, credentials=coordinator) as listener, contextlib.ExitStack() as stack:
        raws = [
            stack.enter_context(socket.create_connection(host_and_port(listener), timeout=LONG_S))
            for _ in range(3)
        ]
        assert raws[0].recv(1) == b""
        until_refused(listener, 1)
        with connect(listener.address, credentials=authority.issue("w"), timeout_s=LONG_S):
            listener.accept(LONG_S).close()


def test_tls_against_plain_fails_in_time_on_both_sides(
    authority: Authority, coordinator: Credentials
) -> None:
    with Listener(ADDRESS, insecure=True) as listener, pytest.raises(LinkError, match="refused"):
        connect(listener.address, credentials=authority.issue("w"), timeout_s=LONG_S)
    with Listener(ADDRESS, credentials=coordinator) as listener, pytest.raises(LinkTimeout):
        connect(listener.address, insecure=True, timeout_s=0.2)


def test_the_key_is_not_in_any_repr(authority: Authority, coordinator: Credentials) -> None:
    secret = coordinator.key.splitlines()[1]
    assert len(secret) > 30
    for text in (repr(coordinator), str(coordinator), repr(authority)):
        assert secret not in text
        assert "PRIVATE" not in text


def test_no_file_and_no_descriptor_is_left_of_a_key(
    coordinator: Credentials, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    descriptors = set(os.listdir("/proc/self/fd"))
    coordinator.server_context()
    coordinator.client_context()
    assert set(os.listdir("/proc/self/fd")) == descriptors
    assert list(tmp_path.iterdir()) == []
    runs = "manyhands-test-"  # of tests in other processes
    left = [path for path in Path("/dev/shm").glob("*manyhands*") if runs not in path.name]
    assert not left


def test_wrong_credentials_are_refused(authority: Authority, coordinator: Credentials) -> None:
    other = authority.issue("other")
    for broken in (
        Credentials("nonsense", coordinator.certificate, coordinator.key),
        Credentials(coordinator.authority, coordinator.certificate, "nonsense"),
        Credentials(coordinator.authority, coordinator.certificate, other.key),
    ):
        with pytest.raises(UsageError, match="not a certificate and its key"):
            broken.server_context()


@pytest.mark.parametrize("name", ["", "x" * 65, "a\nb"])
def test_a_name_that_no_certificate_can_hold_is_refused(authority: Authority, name: str) -> None:
    with pytest.raises(UsageError, match="1 to 64 printable"):
        authority.issue(name)


def test_an_expired_authority_is_refused() -> None:
    old = Authority.create("old", valid_days=-0.5)
    with (
        Listener(ADDRESS, credentials=old.issue("a")) as listener,
        pytest.raises(LinkError, match="expired"),
    ):
        connect(listener.address, credentials=old.issue("b"), timeout_s=LONG_S)


def test_processes_with_one_secret_derive_the_same_authority() -> None:
    here, there = (Authority.from_secret("run", "a secret of the run") for _ in range(2))
    with (
        Listener(ADDRESS, credentials=here.issue("coordinator")) as listener,
        connect(
            listener.address, credentials=there.issue("agent-1"), timeout_s=LONG_S, peer="x"
        ) as near,
        listener.accept(LONG_S) as far,
    ):
        assert (near.peer, far.peer) == ("coordinator", "agent-1")


@pytest.mark.parametrize("other", ["a secret of the rum", "a secret of the run "])
def test_another_secret_is_another_authority(other: str) -> None:
    here = Authority.from_secret("run", "a secret of the run")
    stranger = Authority.from_secret("run", other).issue("agent-1")
    told: list[str] = []
    with Listener(
        ADDRESS,
        credentials=here.issue("coordinator"),
        on_refused=lambda who, why: told.append(f"{who} {why}"),
    ) as listener:
        with pytest.raises(LinkError, match="certificate verify failed"):
            connect(listener.address, credentials=stranger, timeout_s=LONG_S, peer="x")
        until_refused(listener, 1)
    assert len(told) == 1
    assert told[0].startswith("127.0.0.1:")
    assert "unknown ca" in told[0]


def test_an_authority_from_an_empty_secret_is_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        Authority.from_secret("run", "")
