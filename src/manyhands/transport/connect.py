"""The connecting side of links: connects, authenticates, and returns a Link.

With credentials a link is TLS 1.3 with certificates on both sides; with a secret both sides prove that they
know it, and what follows is plain (hmac_auth.py); with neither, a unix socket trusts processes of its
owner, and TCP needs insecure=True.

The listener sends a Welcome first: when connect() returns, the other side has checked and admitted this
one, which a TLS 1.3 client would otherwise learn only from its first read.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import ssl
import time
from collections.abc import Callable

from manyhands.errors import BadFrame, LinkClosed, LinkError, LinkTimeout, ProtocolError
from manyhands.transport import hmac_auth
from manyhands.transport.address import Address, check_owner, check_trust, parse_address
from manyhands.transport.fields import MessageSet
from manyhands.transport.hmac_auth import Welcome
from manyhands.transport.link import DEFAULT_LIMITS, Limits, Link
from manyhands.transport.tls import Credentials, certificate_name

RETRY_S = (0.01, 0.5)
"""Shortest and longest pause before connect() tries again."""
FIRST = MessageSet(Welcome)


def connect(
    address: str,
    *,
    credentials: Credentials | None = None,
    secret: str | None = None,
    name: str | None = None,
    timeout_s: float,
    peer: str | None = None,
    limits: Limits = DEFAULT_LIMITS,
    insecure: bool = False,
) -> Link:
    """Connect to the listener at `address`; retry until `timeout_s`, since it may not be there yet.

    If either side refuses the other's certificate, proof or user, this fails at once with LinkError.
    `peer` is the expected name of the other side, for errors; with TLS the link's peer is the name in the
    certificate. With a secret, `name` is the name of this side: the link's peer over there.
    """
    where = parse_address(address)
    check_trust(where, credentials=credentials, secret=secret, insecure=insecure)
    context = credentials.client_context() if credentials else None
    own_name = "" if secret is None else hmac_auth.check_name(name)

    def handshake(sock: socket.socket) -> tuple[socket.socket, str]:
        """Authenticate both sides. Returns the socket to use, and the other side's name."""
        if context is not None:
            tls = context.wrap_socket(sock)
            return tls, certificate_name(tls)
        if secret is not None:
            hmac_auth.authenticate(
                sock, deadline, secret=secret, name=own_name, peer=peer or address
            )
        return sock, peer or address

    deadline = time.monotonic() + timeout_s
    pause_s, longest_s = RETRY_S
    target = f"{peer} at {address}" if peer else address
    while True:
        try:
            return _connect_once(where, handshake, deadline, limits)
        except (OSError, LinkClosed, LinkTimeout) as error:
            # A TLS alert is final; a mere end of the connection may be a listener that restarts.
            cause = error.__cause__ if isinstance(error.__cause__, ssl.SSLError) else error
            is_end = isinstance(cause, (ssl.SSLEOFError, ssl.SSLZeroReturnError))
            if isinstance(cause, (ssl.SSLError, PermissionError)) and not is_end:
                raise LinkError(f"The connection to {target} was refused: {cause}.") from error
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise LinkTimeout(
                    f"No connection to {target} within {timeout_s:g} s. The last attempt: "
                    f"{str(cause) or type(cause).__name__}"
                ) from error
            time.sleep(min(pause_s, left_s))
            pause_s = min(pause_s * 1.5, longest_s)


def _connect_once(
    where: Address,
    handshake: Callable[[socket.socket], tuple[socket.socket, str]],
    deadline: float,
    limits: Limits,
) -> Link:
    with contextlib.ExitStack() as stack:
        sock = stack.enter_context(_open(where, max(0.001, deadline - time.monotonic())))
        sock, peer = handshake(sock)
        stack.callback(sock.close)
        link = stack.enter_context(Link(sock, peer=peer, limits=limits))
        try:
            link.recv(FIRST, timeout_s=max(0.0, deadline - time.monotonic()))
        except ProtocolError as error:
            raise BadFrame(
                f"{peer} did not begin with a welcome: it is not a manyhands listener, or it "
                "expects the run's secret."
            ) from error
        stack.pop_all()
    return link


def _open(where: Address, timeout_s: float) -> socket.socket:
    with contextlib.ExitStack() as stack:
        if where.path:
            sock = stack.enter_context(socket.socket(socket.AF_UNIX))
            sock.settimeout(timeout_s)
            sock.connect(where.path)
            check_owner(sock)
        else:
            address = (where.host, where.port)
            sock = stack.enter_context(socket.create_connection(address, timeout=timeout_s))
            if sock.getsockname() == sock.getpeername():
                # TCP can connect to itself when it tries a free local port: nobody listens there.
                raise ConnectionRefusedError(errno.ECONNREFUSED, os.strerror(errno.ECONNREFUSED))
        stack.pop_all()
    return sock
