"""The connecting side of links: connects, authenticates, and returns a Link.

With credentials a link is TLS 1.3 with certificates on both sides; with a secret both sides prove that they
know it, and what follows is plain (hmac_auth.py); with neither, a unix socket trusts processes of its
owner, and TCP needs insecure=True.

The listener sends a Welcome first: when connect() returns, the other side has checked and admitted this
one, which a TLS 1.3 client would otherwise learn only from its first read.
"""

from __future__ import annotations

import errno
import functools
import os
import socket
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass

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
    attempt = _Attempt(
        where,
        peer or address,
        limits,
        context=credentials.client_context() if credentials else None,
        authenticate=None
        if secret is None
        else functools.partial(
            hmac_auth.authenticate,
            secret=secret,
            name=hmac_auth.check_name(name),
            peer=peer or address,
        ),
    )
    deadline = time.monotonic() + timeout_s
    pause_s, longest_s = RETRY_S
    target = f"{peer} at {address}" if peer else address
    while True:
        try:
            return attempt.connect(deadline)
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


@dataclass(frozen=True)
class _Attempt:
    where: Address
    peer: str
    limits: Limits
    context: ssl.SSLContext | None
    authenticate: Callable[[socket.socket, float], None] | None

    def connect(self, deadline: float) -> Link:
        sock, peer = self._socket(max(0.001, deadline - time.monotonic())), self.peer
        try:
            if self.context is not None:
                sock = self.context.wrap_socket(sock)
                peer = certificate_name(sock)
            if self.authenticate is not None:
                self.authenticate(sock, deadline)
            link = Link(sock, peer=peer, limits=self.limits)
        except BaseException:
            sock.close()
            raise
        try:
            link.recv(FIRST, timeout_s=max(0.0, deadline - time.monotonic()))
        except BaseException as error:
            link.close()
            if not isinstance(error, ProtocolError):
                raise
            raise BadFrame(
                f"{peer} did not begin with a welcome: it is no listener of ours, or one that asks "
                "for the run's secret."
            ) from error
        return link

    def _socket(self, timeout_s: float) -> socket.socket:
        if not self.where.path:
            sock = socket.create_connection((self.where.host, self.where.port), timeout=timeout_s)
            if sock.getsockname() == sock.getpeername():
                # TCP can connect to itself when it tries a free local port: nobody listens there.
                sock.close()
                raise ConnectionRefusedError(errno.ECONNREFUSED, os.strerror(errno.ECONNREFUSED))
            return sock
        sock = socket.socket(socket.AF_UNIX)
        try:
            sock.settimeout(timeout_s)
            sock.connect(self.where.path)
            check_owner(sock)
        except BaseException:
            sock.close()
            raise
        return sock
