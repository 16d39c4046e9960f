"""Authentication by the run's secret, for links without encryption in fast private networks.

Both sides know the secret, a random string of the run; it is never sent. The first messages of a connection:

    listener  -> connector   Challenge       nonce of the listener
    connector -> listener    Claim           name, nonce of the connector, proof of the connector
    listener  -> connector   ClaimAccepted   proof of the listener; or ClaimRefused

A proof is HMAC-SHA256, keyed with the secret, over the label of its role, both nonces and the name. Each
side draws a new nonce, so an old proof fits no new connection; the labels differ, so a proof can't be sent
back to the side that made it; the name is part of it, so it can't be changed on the way. The listener's
proof comes last, so that a connector without the secret gets nothing to test guesses against.

Protected: nobody without the secret is admitted, as a connector or as a listener.

Not protected: later frames are neither encrypted nor authenticated. An attacker who can read packets can
read the data, and one who can change packets, or relay them between the two sides, can change it. All
members share one secret, so one member can use another's name. An attacker who has recorded a handshake, or
was accepted as the listener, can test guesses of the secret offline: use one that can't be guessed, such as
secrets.token_hex(32). Where any of this matters, use TLS (tls.py).

Cost: three small frames and one round trip per connection; nothing later.
"""

from __future__ import annotations

import contextlib
import hmac
import re
import secrets
import select
import selectors
import socket
from collections.abc import Generator
from dataclasses import dataclass
from typing import Annotated, Any

from manyhands.errors import BadFrame, ProtocolError, UsageError
from manyhands.transport.fields import MessageSet, check
from manyhands.transport.link import FrameReader, Limits, pack
from manyhands.transport.tls import DeadlinePassed, Handshake, wait_ready

LIMITS = Limits(head_bytes=512, payload_bytes=0)
"""The largest frame accepted from a side that is not authenticated yet."""
MAX_NAME_BYTES = 64
"""Of a name in UTF-8: as JSON it then leaves room in LIMITS for the rest of the claim."""
NONCE_BYTES = 32
CONNECTOR = "connector"
LISTENER = "listener"


def is_name(name: str) -> bool:
    # Printable first: it excludes lone surrogates, which have no UTF-8.
    return name.isprintable() and 1 <= len(name.encode()) <= MAX_NAME_BYTES


Hex = Annotated[
    str, check(lambda text: bool(re.fullmatch(r"[0-9a-f]{64}", text)), "is not 32 bytes in hex")
]
"""A nonce or a proof."""


@dataclass(frozen=True)
class Challenge:
    nonce: Hex


@dataclass(frozen=True)
class Claim:
    name: Annotated[str, check(is_name, "can't be the name of a member")]
    nonce: Hex
    proof: Hex


@dataclass(frozen=True)
class ClaimAccepted:
    proof: Hex


@dataclass(frozen=True)
class ClaimRefused:
    pass


@dataclass(frozen=True)
class Welcome:
    """The listener has admitted the connector: the first message of every link."""


FROM_CONNECTOR = MessageSet(Claim, strict=True)
FROM_LISTENER = MessageSet(Challenge, ClaimAccepted, ClaimRefused, Welcome, strict=True)


def make_proof(
    secret: str, role: str, *, listener_nonce: str, connector_nonce: str, name: str
) -> str:
    """Return the proof of one role on one connection, which needs the secret."""
    # No part can contain a zero byte, so no two lists of parts make the same text.
    text = "\0".join(("manyhands proof 1", role, listener_nonce, connector_nonce, name))
    # Any string may be a secret, even one from an environment variable that is not UTF-8.
    key = secret.encode("utf-8", "surrogatepass")
    return hmac.digest(key, text.encode(), "sha256").hex()


def listening_side(sock: socket.socket, secret: str) -> Handshake:
    """Authenticate the connector, on a non-blocking socket. Returns its name."""
    nonce = secrets.token_hex(NONCE_BYTES)
    yield from _send(sock, Challenge(nonce))
    claim = yield from _receive(sock, FROM_CONNECTOR)
    context = {"listener_nonce": nonce, "connector_nonce": claim.nonce, "name": claim.name}
    if not hmac.compare_digest(claim.proof, make_proof(secret, CONNECTOR, **context)):
        # Sent so that the connector does not try again; if it does not arrive, nothing is lost.
        with contextlib.suppress(OSError):
            sock.send(b"".join(pack(ClaimRefused())))
        raise PermissionError(f"it claims to be {claim.name!r} and does not prove the run's secret")
    yield from _send(sock, ClaimAccepted(make_proof(secret, LISTENER, **context)))
    return str(claim.name)


def connecting_side(sock: socket.socket, secret: str, name: str) -> Generator[int, None, None]:
    """Authenticate to the listener and check it, on a non-blocking socket."""
    challenge = yield from _receive(sock, FROM_LISTENER)
    if isinstance(challenge, Welcome):
        raise PermissionError("it admits anyone, without a proof of the run's secret")
    if not isinstance(challenge, Challenge):
        raise ProtocolError("it did not begin with a challenge")
    nonce = secrets.token_hex(NONCE_BYTES)
    context = {"listener_nonce": challenge.nonce, "connector_nonce": nonce, "name": name}
    yield from _send(sock, Claim(name, nonce, make_proof(secret, CONNECTOR, **context)))
    answer = yield from _receive(sock, FROM_LISTENER)
    if isinstance(answer, ClaimRefused):
        raise PermissionError("it does not accept this side's proof: the two secrets differ")
    if not isinstance(answer, ClaimAccepted) or not hmac.compare_digest(
        answer.proof, make_proof(secret, LISTENER, **context)
    ):
        raise PermissionError("it does not prove the run's secret")


def authenticate(
    sock: socket.socket, deadline: float, *, secret: str, name: str, peer: str
) -> None:
    """Authenticate to the listener, waiting until `deadline`. `peer` is for errors."""
    sock.setblocking(False)
    try:
        for events in connecting_side(sock, secret, name):
            ready = select.POLLOUT if events == selectors.EVENT_WRITE else select.POLLIN
            wait_ready(sock, ready, deadline)
    except DeadlinePassed:
        raise TimeoutError(f"{peer} did not prove the run's secret in time") from None
    except (BadFrame, ProtocolError) as error:
        raise BadFrame(f"{peer} sent an invalid proof: {error}.") from error


def check_name(name: str | None) -> str:
    """`name`, if a member can have it."""
    if name is None:
        raise ValueError("secret= needs name=: who this side is, such as name='worker-0'.")
    if not is_name(name):
        raise UsageError(
            f"{name!r} can't be the name of a member: it takes printable characters, 1 to "
            f"{MAX_NAME_BYTES} bytes of them in UTF-8, such as worker-0."
        )
    return name


def _send(sock: socket.socket, message: object) -> Generator[int, None, None]:
    data = b"".join(pack(message, limits=LIMITS))
    while data:
        try:
            data = data[sock.send(data) :]
        except BlockingIOError:
            yield selectors.EVENT_WRITE


def _receive(sock: socket.socket, messages: MessageSet) -> Generator[int, None, Any]:
    """Return the next message. No byte after it is read: those belong to the link."""
    reader = FrameReader(LIMITS)
    while True:
        try:
            received = reader.read(sock.recv_into, messages)
        except BlockingIOError:
            yield selectors.EVENT_READ
        except EOFError:
            raise ConnectionResetError("it closed the connection before the proof") from None
        else:
            if received.payload is not None:
                raise ProtocolError("a payload before the proof")
            return received.message
