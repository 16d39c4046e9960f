"""Proof of the run's secret on a link without encryption, for private networks that are fast.

Both sides know the secret, a random string of the run; it never travels. Right after the connection,
before any other frame:

    listener  -> connector   challenge  nonce of the listener
    connector -> listener    claim      name, nonce of the connector, proof of the connector
    listener  -> connector   answer     proof of the listener; or refused

A proof is HMAC-SHA256, keyed with the secret, over the label of its own role, both nonces and the
name. Each side draws a new nonce, so an old proof fits no new connection; the labels differ, so a
proof can't be sent back to the side that made it; the name is in it, so it can't be changed on the
way. The listener proves itself last, so that a stranger who knocks learns nothing to guess from.

What this protects: nobody without the secret gets in, as a connector or as a listener.

What it does not: later frames are neither encrypted nor checked. Whoever can read packets on the
wire reads the data, and whoever can change them, or pass them on from a place between the two
sides, can change the data. One secret serves all members, so a name tells them apart but does not
keep one member from taking another's. And whoever has overheard a handshake, or was taken for the
listener, can try secrets against it in peace: take one that can't be guessed, such as
secrets.token_hex(32). Where any of this matters, use TLS (see tls.py).

Cost: three small frames and one round trip when a link is made; nothing later.
"""

from __future__ import annotations

import contextlib
import hmac
import re
import secrets
import select
import selectors
import socket
from collections.abc import Generator, Mapping
from typing import Any

from manyhands.errors import BadFrame, UsageError
from manyhands.transport import frames
from manyhands.transport.frames import WELCOME, Limits, Message
from manyhands.transport.tls import DeadlinePassed, Handshake, wait_ready

LIMITS = Limits(head_bytes=512, payload_bytes=0)
"""The largest frame taken from a side that has proven nothing yet."""
MAX_NAME_BYTES = 64
"""Of a name in UTF-8: as JSON it then leaves room in LIMITS for the rest of the claim."""
NONCE_BYTES = 32
CONNECTOR = "connector"
LISTENER = "listener"
REFUSED = {"link": "refused"}
"""The head of the listener's answer to a proof that is wrong."""

_HEX = re.compile(r"[0-9a-f]{64}")
"""A nonce or a proof: 32 bytes either way."""


def make_proof(
    secret: str, role: str, *, listener_nonce: str, connector_nonce: str, name: str
) -> str:
    """What only a side that knows the secret can say, in this role, on this connection."""
    # No part can hold a zero byte, hence no two lists of parts make the same text.
    text = "\0".join(("manyhands proof 1", role, listener_nonce, connector_nonce, name))
    # Any string is a secret, also one with bytes of an environment variable that are no UTF-8.
    key = secret.encode("utf-8", "surrogatepass")
    return hmac.digest(key, text.encode(), "sha256").hex()


def is_name(name: str) -> bool:
    # Printable first: it rules out the lone surrogates, which have no UTF-8.
    return name.isprintable() and 1 <= len(name.encode()) <= MAX_NAME_BYTES


def listening_side(sock: socket.socket, secret: str) -> Handshake:
    """The listener's side, on a socket that does not block; returns the name that was proven."""
    mine = secrets.token_hex(NONCE_BYTES)
    yield from _send(sock, {"link": "challenge", "nonce": mine})
    claim = yield from _receive(sock)
    name, theirs, proof = _fields(claim, "claim", "name", "nonce", "proof")
    if not is_name(name):
        raise BadFrame("its claim holds no name that a member can have")
    nonces = {"listener_nonce": mine, "connector_nonce": theirs}
    if not hmac.compare_digest(proof, make_proof(secret, CONNECTOR, name=name, **nonces)):
        # A word, so that it does not try again; whether it arrives is its own affair.
        with contextlib.suppress(OSError):
            sock.send(b"".join(frames.pack(REFUSED)))
        raise PermissionError(f"it claims to be {name!r} and does not prove the run's secret")
    yield from _send(
        sock, {"link": "answer", "proof": make_proof(secret, LISTENER, name=name, **nonces)}
    )
    return name


def connecting_side(sock: socket.socket, secret: str, name: str) -> Generator[int, None, None]:
    """The connector's side, on a socket that does not block."""
    challenge = yield from _receive(sock)
    if challenge == WELCOME:
        raise PermissionError("it lets in anyone, without a proof of the run's secret")
    (theirs,) = _fields(challenge, "challenge", "nonce")
    mine = secrets.token_hex(NONCE_BYTES)
    nonces = {"listener_nonce": theirs, "connector_nonce": mine}
    proof = make_proof(secret, CONNECTOR, name=name, **nonces)
    yield from _send(sock, {"link": "claim", "name": name, "nonce": mine, "proof": proof})
    answer = yield from _receive(sock)
    if answer == REFUSED:
        raise PermissionError("it does not take this side's proof: the two secrets differ")
    (proof,) = _fields(answer, "answer", "proof")
    if not hmac.compare_digest(proof, make_proof(secret, LISTENER, name=name, **nonces)):
        raise PermissionError("it does not prove the run's secret")


def prove(sock: socket.socket, deadline: float, *, secret: str, name: str, peer: str) -> None:
    """Go through connecting_side() and wait where it waits. `peer` is for messages."""
    sock.setblocking(False)
    try:
        for events in connecting_side(sock, secret, name):
            ready = select.POLLOUT if events == selectors.EVENT_WRITE else select.POLLIN
            wait_ready(sock, ready, deadline)
    except DeadlinePassed:
        raise TimeoutError(f"{peer} did not prove the run's secret in time") from None
    except BadFrame as error:
        raise BadFrame(f"{peer} sent what is no proof: {error}.") from error


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


def _fields(head: Mapping[str, Any], kind: str, *names: str) -> list[str]:
    """The values of a frame that must have these fields and no others."""
    if head.get("link") != kind or head.keys() != {"link", *names}:
        raise BadFrame(f"a frame came where the {kind} is due")
    values = [head[name] for name in names]
    for name, value in zip(names, values, strict=True):
        if not isinstance(value, str) or (name != "name" and not _HEX.fullmatch(value)):
            raise BadFrame(f"the {name} of its {kind} is malformed")
    return values


def _send(sock: socket.socket, head: Mapping[str, Any]) -> Generator[int, None, None]:
    data = b"".join(frames.pack(head, limits=LIMITS))
    while data:
        try:
            data = data[sock.send(data) :]
        except BlockingIOError:
            yield selectors.EVENT_WRITE


def _receive(sock: socket.socket) -> Generator[int, None, dict[str, Any]]:
    """The head of the next frame; not a byte after it is read, for that is the link's."""
    frame = frames.incoming(LIMITS)
    while True:
        try:
            view = next(frame).view
        except StopIteration as end:
            message: Message = end.value
            if message.payload is not None:
                raise BadFrame("a payload before the proof") from None
            return message.head
        while view:
            try:
                got = sock.recv_into(view)
            except BlockingIOError:
                yield selectors.EVENT_READ
                continue
            if not got:
                raise ConnectionResetError("it closed the connection before the proof")
            view = view[got:]
