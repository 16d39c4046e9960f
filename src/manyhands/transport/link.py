"""Links: connections that carry whole messages, for control and for bulk data.

A Listener (see listener.py) accepts connections at an address (see address.py) and connect() makes
one; both return a Link, which sends and receives frames (see frames.py). With credentials a link is
TLS 1.3 with certificates on both sides; with a secret both sides prove that they know it, and what
follows is plain (see hmac_auth.py); with neither, a unix socket trusts its owner's user id, and TCP needs
insecure=True.

The listener's side begins with a welcome frame: when connect() returns, the other side has checked
and admitted this one, which a TLS 1.3 client would otherwise learn only from its first read.

A closed connection is the first sign of a death: recv() raises LinkClosed at once. What was sent
before close() arrives, unless the other side was sending at that moment: then TCP may drop it. To be
sure that a last message arrives, let the other side close first.

Cost: a plain link sends a frame with one system call and receives it with three, the payload
straight into its block; TLS works in records of 16 KiB.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import select
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from manyhands.errors import BadFrame, LinkClosed, LinkError, LinkTimeout
from manyhands.transport import frames
from manyhands.transport.address import Address, check_owner, check_trust, parse_address
from manyhands.transport.frames import DEFAULT_LIMITS, WELCOME, Limits, Message, Payload, Place
from manyhands.transport.hmac_auth import check_name, prove
from manyhands.transport.keepalive import watch
from manyhands.transport.tls import (
    RECORD_BYTES,
    Credentials,
    DeadlinePassed,
    TlsStream,
    WouldBlock,
    certificate_name,
    wait_ready,
)

RETRY_S = (0.01, 0.5)
"""Shortest and longest pause before connect() tries again."""
UNSENT_BYTES = 256 << 10
"""The kernel's send queue of a link that queues little: 2 ms at 1 Gbit/s."""
UNSENT_TLS_BYTES = 2 << 20
"""The same with TLS, where each wake-up costs more."""
WAKE_BYTES = 256 << 10
"""An event loop is woken for so much of a payload at once."""
LAST_S = 0.1
"""How long a last message waits for a frame that another thread is sending."""


class _PlainStream:
    """The bytes of a socket without TLS: blocking, since the kernel allows a reader and a writer at once."""

    has_pending = False

    def __init__(self, sock: socket.socket) -> None:
        sock.settimeout(None)
        self._sock = sock

    def recv_into(self, view: memoryview, deadline: float | None) -> int:
        if deadline is not None:
            wait_ready(self._sock, select.POLLIN, deadline)
            return self._sock.recv_into(view)
        # Waking up for every packet would cost a large payload more than the copying.
        return self._sock.recv_into(view, 0, socket.MSG_WAITALL)

    def try_recv_into(self, view: memoryview) -> int:
        try:
            return self._sock.recv_into(view, 0, socket.MSG_DONTWAIT)
        except BlockingIOError:
            raise WouldBlock(select.POLLIN) from None

    def send(self, parts: list[memoryview]) -> None:
        self._send(parts, 0)

    def try_send(self, parts: list[memoryview]) -> None:
        try:
            self._send(parts, socket.MSG_DONTWAIT)
        except BlockingIOError:
            raise WouldBlock(select.POLLOUT) from None

    def _send(self, parts: list[memoryview], flags: int) -> None:
        while parts:
            sent = self._sock.sendmsg(parts, (), flags)
            while parts and sent >= len(parts[0]):
                sent -= len(parts.pop(0))
            if sent:
                parts[0] = parts[0][sent:]


class Link:
    """One connection to `peer`. Any thread sends, one at a time receives, any thread closes.

    Used by threads that wait in recv() and send(), or by an event loop, which calls the methods that never
    wait (event_loop.py).
    """

    def __init__(self, sock: socket.socket, *, peer: str, limits: Limits = DEFAULT_LIMITS) -> None:
        self.peer = peer
        self.bytes_sent = 0
        self._sock = sock
        self._limits = limits
        if sock.family in (socket.AF_INET, socket.AF_INET6):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            watch(sock)
        self._stream: TlsStream | _PlainStream = (
            TlsStream(sock) if isinstance(sock, ssl.SSLSocket) else _PlainStream(sock)
        )
        self._send_lock = threading.Lock()
        self._recv_lock = threading.Lock()
        self._state_lock = threading.Lock()
        self._closed = False
        self._num_users = 0
        self._reader = frames.FrameReader(limits)
        self._on_close: list[Callable[[], None]] = []
        self._when_free: Callable[[], None] | None = None
        self._wake_bytes = 1

    @property
    def bytes_received(self) -> int:
        return self._reader.bytes_received

    @property
    def closed(self) -> bool:
        """If true, this side has closed it."""
        return self._closed

    @property
    def own_host(self) -> str:
        """The address of this end, at which the other one can reach this host; empty for a unix socket."""
        with self._in_use():
            if self._sock.family == socket.AF_UNIX:
                return ""
            return str(self._sock.getsockname()[0])

    def expect(self, limits: Limits) -> None:
        """Refuse larger frames from the next one on; what is sent may be as large as before."""
        self._reader.limits = limits

    def queue_little(self) -> None:
        """Keep the kernel's send queue short, so that what is sent later can still be sent first."""
        with self._in_use():
            if self._sock.family != socket.AF_UNIX and hasattr(socket, "TCP_NOTSENT_LOWAT"):
                tls = isinstance(self._sock, ssl.SSLSocket)
                most = UNSENT_TLS_BYTES if tls else UNSENT_BYTES
                self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, most)

    def send(self, head: Mapping[str, Any], payload: Payload | None = None) -> None:
        """Send one frame, whole. Blocks while the other side does not read; close() ends that."""
        self.send_packed(self.pack(head, payload))

    def pack(self, head: Mapping[str, Any], payload: Payload | None = None) -> list[memoryview]:
        """Encode a frame for one call of `send_packed`."""
        return frames.pack(head, payload, limits=self._limits)

    def send_packed(self, frame: Sequence[memoryview]) -> None:
        parts = list(frame)
        num_bytes = sum(map(len, parts))
        with self._in_use():
            with self._send_lock:
                self.check_open()  # the holder of the lock before may have failed inside its frame
                with self._closed_on_failure():
                    self._stream.send(parts)
                self.bytes_sent += num_bytes
            if (wake := self._when_free) is not None:
                self._when_free = None
                wake()

    def recv(self, *, timeout_s: float | None = None, place: Place | None = None) -> Message:
        """The next message. After LinkTimeout call again: a frame that is half received is continued.

        `place(head, nbytes)` returns the memory for the payload: a writable block of exactly nbytes, or
        None for a new one. It is called once per frame, by the recv() in which the head is complete.
        Any error other than LinkTimeout, also one that place() raises, closes the link.
        """
        if not self._recv_lock.acquire(blocking=False):
            raise RuntimeError(f"Two threads receive from {self.peer} at once; one must.")
        try:
            with self._in_use(), self._closed_on_failure():
                deadline = None if timeout_s is None else time.monotonic() + timeout_s
                try:
                    return self._reader.read(
                        lambda view: self._stream.recv_into(view, deadline), place
                    )
                except DeadlinePassed:
                    raise LinkTimeout(
                        f"{self.peer} did not send {self._reader.missing} within {timeout_s:g} s "
                        f"({self._reader.progress} had come)."
                    ) from None
        finally:
            self._recv_lock.release()

    # For event loops ----------------------------------------------------------------------------

    def hold(self, on_close: Callable[[], None]) -> int:
        """The socket's descriptor, which stays valid until `release`. `on_close` is called by close()."""
        with self._state_lock:
            self.check_open()
            self._num_users += 1
            self._on_close.append(on_close)
            return self._sock.fileno()

    def release(self) -> None:
        with self._state_lock:
            self._leave()

    @property
    def has_pending(self) -> bool:
        """If true, try_recv() has bytes that poll() does not report."""
        return not self._closed and self._stream.has_pending

    def try_recv(self, place: Place | None) -> Message:
        """As recv(); raises WouldBlock instead of waiting."""
        if not self._recv_lock.acquire(blocking=False):
            raise RuntimeError(f"Two threads receive from {self.peer} at once; one must.")
        try:
            self.check_open()
            try:
                with self._closed_on_failure():
                    message = self._reader.read(self._stream.try_recv_into, place)
            except WouldBlock:
                self._wake_at(self._reader.num_missing)
                raise
            self._wake_at(1)
            return message
        finally:
            self._recv_lock.release()

    def _wake_at(self, num_bytes: int) -> None:
        """Have poll() report the socket when so many bytes are there: waking up for every packet would cost a
        large payload more than the copying."""
        # OpenSSL may have up to one record of them already.
        wake_bytes = min(max(1, num_bytes - 2 * RECORD_BYTES), WAKE_BYTES)
        if wake_bytes != self._wake_bytes and self._sock.family != socket.AF_UNIX:
            self._wake_bytes = wake_bytes
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, wake_bytes)

    def begin_frame(self, when_free: Callable[[], None]) -> bool:
        """Take the link for one frame, which `try_send` sends and `end_frame` ends. If another thread is
        sending, returns False and calls `when_free` after that."""
        self._when_free = (
            when_free  # before the attempt: whoever has the lock looks here after its release
        )
        if not self._send_lock.acquire(blocking=False):
            return False
        self._when_free = None
        return True

    def try_send(self, parts: list[memoryview]) -> None:
        """Send and remove what can be sent now; WouldBlock if something is left."""
        self.check_open()
        with self._closed_on_failure():
            self._stream.try_send(parts)

    def end_frame(self, num_bytes: int) -> None:
        self.bytes_sent += num_bytes
        self._send_lock.release()

    def send_last(self, head: Mapping[str, Any]) -> None:
        """Send a last message if that is possible at once, and close."""
        with contextlib.suppress(LinkError, WouldBlock), self._in_use():
            if self._send_lock.acquire(timeout=LAST_S):
                try:
                    self.try_send(self.pack(head))
                finally:
                    self._send_lock.release()
        self.close()

    def close(self) -> None:
        """End the connection; threads blocked in recv() or send() get LinkClosed. Idempotent."""
        with self._state_lock:
            if self._closed:
                return
            self._closed = True
            # SSLSocket's own shutdown() would drop the TLS layer under a thread that still reads.
            # No close_notify is sent: frames have lengths, so that a cut one is seen anyway.
            with contextlib.suppress(OSError):
                socket.socket.shutdown(self._sock, socket.SHUT_RDWR)
            if not self._num_users:
                self._sock.close()
            callbacks, self._on_close = self._on_close, []
        for callback in callbacks:
            callback()

    @contextlib.contextmanager
    def _in_use(self) -> Iterator[None]:
        """Keep the descriptor while a thread uses it: its number could be another link's next."""
        with self._state_lock:
            self.check_open()
            self._num_users += 1
        try:
            yield
        finally:
            with self._state_lock:
                self._leave()

    def _leave(self) -> None:
        self._num_users -= 1
        if self._closed and not self._num_users:
            self._sock.close()

    def check_open(self) -> None:
        if self._closed:
            raise LinkClosed(f"The link to {self.peer} is closed.")

    @contextlib.contextmanager
    def _closed_on_failure(self) -> Iterator[None]:
        """Close the link after a failure inside a frame: where the next frame starts is unknown."""
        try:
            yield
        except (LinkTimeout, WouldBlock):
            raise
        except BaseException as error:
            closed_here = self._closed
            self.close()
            if isinstance(error, BadFrame):
                raise BadFrame(f"{self.peer} sent what is not a frame: {error}.") from error
            if not isinstance(error, (OSError, EOFError)):
                raise
            if closed_here:
                raise LinkClosed(f"The link to {self.peer} was closed on this side.") from error
            if isinstance(error, OSError):
                raise LinkClosed(f"The link to {self.peer} broke: {error}.") from error
            raise LinkClosed(f"{self.peer} closed the link{self._where_it_ended()}.") from None

    def _where_it_ended(self) -> str:
        if self._reader.between_frames:
            return ""
        return f" in the middle of {self._reader.missing}: {self._reader.progress} came"

    def __enter__(self) -> Link:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Link to {self.peer}{', closed' if self._closed else ''}>"


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
    """Connect to the listener at `address`, which need not be there yet: retries until `timeout_s`.

    Refused by either side for its certificate, proof or user, it fails at once with LinkError.
    `peer` is who is expected there, for messages; under TLS the link's peer is the certificate's
    name. With a secret `name` is who this side is: the link's peer over there.
    """
    where = parse_address(address)
    check_trust(where, credentials=credentials, secret=secret, insecure=insecure)
    context = credentials.client_context() if credentials else None
    proving = None
    if secret is not None:
        proving = functools.partial(
            prove, secret=secret, name=check_name(name), peer=peer or address
        )
    deadline = time.monotonic() + timeout_s
    pause_s, longest_s = RETRY_S
    target = f"{peer} at {address}" if peer else address
    while True:
        try:
            return _connect_once(where, context, proving, deadline, peer or address, limits)
        except (OSError, LinkClosed, LinkTimeout) as error:
            # An alert of the other side is a word, a mere end may be a listener that restarts.
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
    context: ssl.SSLContext | None,
    proving: Callable[[socket.socket, float], None] | None,
    deadline: float,
    peer: str,
    limits: Limits,
) -> Link:
    left_s = max(0.001, deadline - time.monotonic())
    if where.path:
        sock = socket.socket(socket.AF_UNIX)
    else:
        sock = socket.create_connection((where.host, where.port), timeout=left_s)
    try:
        if where.path:
            sock.settimeout(left_s)
            sock.connect(where.path)
            check_owner(sock)
        elif sock.getsockname() == sock.getpeername():
            # TCP can meet itself when it tries a free local port: nobody listens there.
            raise ConnectionRefusedError(errno.ECONNREFUSED, os.strerror(errno.ECONNREFUSED))
        if context is not None:
            sock = context.wrap_socket(sock)
            peer = certificate_name(sock)
        if proving is not None:
            proving(sock, deadline)
        link = Link(sock, peer=peer, limits=limits)
    except BaseException:
        sock.close()
        raise
    try:
        if link.recv(timeout_s=max(0.0, deadline - time.monotonic())).head != WELCOME:
            raise BadFrame(
                f"{peer} did not begin with a welcome: it is no listener of ours, or one that asks "
                "for the run's secret."
            )
    except BaseException:
        link.close()
        raise
    return link
