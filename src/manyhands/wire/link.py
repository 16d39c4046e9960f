"""Links: connections that carry whole messages, for the control connection and for bulk data alike.

An address is `unix:/path/to/socket` or `tcp://host:port`. A Listener takes connections in and
connect() makes one; both give a Link, which sends and receives frames (see frames.py). With
credentials a link is TLS 1.3 with certificates on both sides; without, a unix socket trusts its
owner's user id, and TCP must be asked for with insecure=True.

The listener's side begins with a welcome frame: when connect() returns, the other side has checked
and admitted this one, which a TLS 1.3 client would otherwise learn only from its first read.

A closed connection is the first sign of a death: recv() raises LinkClosed at once. What was sent
before close() arrives, unless the other side was sending at that moment: then TCP may drop it. For
a sure last word let the other side close first.

Cost: a plain link sends a frame with one system call and receives it with three, the payload
straight into its block; TLS works in records of 16 KiB. A Listener has one thread of its own.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import queue
import re
import select
import selectors
import socket
import ssl
import stat
import struct
import threading
import time
from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from manyhands.errors import BadFrame, LinkClosed, LinkError, LinkTimeout, UsageError
from manyhands.wire import frames
from manyhands.wire.frames import DEFAULT_LIMITS, Limits, Message, Payload, Place
from manyhands.wire.tls import Credentials, DeadlinePassed, TlsStream, certificate_name, wait_ready

logger = logging.getLogger("manyhands.wire")

HANDSHAKE_S = 10.0
"""How long a new connection has for its handshake before the listener drops it."""
MAX_HALF_OPEN = 256
"""Connections in their handshake at once; one more drops the oldest."""
RETRY_S = (0.01, 0.5)
"""Shortest and longest pause before connect() tries again."""
MAX_UNIX_PATH = 107
"""The kernel has 108 bytes for the path of a unix socket, one of them for the end."""
WELCOME = {"link": "welcome"}


@dataclass(frozen=True)
class Address:
    path: str = ""
    """Of a unix socket; empty for TCP."""
    host: str = ""
    port: int = 0

    def __str__(self) -> str:
        if self.path:
            return f"unix:{self.path}"
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"tcp://{host}:{self.port}"


def parse_address(text: str) -> Address:
    """The parts of `unix:/path/to/socket` or `tcp://host:port` (port 0: any free one)."""
    if match := re.fullmatch(r"unix:(/[^\0]+)", text):
        path = match[1]
        if len(os.fsencode(path)) > MAX_UNIX_PATH:
            raise UsageError(
                f"The path of the unix socket {path} has {len(os.fsencode(path))} bytes, and the "
                f"kernel allows {MAX_UNIX_PATH}: choose a shorter folder, such as one in /tmp."
            )
        return Address(path=path)
    match = re.fullmatch(r"tcp://(?:\[([^\[\]]+)\]|([^\[\]:/\s]+)):([0-9]{1,5})", text)
    if match and int(match[3]) <= 65535:
        return Address(host=match[1] or match[2], port=int(match[3]))
    raise UsageError(
        f"{text!r} is not an address. Write unix:/path/to/socket (an absolute path) or "
        "tcp://host:port, with an IPv6 host in brackets: tcp://[::1]:5000; ports end at 65535."
    )


class _PlainStream:
    """The bytes of a socket without TLS: blocking, for the kernel takes care of the two threads."""

    def __init__(self, sock: socket.socket) -> None:
        sock.settimeout(None)
        self._sock = sock

    def recv_into(self, view: memoryview, deadline: float | None) -> int:
        if deadline is not None:
            wait_ready(self._sock, select.POLLIN, deadline)
        return self._sock.recv_into(view)

    def send(self, parts: list[memoryview]) -> None:
        while parts:
            sent = self._sock.sendmsg(parts)
            while parts and sent >= len(parts[0]):
                sent -= len(parts.pop(0))
            if sent:
                parts[0] = parts[0][sent:]


class Link:
    """One connection to `peer`. Any thread sends, one at a time receives, any thread closes."""

    def __init__(self, sock: socket.socket, *, peer: str, limits: Limits = DEFAULT_LIMITS) -> None:
        self.peer = peer
        self.bytes_sent = 0
        self.bytes_received = 0
        self._sock = sock
        self._limits = limits
        if sock.family in (socket.AF_INET, socket.AF_INET6):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._stream: TlsStream | _PlainStream = (
            TlsStream(sock) if isinstance(sock, ssl.SSLSocket) else _PlainStream(sock)
        )
        self._send_lock = threading.Lock()
        self._recv_lock = threading.Lock()
        self._state_lock = threading.Lock()
        self._closed = False
        self._num_users = 0
        # The frame that is being received outlives a recv() that timed out.
        self._frame: Generator[frames.Wanted, None, Message] | None = None
        self._wanted = frames.Wanted(memoryview(b""), "")
        self._filled = 0
        self._place: Place | None = None

    def send(self, head: Mapping[str, Any], payload: Payload | None = None) -> None:
        """Send one frame, whole. Blocks while the other side does not read; close() ends that."""
        parts = frames.pack(head, payload, limits=self._limits)
        num_bytes = sum(map(len, parts))
        with self._in_use(), self._send_lock:
            self._check_open()  # whoever held the lock before may have broken off in its frame
            with self._closed_on_failure():
                self._stream.send(parts)
            self.bytes_sent += num_bytes

    def recv(self, *, timeout_s: float | None = None, place: Place | None = None) -> Message:
        """The next message. After LinkTimeout call again: a frame half received goes on from there.

        `place(head, nbytes)` says where the payload goes: a writable block of exactly nbytes, or
        None for a new one. It is asked once a frame, by the recv() in which the head is complete.
        Any other error than LinkTimeout, also one that place() raises, closes the link.
        """
        if not self._recv_lock.acquire(blocking=False):
            raise RuntimeError(f"Two threads receive from {self.peer} at once; one must.")
        try:
            with self._in_use(), self._closed_on_failure():
                self._place = place
                deadline = None if timeout_s is None else time.monotonic() + timeout_s
                try:
                    return self._next_message(deadline)
                except DeadlinePassed:
                    wanted = self._wanted
                    part = f"{self._filled} of {len(wanted.view)} bytes had come"
                    raise LinkTimeout(
                        f"{self.peer} did not send {wanted.what} within {timeout_s:g} s ({part})."
                    ) from None
        finally:
            self._recv_lock.release()

    def _next_message(self, deadline: float | None) -> Message:
        if self._frame is None:
            self._frame = frames.incoming(self._limits, self._ask_place)
            self._wanted, self._filled = next(self._frame), 0
        while True:
            view = self._wanted.view
            while self._filled < len(view):
                got = self._stream.recv_into(view[self._filled :], deadline)
                if not got:
                    raise EOFError
                self._filled += got
                self.bytes_received += got
            try:
                self._wanted, self._filled = next(self._frame), 0
            except StopIteration as end:
                self._frame = None
                message: Message = end.value
                return message

    def _ask_place(self, head: dict[str, Any], nbytes: int) -> memoryview | None:
        return None if self._place is None else self._place(head, nbytes)

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

    @contextlib.contextmanager
    def _in_use(self) -> Iterator[None]:
        """The descriptor stays while a thread is at it: its number could be another link's next."""
        with self._state_lock:
            self._check_open()
            self._num_users += 1
        try:
            yield
        finally:
            with self._state_lock:
                self._num_users -= 1
                if self._closed and not self._num_users:
                    self._sock.close()

    def _check_open(self) -> None:
        if self._closed:
            raise LinkClosed(f"The link to {self.peer} is closed.")

    @contextlib.contextmanager
    def _closed_on_failure(self) -> Iterator[None]:
        """After a failure inside a frame nobody knows where the next one starts: close the link."""
        try:
            yield
        except LinkTimeout:
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
        wanted = self._wanted
        if wanted.what == "a frame" and not self._filled:
            return ""
        return f" in the middle of {wanted.what}: {self._filled} of {len(wanted.view)} bytes came"

    def __enter__(self) -> Link:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Link to {self.peer}{', closed' if self._closed else ''}>"


class Listener:
    """Takes connections in at an address, and hands over those that passed the handshake.

    One thread serves all handshakes step by step, so that a client that stalls in its own holds up
    nobody. `refused` counts the connections that did not pass; each one is logged.
    """

    def __init__(
        self,
        address: str,
        *,
        credentials: Credentials | None = None,
        limits: Limits = DEFAULT_LIMITS,
        backlog: int = 128,
        insecure: bool = False,
    ) -> None:
        where = parse_address(address)
        _check_trust(where, credentials, insecure)
        self.refused = 0
        self._limits = limits
        self._context = credentials.server_context() if credentials else None
        self._sock = _listening_socket(where, backlog)
        port = 0 if where.path else self._sock.getsockname()[1]
        self._where = Address(path=where.path, host=where.host, port=port)
        self.address = str(self._where)
        # Who, and until when; the oldest first.
        self._half_open: dict[ssl.SSLSocket, tuple[str, float]] = {}
        self._ready: queue.SimpleQueue[Link | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._closed = False
        self._wake, self._woken = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._sock, selectors.EVENT_READ)
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._serve, name="manyhands-listener", daemon=True)
        self._thread.start()

    def accept(self, timeout_s: float | None = None) -> Link:
        """The next connection that passed its handshake, from any number of threads."""
        try:
            link = self._ready.get(timeout=timeout_s)
        except queue.Empty:
            raise LinkTimeout(
                f"Nobody connected to {self.address} within {timeout_s:g} s "
                f"({self.refused} refused so far)."
            ) from None
        if link is None:
            self._ready.put(None)  # for the next one who waits
            raise LinkClosed(f"The listener at {self.address} is closed.")
        return link

    def close(self) -> None:
        """Stop listening, drop what was not accepted, remove the unix socket. Idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._wake.close()
            self._thread.join()
            if self._where.path:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(self._where.path)
            for sock in (self._sock, self._woken, *self._half_open):
                sock.close()
            self._selector.close()
            with contextlib.suppress(queue.Empty):
                while link := self._ready.get_nowait():
                    link.close()
            self._ready.put(None)

    def _serve(self) -> None:
        while not self._closed:
            oldest = next(iter(self._half_open.values()), None)
            wait_s = None if oldest is None else max(0.0, oldest[1] - time.monotonic())
            for key, _ in self._selector.select(wait_s):
                if key.fileobj is self._sock:
                    self._take()
                elif isinstance(key.fileobj, ssl.SSLSocket):
                    self._shake(key.fileobj)
            now = time.monotonic()
            for sock in [s for s, (_, until) in self._half_open.items() if until <= now]:
                self._drop(sock, f"no handshake within {HANDSHAKE_S:g} s")

    def _take(self) -> None:
        try:
            sock, origin = self._sock.accept()
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS):
                logger.error("%s can't take a connection in: %s", self.address, error)
                time.sleep(0.1)  # it stays readable until there is room: do not spin
            return
        who = "a local process" if self._where.path else f"{origin[0]}:{origin[1]}"
        try:
            if self._where.path:
                who = f"process {_check_owner(sock)}"
            if self._context is None:
                self._admit(sock, who)
                return
            sock.setblocking(False)
            shaking = self._context.wrap_socket(
                sock, server_side=True, do_handshake_on_connect=False
            )
        except (OSError, ValueError, LinkError) as error:
            self._refuse(sock, who, error)
            return
        if len(self._half_open) >= MAX_HALF_OPEN:
            self._drop(next(iter(self._half_open)), "too many others in their handshake")
        self._half_open[shaking] = (who, time.monotonic() + HANDSHAKE_S)
        self._selector.register(shaking, selectors.EVENT_READ)
        self._shake(shaking)

    def _shake(self, sock: ssl.SSLSocket) -> None:
        if sock not in self._half_open:
            return  # dropped by an event before it in the same round
        try:
            sock.do_handshake()
        except ssl.SSLWantReadError:
            self._selector.modify(sock, selectors.EVENT_READ)
        except ssl.SSLWantWriteError:
            self._selector.modify(sock, selectors.EVENT_WRITE)
        except (OSError, ValueError) as error:
            self._drop(sock, error)
        else:
            self._selector.unregister(sock)
            who, _ = self._half_open.pop(sock)
            try:
                self._admit(sock, certificate_name(sock))
            except (OSError, LinkError) as error:
                self._refuse(sock, who, error)

    def _admit(self, sock: socket.socket, peer: str) -> None:
        link = Link(sock, peer=peer, limits=self._limits)
        link.send(WELCOME)
        self._ready.put(link)

    def _drop(self, sock: ssl.SSLSocket, why: object) -> None:
        self._selector.unregister(sock)
        who, _ = self._half_open.pop(sock)
        self._refuse(sock, who, why)

    def _refuse(self, sock: socket.socket, who: str, why: object) -> None:
        sock.close()
        self.refused += 1
        logger.warning("%s refused a connection from %s: %s", self.address, who, why)

    def __enter__(self) -> Listener:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def connect(
    address: str,
    *,
    credentials: Credentials | None = None,
    timeout_s: float,
    peer: str | None = None,
    limits: Limits = DEFAULT_LIMITS,
    insecure: bool = False,
) -> Link:
    """A link to the listener at `address`, which need not be there yet: tried until `timeout_s`.

    Refused by either side for its certificate or user, it fails at once with LinkError. `peer` is
    who is expected there, for messages; under TLS the link's peer is the certificate's name.
    """
    where = parse_address(address)
    _check_trust(where, credentials, insecure)
    context = credentials.client_context() if credentials else None
    deadline = time.monotonic() + timeout_s
    pause_s, longest_s = RETRY_S
    target = f"{peer} at {address}" if peer else address
    while True:
        try:
            return _connect_once(where, context, deadline, peer or address, limits)
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
            _check_owner(sock)
        elif sock.getsockname() == sock.getpeername():
            # TCP can meet itself when it tries a free local port: nobody listens there.
            raise ConnectionRefusedError(errno.ECONNREFUSED, os.strerror(errno.ECONNREFUSED))
        if context is not None:
            sock = context.wrap_socket(sock)
            peer = certificate_name(sock)
        link = Link(sock, peer=peer, limits=limits)
    except BaseException:
        sock.close()
        raise
    try:
        if link.recv(timeout_s=max(0.0, deadline - time.monotonic())).head != WELCOME:
            raise BadFrame(f"{peer} did not begin with a welcome: it is no listener of ours.")
    except BaseException:
        link.close()
        raise
    return link


def _check_trust(where: Address, credentials: Credentials | None, insecure: bool) -> None:
    if not (where.path or credentials or insecure):
        raise UsageError(
            f"{where} without credentials would be open to everyone in the network. Give "
            "credentials=authority.issue(name), or insecure=True in a network that is private, or "
            "use unix:/path/to/socket within one host."
        )


def _check_owner(sock: socket.socket) -> int:
    """The process id at the other end of a unix socket, which must be of this process's user."""
    kind = struct.Struct("3i")
    pid, uid, _ = kind.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, kind.size))
    if uid != os.getuid():
        raise PermissionError(errno.EPERM, f"process {pid} is of user {uid}, not of {os.getuid()}")
    return int(pid)


def _listening_socket(where: Address, backlog: int) -> socket.socket:
    try:
        if not where.path:
            family = socket.AF_INET6 if ":" in where.host else socket.AF_INET
            sock = socket.create_server((where.host, where.port), family=family, backlog=backlog)
        else:
            sock = _bind_unix(where.path, backlog)
    except OSError as error:
        raise LinkError(f"Can't listen at {where}: {error}.") from error
    sock.setblocking(False)
    return sock


def _bind_unix(path: str, backlog: int) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX)
    try:
        # Before bind: the file is born with these permissions, there is no moment without them.
        os.fchmod(sock.fileno(), 0o600)
        try:
            sock.bind(path)
        except OSError as error:
            if error.errno != errno.EADDRINUSE or not _is_abandoned(path):
                raise
            os.unlink(path)
            sock.bind(path)
        sock.listen(backlog)
    except BaseException:
        sock.close()
        raise
    return sock


def _is_abandoned(path: str) -> bool:
    """Whether the socket at `path` was left by a listener that died without removing it."""
    # The kernel refuses a connection to any file, and only a socket of ours may be removed.
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
