"""Links: connections that carry whole messages, for control and for bulk data.

A Listener (listener.py) accepts connections and connect() (connect.py) makes them; both return a Link. A
message is a frozen dataclass (fields.py), with a payload of raw bytes if it needs one. It travels as one
frame:

    magic    4  b"MHND"
    version  1  2
    flags    1  bit 0: a payload follows (so that an empty payload differs from none)
    zero     2  reserved
    head     4  length of the head in bytes
    payload  8  length of the payload in bytes
    ---- 20 bytes, big-endian, then
    the head      the message: a JSON object in UTF-8
    the payload   as it is in memory

Nothing that arrives is unpickled, and a length is compared with its limit before memory is allocated for it.
Memory then grows with what has arrived: a peer that announces a gigabyte and sends nothing costs a megabyte.

A closed connection is the first sign of a death: recv() raises LinkClosed at once. What was sent
before close() arrives, unless the other side was sending at that moment: then TCP may drop it. To be
sure that a last message arrives, let the other side close first.

Cost: 20 bytes and one JSON object per message. A plain link sends a frame with one system call and receives
it with three, the payload straight into its destination; TLS works in records of 16 KiB.
"""

from __future__ import annotations

import contextlib
import json
import select
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from manyhands.errors import BadFrame, LinkClosed, LinkError, LinkTimeout, ProtocolError
from manyhands.transport.fields import MessageSet, encode, to_json
from manyhands.transport.keepalive import watch
from manyhands.transport.tls import RECORD_BYTES, DeadlinePassed, TlsStream, WouldBlock, wait_ready

MAGIC = b"MHND"
VERSION = 2
HEADER = struct.Struct("!4sBBHIQ")
HAS_PAYLOAD = 1
GROW_BYTES = 1 << 20
"""Memory allocated at once for a length that was only announced."""
UNSENT_BYTES = 256 << 10
"""The kernel's send queue of a link that queues little: 2 ms at 1 Gbit/s."""
UNSENT_TLS_BYTES = 2 << 20
"""The same with TLS, where each wake-up costs more."""
WAKE_BYTES = 256 << 10
"""An event loop is woken for this much of a payload at once."""
LAST_S = 0.1
"""Time for which a last message waits for a frame that another thread is sending."""

Payload = bytes | bytearray | memoryview
Place = Callable[[Any, int], memoryview | None]
"""place(message, nbytes) returns the memory for a payload: writable, of exactly nbytes; None: new memory."""


@dataclass(frozen=True)
class Limits:
    """The largest frame that is sent or accepted."""

    head_bytes: int = 1 << 20
    payload_bytes: int = 1 << 30


DEFAULT_LIMITS = Limits()


class Received(NamedTuple):
    message: Any
    """A message of the MessageSet; without one, the JSON object."""
    payload: memoryview | None = None


def pack(
    message: object, payload: Payload | None = None, *, limits: Limits = DEFAULT_LIMITS
) -> list[memoryview]:
    """Encode a frame as buffers to send one after the other. The payload is not copied."""
    # A JSON object is sent as it is.
    head = (to_json(message) if isinstance(message, dict) else encode(message)).encode()
    view = memoryview(b"" if payload is None else payload)
    if len(head) > limits.head_bytes:
        raise LinkError(
            f"A message of {len(head)} bytes is over the limit of {limits.head_bytes}; nothing was "
            "sent. Bulk data belongs in the payload."
        )
    if view.nbytes > limits.payload_bytes:
        raise LinkError(
            f"A payload of {view.nbytes} bytes is over the limit of {limits.payload_bytes}; nothing "
            "was sent. Send it in several messages."
        )
    flags = 0 if payload is None else HAS_PAYLOAD
    header = HEADER.pack(MAGIC, VERSION, flags, 0, len(head), view.nbytes)
    parts = [memoryview(header + head)]
    # A view with a zero in its shape can't be cast, and has nothing to send.
    return [*parts, view.cast("B")] if view.nbytes else parts


def parse_header(data: Payload, limits: Limits) -> tuple[int, int | None]:
    """Return the lengths of head and payload (None: no payload); BadFrame if a field is wrong."""
    magic, version, flags, zero, head_bytes, payload_bytes = HEADER.unpack(data)
    if magic != MAGIC:
        raise BadFrame(f"it starts with {magic!r}, not with {MAGIC!r}")
    if version != VERSION:
        raise BadFrame(
            f"its version is {version}, not {VERSION}: every member needs the same version of manyhands"
        )
    if flags & ~HAS_PAYLOAD or zero:
        raise BadFrame(f"unknown flags {flags:#04x} {zero:#06x}")
    if head_bytes > limits.head_bytes:
        raise BadFrame(f"a head of {head_bytes} bytes, over the limit of {limits.head_bytes}")
    if payload_bytes > limits.payload_bytes:
        raise BadFrame(
            f"a payload of {payload_bytes} bytes, over the limit of {limits.payload_bytes}"
        )
    if flags & HAS_PAYLOAD:
        return head_bytes, payload_bytes
    if payload_bytes:
        raise BadFrame(f"a payload of {payload_bytes} bytes that its flags deny")
    return head_bytes, None


def parse_head(data: memoryview) -> dict[str, Any]:
    try:
        head = json.loads(str(data, "utf-8"))
    except (ValueError, RecursionError) as error:  # JSON and UTF-8 errors are ValueErrors
        raise BadFrame(f"its head is not JSON: {error}") from error
    if not isinstance(head, dict):
        raise BadFrame(f"its head is a JSON {type(head).__name__}, not an object")
    return head


class FrameReader:
    """Receives one frame after the other; a frame that is half received is continued by the next call.

    After an invalid frame, each call raises the same error.
    """

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        """Accept no frame larger than this, from the next one on."""
        self.bytes_received = 0
        self.part = ""
        """The part of a frame that is being received, for errors."""
        self._message: Any = None
        self._payload_bytes: int | None = None
        self._await("a frame", HEADER.size)

    def _await(self, part: str, size: int, buffer: memoryview | None = None) -> None:
        self.part, self._size, self._filled = part, size, 0
        self._buffer = memoryview(bytearray(min(size, GROW_BYTES))) if buffer is None else buffer

    def read(
        self,
        recv_into: Callable[[memoryview], int],
        messages: MessageSet | None = None,
        place: Place | None = None,
    ) -> Received:
        """Return the next message. `recv_into` fills some of a buffer; its exceptions pass through. EOFError
        if it returns 0."""
        while True:
            while self._filled < len(self._buffer):
                received = recv_into(self._buffer[self._filled :])
                if not received:
                    raise EOFError
                self._filled += received
                self.bytes_received += received
            if self._filled < self._size:
                larger = memoryview(bytearray(min(self._size, 2 * self._filled)))
                larger[: self._filled] = self._buffer
                self._buffer = larger
            elif self.part == "a frame":
                head_bytes, self._payload_bytes = parse_header(self._buffer, self.limits)
                self._await("a frame's head", head_bytes)
            elif self.part == "a frame's head":
                head = parse_head(self._buffer)
                self._message = head if messages is None else messages.read(head)
                if self._payload_bytes is None:
                    return self._end(None)
                self._await_payload(self._payload_bytes, place)
            else:
                return self._end(self._buffer)

    def _await_payload(self, nbytes: int, place: Place | None) -> None:
        target = place(self._message, nbytes) if place is not None else None
        if target is not None and (target.nbytes != nbytes or target.readonly):
            raise LinkError(
                f"place() gave a {'read-only ' if target.readonly else ''}block of {target.nbytes} "
                f"bytes for a payload of {nbytes}: it must be writable and of that size."
            )
        self._await(
            "a payload", nbytes, target.cast("B") if target is not None and nbytes else None
        )

    def _end(self, payload: memoryview | None) -> Received:
        received = Received(self._message, payload)
        self._message = None
        self._await("a frame", HEADER.size)
        return received

    @property
    def num_missing(self) -> int:
        """Bytes that complete the buffer which is being filled."""
        return len(self._buffer) - self._filled

    @property
    def progress(self) -> str:
        return f"{self._filled} of {self._size} bytes"

    @property
    def between_frames(self) -> bool:
        return self.part == "a frame" and not self._filled


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
        self._reader = FrameReader(limits)
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

    def send(self, message: object, payload: Payload | None = None) -> None:
        """Send one message, whole. Blocks while the other side does not read; close() ends that."""
        self.send_packed(self.pack(message, payload))

    def pack(self, message: object, payload: Payload | None = None) -> list[memoryview]:
        """Encode a message for `send_packed`."""
        return pack(message, payload, limits=self._limits)

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

    def recv(
        self,
        messages: MessageSet | None = None,
        *,
        timeout_s: float | None = None,
        place: Place | None = None,
    ) -> Received:
        """Return the next message, which must be one of `messages`; without them, any JSON object.

        After LinkTimeout call again: a frame that is half received is continued. After ProtocolError the link
        can still send, for example the reason. Any other error closes the link, also one that place() raises.
        `place` is called once per payload, when its message is known.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        with self._in_use():
            try:
                return self._receive(
                    lambda view: self._stream.recv_into(view, deadline), messages, place
                )
            except DeadlinePassed:
                raise LinkTimeout(
                    f"{self.peer} did not send {self._reader.part} within {timeout_s:g} s "
                    f"({self._reader.progress} had come)."
                ) from None

    def _receive(
        self,
        recv_into: Callable[[memoryview], int],
        messages: MessageSet | None,
        place: Place | None,
    ) -> Received:
        if not self._recv_lock.acquire(blocking=False):
            raise RuntimeError(f"Two threads receive from {self.peer} at once; one must.")
        try:
            with self._closed_on_failure():
                return self._reader.read(recv_into, messages, place)
        finally:
            self._recv_lock.release()

    def hold(self, on_close: Callable[[], None] | None = None) -> int:
        """Return the socket's descriptor, which stays open until `release`: otherwise another link could get
        its number. `on_close` is called by close()."""
        with self._state_lock:
            self.check_open()
            self._num_users += 1
            if on_close is not None:
                self._on_close.append(on_close)
            return self._sock.fileno()

    def release(self) -> None:
        with self._state_lock:
            self._num_users -= 1
            if self._closed and not self._num_users:
                self._sock.close()

    # For event loops ----------------------------------------------------------------------------

    @property
    def has_pending(self) -> bool:
        """If true, try_recv() has bytes that poll() does not report."""
        return not self._closed and self._stream.has_pending

    def try_recv(self, messages: MessageSet | None = None, place: Place | None = None) -> Received:
        """Receive like recv(), but raise WouldBlock instead of waiting."""
        self.check_open()
        try:
            received = self._receive(self._stream.try_recv_into, messages, place)
        except WouldBlock:
            self._wake_at(self._reader.num_missing)
            raise
        self._wake_at(1)
        return received

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
        # Before the attempt: the thread that has the lock looks here after it has released it.
        self._when_free = when_free
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

    def send_last(self, message: object) -> None:
        """Send a last message if that is possible at once, and close."""
        with contextlib.suppress(LinkError, WouldBlock), self._in_use():
            if self._send_lock.acquire(timeout=LAST_S):
                try:
                    self.try_send(self.pack(message))
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
        self.hold()
        try:
            yield
        finally:
            self.release()

    def check_open(self) -> None:
        if self._closed:
            raise LinkClosed(f"The link to {self.peer} is closed.")

    @contextlib.contextmanager
    def _closed_on_failure(self) -> Iterator[None]:
        """Close the link after a failure inside a frame: where the next frame starts is unknown."""
        try:
            yield
        except (DeadlinePassed, WouldBlock, ProtocolError):
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
        return f" in the middle of {self._reader.part}: {self._reader.progress} came"

    def __enter__(self) -> Link:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Link to {self.peer}{', closed' if self._closed else ''}>"
