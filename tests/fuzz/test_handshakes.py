"""Both sides of a handshake get anything from a peer without the secret; so does the doctor of a cluster."""

from __future__ import annotations

import contextlib
import socket
import threading

import pytest
from agent_program import KEY, spec
from generator import Variant
from test_ps_workers import NONSENSE, ends, say
from variants import ANSWER_S, Dialect, answered, frame, sample, strange_frames, variants, watching

from manyhands.doctor.hosts import cluster
from manyhands.errors import LinkError
from manyhands.transport import Listener, connect
from manyhands.transport.connect import FIRST
from manyhands.transport.hmac_auth import FROM_CONNECTOR, FROM_LISTENER

CONNECTOR = Dialect.of("proof of a connector", FROM_CONNECTOR)
LISTENER = Dialect.of("proof of a listener", FROM_LISTENER)
WELCOME = Dialect.of("welcome of a listener", FIRST)
DOCTOR = Dialect.of("first messages to the doctor", cluster.FIRST)
SECRET = "the secret of a run"
VOCABULARY = {
    "name": ("worker-0",),
    "nonce": ("0" * 64,),
    "proof": ("f" * 64,),
    "role": ("worker",),
    "slots": (1,),
}


def data_of(variant: Variant) -> bytes:
    return b"".join(frame(variant))


def all_data(dialect: Dialect, each: int | None) -> list[bytes]:
    found = variants(dialect, vocabulary=VOCABULARY, examples=30)
    these = list(found) if each is None else sample(found, each=each)
    return [*map(data_of, these), *(data for _, data in strange_frames())]


EACH = [6, pytest.param(None, marks=pytest.mark.long)]


@pytest.mark.parametrize("each", EACH)
def test_a_connector_proves_anything(each: int | None) -> None:
    with watching(), Listener("tcp://127.0.0.1:0", secret=SECRET) as listener:
        host, _, port = listener.address.removeprefix("tcp://").rpartition(":")
        for data in all_data(CONNECTOR, each):
            with answered(data[:300]), socket.create_connection((host, int(port))) as sock:
                sock.settimeout(ANSWER_S)
                with contextlib.suppress(OSError):
                    sock.sendall(data + data_of(NONSENSE))
                    sock.shutdown(socket.SHUT_WR)
                    while sock.recv(1 << 16):
                        pass
        with connect(listener.address, secret=SECRET, name="worker-0", timeout_s=ANSWER_S):
            pass


def connect_to(data: bytes, *, secret: str | None) -> None:
    """Connect to a listener that sends this."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(ANSWER_S)

        def answer() -> None:
            sock, _ = server.accept()
            with sock, contextlib.suppress(OSError):
                sock.sendall(data)
                sock.shutdown(socket.SHUT_WR)
                sock.recv(1 << 16)

        thread = threading.Thread(target=answer)
        thread.start()
        address = f"tcp://127.0.0.1:{server.getsockname()[1]}"
        options = {"secret": secret, "name": "worker-0"} if secret else {"insecure": True}
        with contextlib.suppress(LinkError):
            connect(address, timeout_s=0.05, **options).close()  # type: ignore[arg-type]
        thread.join(ANSWER_S)
        assert not thread.is_alive()


@pytest.mark.parametrize("each", EACH)
@pytest.mark.parametrize("dialect", [LISTENER, WELCOME], ids=lambda dialect: dialect.name)
def test_a_listener_proves_anything(dialect: Dialect, each: int | None) -> None:
    with watching():
        for data in all_data(dialect, each):
            with answered(data[:300]):
                connect_to(data, secret=SECRET if dialect is LISTENER else None)


def test_an_agent_sends_anything_to_the_doctor() -> None:
    with (
        watching() as watched,
        cluster.ClusterProbe(
            spec(0), "tcp://127.0.0.1:0", authority=KEY, wait_s=1.0, notify=lambda text: None
        ) as doctor,
    ):
        address = doctor._listener.address
        for variant in sample(variants(DOCTOR, vocabulary=VOCABULARY), each=12):
            with connect(address, credentials=KEY.issue("agent-x"), timeout_s=ANSWER_S) as link:
                say(link, variant, NONSENSE)
                ends(link, variant)
            watched.check(variant)
