"""Proof of the run's secret: who gets in without TLS, who does not, and who is not believed."""

from __future__ import annotations

import contextlib
import logging
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from manyhands.errors import (
    BadFrame,
    LinkClosed,
    LinkError,
    LinkTimeout,
    ProtocolError,
    UsageError,
)
from manyhands.transport import Authority, Link, Listener, connect, parse_address
from manyhands.transport.hmac_auth import (
    CONNECTOR,
    LIMITS,
    LISTENER,
    Challenge,
    ClaimAccepted,
    Welcome,
    authenticate,
    connecting_side,
    listening_side,
    make_proof,
)
from manyhands.transport.link import HAS_PAYLOAD, HEADER, MAGIC, VERSION, pack, parse_head

ADDRESS = "tcp://127.0.0.1:0"
LONG_S = 10.0
SECRET = "6b1f5a52c9d54c0f"
WRONG = "0f4c9d52a5f1b600"
NONCE = "5a" * 32
InThread = Callable[[Callable[[], Any]], tuple[threading.Thread, list[Any]]]


@pytest.fixture
def listener() -> Iterator[Listener]:
    with Listener(ADDRESS, secret=SECRET) as opened:
        yield opened


def dial(listener: Listener) -> socket.socket:
    where = parse_address(listener.address)
    return socket.create_connection((where.host, where.port), timeout=LONG_S)


def stranger(listener: Listener) -> Link:
    """A connection that says whatever the test wants."""
    return Link(dial(listener), peer="the listener")


def come_in(listener: Listener, name: str = "worker-0") -> None:
    """The listener still serves, and lets in whom it should."""
    with (
        connect(listener.address, secret=SECRET, name=name, timeout_s=LONG_S),
        listener.accept(LONG_S) as far,
    ):
        assert far.peer == name


def until_refused(listener: Listener, count: int) -> None:
    deadline = time.monotonic() + LONG_S
    while listener.refused < count and time.monotonic() < deadline:
        time.sleep(0.01)
    assert listener.refused == count


def a_claim(
    challenge: str,
    *,
    secret: str = SECRET,
    role: str = CONNECTOR,
    name: str = "worker-0",
    nonce: str = NONCE,
) -> dict[str, Any]:
    """A claim in answer to a challenge, with the proof that fits all that is given."""
    proof = make_proof(secret, role, listener_nonce=challenge, connector_nonce=nonce, name=name)
    return {"kind": "Claim", "name": name, "nonce": nonce, "proof": proof}


def header(head_bytes: int, payload_bytes: int | None = None) -> bytes:
    flags = 0 if payload_bytes is None else HAS_PAYLOAD
    return HEADER.pack(MAGIC, VERSION, flags, 0, head_bytes, payload_bytes or 0)


def refused(
    listener: Listener, answer: Callable[[str], dict[str, Any]], payload: bytes | None = None
) -> None:
    """Nobody gets in with `answer(nonce of the listener)`, and no proof is handed out for it."""
    before = listener.refused
    with stranger(listener) as link:
        challenge = link.recv(timeout_s=LONG_S).message
        assert set(challenge) == {"kind", "nonce"}
        link.send(answer(challenge["nonce"]), payload)
        until_refused(listener, before + 1)
        with contextlib.suppress(LinkClosed):
            assert link.recv(timeout_s=LONG_S).message == {"kind": "ClaimRefused"}
        with pytest.raises(LinkClosed):
            link.recv(timeout_s=LONG_S)
    with pytest.raises(LinkTimeout):
        listener.accept(0.01)


@contextlib.contextmanager
def false_listener(*script: Callable[[Link], None]) -> Iterator[str]:
    """A listener that plays one part of the script for each connection; its address."""
    failures: list[Exception] = []

    def play() -> None:
        for part in script:
            sock, _ = server.accept()
            sock.settimeout(LONG_S)
            with Link(sock, peer="victim") as link:
                try:
                    part(link)
                    # Its end is awaited, so that no reset overtakes what was said.
                    with contextlib.suppress(LinkClosed):
                        link.recv(timeout_s=LONG_S)
                except Exception as error:
                    failures.append(error)

    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(LONG_S)
        thread = threading.Thread(target=play)
        thread.start()
        try:
            yield f"tcp://127.0.0.1:{server.getsockname()[1]}"
        finally:
            thread.join(2 * LONG_S)
    assert not failures


@contextlib.contextmanager
def wire_tap(target: Listener) -> Iterator[tuple[str, dict[str, bytearray]]]:
    """A way to `target` that writes down what each side says."""
    said = {CONNECTOR: bytearray(), LISTENER: bytearray()}

    def copy(source: socket.socket, to: socket.socket, record: bytearray) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(4096):
                record += data
                to.sendall(data)
            to.shutdown(socket.SHUT_WR)

    def relay() -> None:
        near, _ = server.accept()
        with near, dial(target) as far:
            near.settimeout(LONG_S)
            back = threading.Thread(target=copy, args=(far, near, said[LISTENER]))
            back.start()
            copy(near, far, said[CONNECTOR])
            back.join(LONG_S)

    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(LONG_S)
        thread = threading.Thread(target=relay)
        thread.start()
        try:
            yield f"tcp://127.0.0.1:{server.getsockname()[1]}", said
        finally:
            thread.join(2 * LONG_S)


@pytest.mark.parametrize("kind", ["tcp", "unix"])
def test_two_sides_with_the_secret_connect_and_the_name_is_known(kind: str, tmp_path: Path) -> None:
    address = ADDRESS if kind == "tcp" else f"unix:{tmp_path}/s"
    with (
        Listener(address, secret=SECRET) as listener,
        connect(
            listener.address, secret=SECRET, name="worker-0", timeout_s=LONG_S, peer="server-1"
        ) as near,
        listener.accept(LONG_S) as far,
    ):
        assert (near.peer, far.peer) == ("server-1", "worker-0")
        for sender, receiver in ((near, far), (far, near)):
            sender.send({"n": 1}, b"weights")
            assert receiver.recv(timeout_s=LONG_S).payload == b"weights"
        assert listener.refused == 0


@pytest.mark.parametrize("name", ["w", "x" * 64, '"' * 64, "é" * 32, "語" * 21, "😀" * 16])
def test_the_longest_names_fit_in_any_script(listener: Listener, name: str) -> None:
    come_in(listener, name)


def test_a_wrong_secret_is_refused_at_once_logged_and_counted(
    listener: Listener, caplog: pytest.LogCaptureFixture
) -> None:
    began = time.monotonic()
    with (
        caplog.at_level(logging.WARNING, "manyhands.transport"),
        pytest.raises(
            LinkError, match=r"server-1.* was refused: .*the two secrets differ"
        ) as caught,
    ):
        connect(listener.address, secret=WRONG, name="worker-0", timeout_s=LONG_S, peer="server-1")
    assert not isinstance(caught.value, LinkTimeout)
    assert time.monotonic() - began < LONG_S / 2, "a refusal must not be tried again"
    until_refused(listener, 1)
    with pytest.raises(LinkTimeout, match="1 refused"):
        listener.accept(0.01)
    assert "127.0.0.1:" in caplog.text
    assert "'worker-0' and does not prove" in caplog.text
    for secret in (SECRET, WRONG):
        assert secret not in caplog.text + str(caught.value)
    come_in(listener)


def answer_with(proof: Callable[[str, dict[str, Any]], str]) -> Callable[[Link], None]:
    def part(link: Link) -> None:
        link.send(Challenge(NONCE))
        claim = link.recv(timeout_s=LONG_S).message
        link.send(ClaimAccepted(proof(NONCE, claim)))
        link.send(Welcome())

    return part


def proof_with(secret: str) -> Callable[[str, dict[str, Any]], str]:
    return lambda nonce, claim: make_proof(
        secret, LISTENER, listener_nonce=nonce, connector_nonce=claim["nonce"], name=claim["name"]
    )


@pytest.mark.parametrize(
    "proof",
    [proof_with(WRONG), lambda nonce, claim: claim["proof"], lambda nonce, claim: NONCE],
    ids=["another secret", "reflected", "made up"],
)
def test_a_listener_without_the_secret_is_refused(
    proof: Callable[[str, dict[str, Any]], str],
) -> None:
    with (
        false_listener(answer_with(proof)) as address,
        pytest.raises(LinkError, match=r"was refused: it does not prove the run's secret"),
    ):
        connect(address, secret=SECRET, name="worker-0", timeout_s=LONG_S)
    # The same part with the right proof is believed: it is the proof that was missing.
    with false_listener(answer_with(proof_with(SECRET))) as address:
        connect(address, secret=SECRET, name="worker-0", timeout_s=LONG_S).close()


def test_a_welcome_does_not_replace_a_proof() -> None:
    def after_the_claim(link: Link) -> None:
        link.send(Challenge(NONCE))
        link.recv(timeout_s=LONG_S)
        link.send(Welcome())

    with (
        false_listener(after_the_claim) as address,
        pytest.raises(LinkError, match="does not prove the run's secret"),
    ):
        connect(address, secret=SECRET, name="worker-0", timeout_s=LONG_S)
    with (
        Listener(ADDRESS, insecure=True) as open_to_all,
        pytest.raises(LinkError, match=r"was refused: it admits anyone"),
    ):
        connect(open_to_all.address, secret=SECRET, name="worker-0", timeout_s=LONG_S)


def test_a_recorded_handshake_cannot_be_replayed(listener: Listener) -> None:
    with (
        wire_tap(listener) as (address, said),
        connect(address, secret=SECRET, name="worker-0", timeout_s=LONG_S),
    ):
        listener.accept(LONG_S).close()
    assert b"worker-0" in said[CONNECTOR]
    assert b"ClaimAccepted" in said[LISTENER]
    assert SECRET.encode() not in said[CONNECTOR] + said[LISTENER]

    with dial(listener) as sock:
        sock.sendall(said[CONNECTOR])
        until_refused(listener, 1)
    with pytest.raises(LinkTimeout):
        listener.accept(0.01)
    with (
        false_listener(lambda link: link._sock.sendall(said[LISTENER])) as address,
        pytest.raises(LinkError, match=r"was refused: it does not prove the run's secret"),
    ):
        connect(address, secret=SECRET, name="worker-0", timeout_s=LONG_S)


def test_every_connection_gets_a_new_challenge(listener: Listener) -> None:
    nonces = set()
    for _ in range(3):
        with stranger(listener) as link:
            nonces.add(link.recv(timeout_s=LONG_S).message["nonce"])
    assert len(nonces) == 3


def test_the_proof_of_a_listener_is_not_valid_for_a_connector(listener: Listener) -> None:
    refused(listener, lambda nonce: a_claim(nonce, role=LISTENER))
    refused(listener, lambda nonce: {"kind": "ClaimAccepted", "proof": NONCE})
    come_in(listener)


def test_a_claim_is_bound_to_its_name_and_both_nonces(listener: Listener) -> None:
    refused(listener, lambda nonce: a_claim(nonce) | {"name": "worker-1"})
    refused(listener, lambda nonce: a_claim(nonce) | {"name": "worker-0 "})
    refused(listener, lambda nonce: a_claim(nonce) | {"nonce": "5b" * 32})
    refused(listener, lambda nonce: a_claim("5b" * 32))
    refused(listener, lambda nonce: a_claim(nonce, secret=WRONG))
    for payload in (b"", b"!"):
        refused(listener, a_claim, payload)
    with stranger(listener) as link:
        link.send(a_claim(link.recv(timeout_s=LONG_S).message["nonce"]))
        assert link.recv(timeout_s=LONG_S).message["kind"] == "ClaimAccepted"
        assert link.recv(timeout_s=LONG_S).message == {"kind": "Welcome"}
        listener.accept(LONG_S).close()


@pytest.mark.parametrize(
    "changed",
    [
        {"name": "\ud800"},
        {"name": None},
        {"name": ["worker-0"]},
        {"nonce": 1},
        {"proof": "é" * 64},
        {"proof": ""},
        {"proof": None},
        {"more": 1},
        {"kind": "Welcome"},
        {"kind": ["Claim"]},
    ],
    ids=str,
)
def test_a_malformed_claim_is_refused(listener: Listener, changed: dict[str, Any]) -> None:
    refused(listener, lambda nonce: a_claim(nonce) | changed)
    come_in(listener)


@pytest.mark.parametrize(
    "given_wrongly",
    [
        {"name": ""},
        {"name": "x" * 65},
        {"name": "a\0b"},
        {"name": "a\nb"},
        {"nonce": ""},
        {"nonce": NONCE.upper()},
        {"nonce": NONCE + "\n"},
        {"nonce": NONCE[2:]},
    ],
    ids=str,
)
def test_a_correct_proof_over_invalid_fields_is_refused(
    listener: Listener, given_wrongly: dict[str, str]
) -> None:
    refused(listener, lambda nonce: a_claim(nonce, **given_wrongly))


def test_garbage_and_large_frames_are_refused_at_their_first_bytes(listener: Listener) -> None:
    large_head = header(LIMITS.head_bytes + 1)
    payload = header(2, 1) + b"{}"
    empty_payload = header(2, 0) + b"{}"
    for count, said in enumerate(
        (b"GET / HTTP/1.0\r\n\r\n\r\n", large_head, payload, empty_payload), 1
    ):
        with dial(listener) as sock:
            sock.sendall(said)
            until_refused(listener, count)
    with dial(listener):
        pass  # gone before its claim
    until_refused(listener, 5)
    come_in(listener)


def test_a_false_listener_cannot_make_a_connector_allocate() -> None:
    large = header(2, 1 << 30) + b"{}"
    with (
        false_listener(lambda link: link._sock.sendall(large)) as address,
        pytest.raises(BadFrame, match="sent an invalid proof: a payload of 1073741824 bytes"),
    ):
        connect(address, secret=SECRET, name="worker-0", timeout_s=LONG_S)


def test_clients_that_stall_delay_no_others_and_are_dropped_in_time(
    listener: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("manyhands.transport.listener.HANDSHAKE_S", 1.5)
    began = time.monotonic()
    with contextlib.ExitStack() as stack:
        socks = [stack.enter_context(dial(listener)) for _ in range(3)]
        claim = b"".join(pack(a_claim(NONCE)))
        socks[1].sendall(claim[:10])
        come_in(listener)
        assert listener.refused == 0, "the good one came in while the others were still half-open"
        # A byte now and then buys no more time.
        position = 0
        with contextlib.suppress(OSError):
            while listener.refused < 3 and time.monotonic() - began < LONG_S:
                socks[2].sendall(claim[position : position + 1])
                position += 1
                time.sleep(0.05)
        until_refused(listener, 3)
        assert 1.4 < time.monotonic() - began < LONG_S / 2
        assert 0 < position < len(claim)


def test_too_many_half_open_clients_drop_the_oldest(
    listener: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("manyhands.transport.listener.MAX_HALF_OPEN", 2)
    with contextlib.ExitStack() as stack:
        links = [stack.enter_context(stranger(listener)) for _ in range(3)]
        assert links[0].recv(timeout_s=LONG_S).message["kind"] == "Challenge"
        with pytest.raises(LinkClosed):
            links[0].recv(timeout_s=LONG_S)
        until_refused(listener, 1)
        come_in(listener)


def test_a_listener_that_stalls_is_a_timeout_and_one_that_restarts_is_tried_again() -> None:
    def serve(link: Link) -> None:
        assert list(listening_side(link._sock, SECRET)) == []
        link.send(Welcome())

    with (
        false_listener(lambda link: None) as address,
        pytest.raises(LinkTimeout, match=r"within 0\.2 s.*did not prove the run's secret in time"),
    ):
        connect(address, secret=SECRET, name="worker-0", timeout_s=0.2)
    with false_listener(Link.close, serve) as address:
        connect(address, secret=SECRET, name="worker-0", timeout_s=LONG_S).close()


def test_a_claim_waits_until_the_socket_can_take_it(in_thread: InThread) -> None:
    left, right = socket.socketpair()
    with left, right:
        right.settimeout(LONG_S)
        left.setblocking(False)
        num_bytes = 0
        with contextlib.suppress(BlockingIOError):
            while True:
                num_bytes += left.send(bytes(1024))
        deadline = time.monotonic() + LONG_S
        thread, results = in_thread(
            lambda: authenticate(left, deadline, secret=SECRET, name="worker-0", peer="far")
        )
        right.sendall(b"".join(pack(Challenge(NONCE))))
        time.sleep(0.1)
        assert thread.is_alive()
        while num_bytes:
            num_bytes -= len(right.recv(num_bytes))
        far = Link(right, peer="near")
        claim = far.recv(timeout_s=LONG_S).message
        far.send(ClaimAccepted(proof_with(SECRET)(NONCE, claim)))
        thread.join(LONG_S)
        assert results == [None]


def test_links_of_other_kinds_fail_on_both_sides(listener: Listener) -> None:
    credentials = Authority.create("run").issue("worker-0")
    with pytest.raises(LinkError, match="was refused"):
        connect(listener.address, credentials=credentials, timeout_s=LONG_S)
    until_refused(listener, 1)
    with pytest.raises(BadFrame, match="expects the run's secret"):
        connect(listener.address, insecure=True, timeout_s=LONG_S)
    until_refused(listener, 2)
    with Listener(ADDRESS, credentials=credentials) as secured, pytest.raises(LinkTimeout):
        connect(secured.address, secret=SECRET, name="worker-0", timeout_s=0.2)


def test_wrong_arguments_are_reported_before_anything_is_opened(tmp_path: Path) -> None:
    credentials = Authority.create("run").issue("worker-0")
    wrong: list[dict[str, Any]] = [{"secret": SECRET, "credentials": credentials}, {"secret": ""}]
    for given_wrongly in wrong:
        for address in (ADDRESS, f"unix:{tmp_path}/s"):
            with pytest.raises(ValueError, match="secret"):
                Listener(address, **given_wrongly)
            with pytest.raises(ValueError, match="secret"):
                connect(address, timeout_s=LONG_S, name="worker-0", **given_wrongly)
    with pytest.raises(ValueError, match="needs name="):
        connect(ADDRESS, secret=SECRET, timeout_s=LONG_S)
    for name in ("", "x" * 65, "é" * 33, "a\nb", "\ud800"):
        with pytest.raises(UsageError, match="1 to 64 bytes"):
            connect(ADDRESS, secret=SECRET, name=name, timeout_s=LONG_S)
    assert list(tmp_path.iterdir()) == []


def play(side: Callable[[socket.socket], Any], said: Callable[[bytes], bytes]) -> tuple[Any, bytes]:
    """Run one side against bytes that `said` makes of its first frame; its result, its answer."""
    left, right = socket.socketpair()
    with left, right:
        left.setblocking(False)
        right.settimeout(LONG_S)
        handshake = side(left)
        first = next(handshake)
        assert first == 1, "it waits to read"
        right.setblocking(False)
        heard = b""
        with contextlib.suppress(BlockingIOError):
            heard = right.recv(4096)
        right.sendall(said(heard))
        right.shutdown(socket.SHUT_WR)
        try:
            while True:
                next(handshake)
        except StopIteration as end:
            return end.value, b""
        except (BadFrame, ProtocolError, OSError) as error:
            with contextlib.suppress(BlockingIOError):
                return error, right.recv(4096)
            return error, b""


def listening(sock: socket.socket) -> Any:
    return listening_side(sock, SECRET)


def connecting(sock: socket.socket) -> Any:
    return connecting_side(sock, SECRET, "worker-0")


def good_claim(challenge: bytes) -> bytes:
    head = parse_head(memoryview(challenge)[HEADER.size :])
    return b"".join(pack(a_claim(head["nonce"])))


@settings(max_examples=200)
@given(st.binary(max_size=700))
def test_random_bytes_prove_nothing_to_either_side(said: bytes) -> None:
    for side in (listening, connecting):
        for data in (said, header(len(said) % 512) + said):
            outcome, answer = play(side, lambda _, data=data: data)
            assert isinstance(outcome, (BadFrame, ProtocolError, OSError))
            assert answer == b""


@settings(max_examples=300)
@given(st.data())
def test_one_changed_byte_in_a_claim_is_refused(data: st.DataObject) -> None:
    assert play(listening, good_claim) == ("worker-0", b"")

    def mutate(challenge: bytes) -> bytes:
        claim = bytearray(good_claim(challenge))
        position = data.draw(st.integers(0, len(claim) - 1))
        claim[position] ^= data.draw(st.integers(1, 255))
        return bytes(claim)

    outcome, answer = play(listening, mutate)
    assert isinstance(outcome, (BadFrame, ProtocolError, OSError))
    assert b"proof" not in answer


def test_it_works_without_cryptography() -> None:
    program = """
import sys
sys.modules["cryptography"] = None
from manyhands.transport import Listener, connect
with Listener("tcp://127.0.0.1:0", secret="s") as listener:
    with connect(listener.address, secret="s", name="worker-0", timeout_s=10):
        with listener.accept(10) as far:
            print(far.peer)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.stdout, done.stderr) == ("worker-0\n", "")
