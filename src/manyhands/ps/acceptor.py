"""Accepts a server's connections, identifies the peers, and puts their messages into one inbox.

Each message is parsed when it arrives (see protocol.py), in the thread of an event loop: the inbox has only
well-formed ones. A peer that breaks the protocol is told why, and its connection is closed.

Everything is bounded: connections without a first message, the memory that they may use, and the messages
of a worker that were not handled yet.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from manyhands.errors import BadFrame, LinkClosed, LinkError, ManyhandsError, ProtocolError
from manyhands.ps.protocol import (
    BETWEEN_SERVERS,
    FROM_LANE,
    FROM_WORKER,
    OPENINGS,
    EnterView,
    Opening,
    OpenLane,
    PeerHello,
    Refused,
    ReplicaSum,
    TensorMessage,
    WeightsUnknown,
    check_worker_message,
)
from manyhands.threads import OnError, start_thread
from manyhands.transport import Link, Listener, Received
from manyhands.transport.event_loop import LinkReader
from manyhands.transport.fields import kind_of
from manyhands.transport.refusals import Refusals

logger = logging.getLogger("manyhands.ps")

HELLO_S = 10.0
"""A new connection sends its first message within this time, or is dropped."""
MAX_UNIDENTIFIED = 64
"""Connections without a first message; one more drops the oldest."""
MAX_UNHEARD = 64
"""Messages of one connection in the inbox; a worker has a handful in flight. No more are read until some
were handled."""

Place = Callable[[str, Any], memoryview | None]
"""(sender, message) to where the payload goes; None: new memory."""


@dataclass(frozen=True)
class PeerDisconnected:
    """Put into the inbox when the link to another server is lost."""


@dataclass(frozen=True)
class InboxItem:
    """Something for the server's thread: a message and its sender."""

    who: str
    message: Any
    """One of protocol.py, or one that this process puts in itself."""
    payload: memoryview | None = None
    link: Link | None = None
    """Where it came from: of a first message, and of all messages of workers."""
    by_worker: bool = False
    """If true, it came over a worker's connection; a member of that name may be a server too."""
    heard: Callable[[], None] = lambda: None
    """To be called when it was handled."""


Inbox = queue.SimpleQueue[InboxItem | None]


class Admission:
    """Which members may connect to a server in a view, and as what."""

    def __init__(
        self,
        name: str,
        *,
        view: int,
        servers: Sequence[str],
        workers: Sequence[str],
        identified: bool,
    ) -> None:
        """If `identified` is true, the peer of a link is the owner of its key, and nobody can claim another
        name. Otherwise it is a process, and the first process that claims a name keeps it."""
        self._view = view
        later = servers[servers.index(name) + 1 :]  # this server dials those before it
        self._known = {PeerHello: set(later), EnterView: set(workers), OpenLane: set(workers)}
        self._claimed: dict[str, str] = {}
        self._identified = identified

    def check(self, hello: Opening, link: Link) -> None:
        who = hello.sender
        if hello.view != self._view:
            raise ProtocolError(f"it is in view {hello.view}, not in {self._view}")
        if who not in self._known[type(hello)]:
            raise ProtocolError(f"an unexpected {kind_of(hello)!r} of {who[:80]!r}")
        if self._identified and link.peer != who:
            raise ProtocolError(f"it claims to be {who!r}, and has the key of {link.peer!r}")
        if (first := self._claimed.setdefault(who, link.peer)) != link.peer:
            raise ProtocolError(f"it claims to be {who!r}, which is connected already: {first}")


class Acceptor:
    def __init__(
        self,
        name: str,
        listener: Listener,
        admission: Admission,
        *,
        place: Place,
        on_error: OnError,
        refused: Callable[[str, str], None] = lambda who, why: None,
    ) -> None:
        """`on_error`: called when no connection can be accepted any more. `refused(peer, why)`: called when
        the link to a member was closed because of its messages."""
        self.name = name
        self.inbox: Inbox = queue.SimpleQueue()
        self.admission, self.place = admission, place
        self.refusals = Refusals(logger, name)
        self.closed = False
        self._listener = listener
        self._connections: dict[Link, Connection] = {}
        """Those that are being read."""
        self._unidentified: dict[Link, None] = {}
        """The oldest first."""
        self._on_error, self._refused = on_error, refused
        start_thread(self._accept, name=f"{name}-accept", on_error=on_error)

    def read(self, link: Link, who: str) -> None:
        """Read from a link that this side has made to another server, from now on."""
        connection = self._connections[link] = Connection(self, link)
        connection.identify(PeerHello, who)
        connection.reader.start()

    def drain(self, link: Link, *, timeout_s: float) -> None:
        """Wait until all that a dead peer has sent is in the inbox."""
        if (connection := self._connections.get(link)) is not None:
            connection.reader.ended.wait(timeout_s)

    def turn_away(self, link: Link, who: str, why: ProtocolError) -> None:
        """Close a link and tell the peer why, without waiting for it."""
        self.refusals.add(who, why)
        refuse(link, why)
        self.tell_refused(who, why)

    def close(self) -> None:
        self.closed = True
        self._listener.close()
        self.refusals.close()
        for link in list(self._unidentified):
            link.close()

    def tell_refused(self, who: str, why: ManyhandsError) -> None:
        if not self.closed and not isinstance(why, WeightsUnknown):
            # In a thread of its own: it sends, and may have to wait for that.
            start_thread(
                self._refused, who, str(why), name=f"{self.name}-refused", on_error=self._on_error
            )

    def identified(self, link: Link) -> bool:
        """The link has sent a good first message; False if it was dropped before."""
        return self._unidentified.pop(link, self) is None

    def ended(self, link: Link) -> bool:
        """The link is not read any more. Returns whether it was dropped here, for having been silent too
        long."""
        was_unidentified = self.identified(link)
        self._connections.pop(link, None)
        return not was_unidentified and not self.closed

    def _accept(self) -> None:
        while True:
            try:
                link = self._listener.accept()
            except LinkClosed:
                return
            while len(waiting := list(self._unidentified)) >= MAX_UNIDENTIFIED:
                self._unidentified.pop(waiting[0], None)
                waiting[0].close()
            self._unidentified[link] = None
            connection = self._connections[link] = Connection(self, link)
            connection.reader.start(first_within_s=HELLO_S)


class Connection:
    """Puts the messages of one link into the inbox. In the thread of its event loop."""

    def __init__(self, acceptor: Acceptor, link: Link) -> None:
        self.reader = LinkReader(
            link,
            OPENINGS,
            on_message=self._first,
            on_end=self._end,
            place=self._no_payload,
            refusal=refusal,
        )
        self._acceptor, self._link = acceptor, link
        self._who = ""
        self._opened: type[Opening] | None = None
        self._num_unheard = 0
        self._lock = threading.Lock()

    def identify(self, opened: type[Opening], who: str) -> None:
        self._opened, self._who = opened, who
        if opened is PeerHello:
            self.reader.handle_with(BETWEEN_SERVERS, self._server_message, self._server_place)
        else:
            messages = FROM_WORKER if opened is EnterView else FROM_LANE
            self.reader.handle_with(messages, self._worker_message, self._worker_place)

    def _first(self, received: Received) -> None:
        hello: Opening = received.message
        self._acceptor.admission.check(hello, self._link)
        if not self._acceptor.identified(self._link):
            raise LinkClosed("too many others have not sent their first message")
        self.identify(type(hello), hello.sender)
        by_worker = not isinstance(hello, PeerHello)
        item = InboxItem(hello.sender, hello, link=self._link, by_worker=by_worker)
        self._acceptor.inbox.put(item)

    def _no_payload(self, message: Any, nbytes: int) -> memoryview | None:
        raise ProtocolError(f"it begins with a payload of {nbytes} bytes")

    def _server_place(self, message: Any, nbytes: int) -> memoryview | None:
        has_place = isinstance(message, ReplicaSum)
        memory = self._acceptor.place(self._who, message) if has_place else None
        wrong_size = memory is not None and memory.nbytes != nbytes
        if not isinstance(message, ReplicaSum | TensorMessage) or wrong_size:
            raise ProtocolError(f"{kind_of(message)!r} with a payload of {nbytes} bytes")
        return memory

    def _server_message(self, received: Received) -> None:
        self._acceptor.inbox.put(InboxItem(self._who, received.message, received.payload))

    def _worker_place(self, message: Any, nbytes: int) -> memoryview | None:
        check_worker_message(message, self._who, payload=True)
        memory = self._acceptor.place(self._who, message)
        if memory is None or memory.nbytes != nbytes:
            raise ProtocolError(f"{kind_of(message)!r} with a payload of {nbytes} bytes")
        return memory

    def _worker_message(self, received: Received) -> None:
        message, payload = received
        if payload is None:
            check_worker_message(message, self._who, payload=False)
        with self._lock:
            self._num_unheard += 1
            full = self._num_unheard >= MAX_UNHEARD
        item = InboxItem(self._who, message, payload, self._link, True, self._heard)
        self._acceptor.inbox.put(item)
        if full:
            self.reader.pause()

    def _heard(self) -> None:
        """In the server's thread."""
        with self._lock:
            self._num_unheard -= 1
            was_full = self._num_unheard == MAX_UNHEARD - 1
        if was_full:
            self.reader.resume()

    def _end(self, error: Exception) -> None:
        acceptor, peer = self._acceptor, self._link.peer
        dropped = acceptor.ended(self._link)
        if self._opened is None:
            reason = "too many others have not sent their first message" if dropped else error
            acceptor.refusals.add(peer, reason)
            return
        if isinstance(error, ProtocolError | BadFrame):
            acceptor.refusals.add(f"{self._who} ({peer})", error)
            acceptor.tell_refused(self._who, error)
        elif isinstance(error, LinkError):
            logger.info("%s no longer hears %s: %s", acceptor.name, self._who, error)
        else:
            acceptor.refusals.add(peer, repr(error))
        if self._opened is PeerHello and not acceptor.closed:
            acceptor.inbox.put(InboxItem(self._who, PeerDisconnected()))


def refusal(why: ManyhandsError) -> Refused:
    return Refused(str(why), isinstance(why, WeightsUnknown))


def refuse(link: Link, why: ManyhandsError) -> None:
    """Close a link, telling the peer why if that is possible without waiting."""
    link.send_last(refusal(why))
