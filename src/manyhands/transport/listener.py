"""The listening side of links: accepts connections, and returns those that complete the handshake as Links.

A connection needs a TLS certificate of this run's authority, or proves the run's secret (hmac_auth.py); on
a unix socket, its process must belong to the same user, and nothing else is needed. Once admitted, it
receives a Welcome. Connections that stall, use another protocol or are not authorized are dropped and
counted.

Cost: one thread per listener for all handshakes, one descriptor per connection.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import queue
import selectors
import socket
import stat
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from manyhands.errors import LinkClosed, LinkError, LinkTimeout, ProtocolError
from manyhands.threads import OnError, describe, start_thread
from manyhands.transport import hmac_auth, tls
from manyhands.transport.address import Address, check_owner, check_trust, parse_address
from manyhands.transport.hmac_auth import Welcome
from manyhands.transport.link import DEFAULT_LIMITS, Limits, Link
from manyhands.transport.refusals import Refusals
from manyhands.transport.tls import Credentials, Handshake

logger = logging.getLogger("manyhands.transport")

HANDSHAKE_S = 10.0
"""Time limit for a handshake."""
MAX_HALF_OPEN = 256
"""Handshakes at once; one more drops the oldest."""
BACKLOG = 128
"""Connections that the kernel accepts ahead."""


@dataclass(eq=False)
class _HalfOpen:
    """A connection in its handshake."""

    sock: socket.socket
    peer: str
    until: float
    handshake: Handshake


class _Handshakes:
    """The handshakes of a listener, interleaved: one that stalls delays no other."""

    def __init__(
        self,
        credentials: Credentials | None,
        secret: str | None,
        *,
        admit: Callable[[socket.socket, str], None],
        refuse: Callable[[socket.socket, str, object], None],
    ) -> None:
        """Connections that pass go to `admit(sock, peer)`, others to `refuse(sock, peer, reason)`."""
        self.selector = selectors.DefaultSelector()
        self._context = credentials.server_context() if credentials else None
        self._secret = secret
        self._half_open: list[_HalfOpen] = []  # the oldest first
        self._admit, self._refuse = admit, refuse

    @property
    def patience_s(self) -> float | None:
        """Time until the oldest handshake is late."""
        if not self._half_open:
            return None
        return max(0.0, self._half_open[0].until - time.monotonic())

    def begin(self, sock: socket.socket, peer: str) -> None:
        sock.setblocking(False)
        if self._context is not None:
            sock = self._context.wrap_socket(sock, server_side=True, do_handshake_on_connect=False)
            handshake = tls.listening_side(sock)
        elif self._secret is not None:
            handshake = hmac_auth.listening_side(sock, self._secret)
        else:
            self._admit(sock, peer)
            return
        if len(self._half_open) >= MAX_HALF_OPEN:
            self._drop(self._half_open[0], "too many other handshakes")
        half = _HalfOpen(sock, peer, time.monotonic() + HANDSHAKE_S, handshake)
        self._half_open.append(half)
        self.selector.register(sock, selectors.EVENT_READ, half)
        self.proceed(half)

    def proceed(self, half: _HalfOpen) -> None:
        if half not in self._half_open:
            return  # dropped by an earlier event of the same round
        try:
            events = next(half.handshake)
        except StopIteration as end:
            self._forget(half)
            try:
                self._admit(half.sock, end.value)
            except (OSError, LinkError) as error:
                self._refuse(half.sock, half.peer, error)
        except (OSError, ValueError, LinkError, ProtocolError) as error:
            self._drop(half, error)
        else:
            self.selector.modify(half.sock, events, half)

    def drop_late(self) -> None:
        now = time.monotonic()
        for half in [half for half in self._half_open if half.until <= now]:
            self._drop(half, f"no handshake within {HANDSHAKE_S:g} s")

    def close(self) -> None:
        for half in self._half_open:
            half.sock.close()
        self.selector.close()

    def _drop(self, half: _HalfOpen, reason: object) -> None:
        self._forget(half)
        self._refuse(half.sock, half.peer, reason)

    def _forget(self, half: _HalfOpen) -> None:
        self.selector.unregister(half.sock)
        self._half_open.remove(half)


class Listener:
    """Accepts connections at an address, and hands over those that pass the handshake.

    `refused` counts the others; see refusals.py for which of them are logged.
    """

    def __init__(
        self,
        address: str,
        *,
        credentials: Credentials | None = None,
        secret: str | None = None,
        limits: Limits = DEFAULT_LIMITS,
        insecure: bool = False,
        on_refused: Callable[[str, object], None] | None = None,
    ) -> None:
        """`on_refused(peer, reason)` replaces the warning in the log. It is called in the listener's thread
        and must not block."""
        where = parse_address(address)
        check_trust(where, credentials=credentials, secret=secret, insecure=insecure)
        self._limits = limits
        self._on_refused = on_refused
        self._sock = _listening_socket(where)
        port = 0 if where.path else self._sock.getsockname()[1]
        self._where = Address(path=where.path, host=where.host, port=port)
        self.address = str(self._where)
        self._refusals = Refusals(logger, self.address)
        self._ready: queue.SimpleQueue[Link | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._closed = False
        self._wake, self._woken = socket.socketpair()
        self._handshakes = _Handshakes(credentials, secret, admit=self._admit, refuse=self._refuse)
        for sock in (self._sock, self._woken):
            self._handshakes.selector.register(sock, selectors.EVENT_READ)
        self._failure = ""
        self._thread = start_thread(self._serve, name="manyhands-listener", on_error=self._fail)

    @property
    def refused(self) -> int:
        return self._refusals.count

    def accept(self, timeout_s: float | None = None) -> Link:
        """Return the next connection that passed its handshake, from any number of threads."""
        try:
            link = self._ready.get(timeout=timeout_s)
        except queue.Empty:
            raise LinkTimeout(
                f"No connection to {self.address} within {timeout_s:g} s "
                f"({self.refused} refused so far)."
            ) from None
        if link is None:
            self._ready.put(None)  # for other threads that wait
            if self._failure:
                raise LinkError(f"The listener at {self.address} failed: {self._failure}")
            raise LinkClosed(f"The listener at {self.address} is closed.")
        return link

    def hand_over(self, take: Callable[[Link], None], *, name: str, on_error: OnError) -> None:
        """Call `take` with each new link from now on, in a thread of its own. `on_error` is called with an
        exception that `take` raises, after its link was closed, and when no more connections are accepted."""

        def guarded(link: Link) -> None:
            try:
                take(link)
            except BaseException:
                link.close()
                raise

        def accept() -> None:
            while True:
                try:
                    link = self.accept()
                except LinkClosed:
                    return
                start_thread(guarded, link, name=name, on_error=on_error)

        start_thread(accept, name="accept", on_error=on_error)

    def close(self) -> None:
        """Stop listening, drop what was not accepted, remove the unix socket. Idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._wake.close()
            self._thread.join()
            if self._on_refused is None:
                self._refusals.close()
            if self._where.path:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(self._where.path)
            for sock in (self._sock, self._woken):
                sock.close()
            self._handshakes.close()
            with contextlib.suppress(queue.Empty):
                while link := self._ready.get_nowait():
                    link.close()
            self._ready.put(None)

    def _serve(self) -> None:
        while not self._closed:
            for key, _ in self._handshakes.selector.select(self._handshakes.patience_s):
                if key.fileobj is self._sock:
                    self._take()
                elif key.data is not None:
                    self._handshakes.proceed(key.data)
            self._handshakes.drop_late()

    def _fail(self, error: BaseException) -> None:
        """Fail all waits: no connection can be accepted any more."""
        logger.error("%s failed", self.address, exc_info=error)
        self._failure = describe(error)
        self._ready.put(None)

    def _take(self) -> None:
        try:
            sock, origin = self._sock.accept()
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS):
                logger.error("%s can't accept a connection: %s", self.address, error)
                time.sleep(0.1)  # the socket stays readable meanwhile: do not spin
            return
        peer = "a local process" if self._where.path else f"{origin[0]}:{origin[1]}"
        try:
            if self._where.path:
                peer = f"process {check_owner(sock)}"
            self._handshakes.begin(sock, peer)
        except (OSError, ValueError, LinkError, ProtocolError) as error:
            self._refuse(sock, peer, error)

    def _admit(self, sock: socket.socket, peer: str) -> None:
        link = Link(sock, peer=peer, limits=self._limits)
        link.send(Welcome())
        self._ready.put(link)

    def _refuse(self, sock: socket.socket, peer: str, reason: object) -> None:
        sock.close()
        if self._on_refused is None:
            self._refusals.add(peer, reason)
        else:
            self._refusals.count += 1
            self._on_refused(peer, reason)

    def __enter__(self) -> Listener:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _listening_socket(where: Address) -> socket.socket:
    try:
        if not where.path:
            family = socket.AF_INET6 if ":" in where.host else socket.AF_INET
            sock = socket.create_server((where.host, where.port), family=family, backlog=BACKLOG)
        else:
            sock = _bind_unix(where.path)
    except OSError as error:
        raise LinkError(f"Can't listen at {where}: {error}.") from error
    sock.setblocking(False)
    return sock


def _bind_unix(path: str) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX)
    try:
        # Before bind, so that the file has these permissions from the start.
        os.fchmod(sock.fileno(), 0o600)
        try:
            sock.bind(path)
        except OSError as error:
            if error.errno != errno.EADDRINUSE or not _is_abandoned(path):
                raise
            os.unlink(path)
            sock.bind(path)
        sock.listen(BACKLOG)
    except BaseException:
        sock.close()
        raise
    return sock


def _is_abandoned(path: str) -> bool:
    """Return whether the socket at `path` was left by a listener that died without removing it."""
    # The kernel refuses connections to any file, and only sockets may be removed.
    if not stat.S_ISSOCK(os.lstat(path).st_mode):
        return False
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            return True
        except OSError:
            return False
        return False
