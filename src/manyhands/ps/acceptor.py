"""Accepts a server's connections and identifies the peers by their first message.

A link whose first message is accepted gets a reader (sessions.py), which puts what follows into the server's
inbox. A peer that breaks the protocol gets the reason, and its connection is closed.

Everything is bounded: connections without a first message, the memory that they may use, and the messages
of a worker that were not handled yet.
"""

from __future__ import annotations

import logging
import queue
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from manyhands.errors import BadFrame, LinkClosed, LinkError, ManyhandsError, ProtocolError
from manyhands.ps.protocol import (
    OPENINGS,
    EnterView,
    OpenDataLink,
    Opening,
    PeerHello,
    WeightsUnknown,
)
from manyhands.ps.sessions import (
    DataLinkReader,
    Inbox,
    InboxItem,
    PeerReader,
    Place,
    WorkerReader,
    refusal,
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
READERS = {PeerHello: PeerReader, EnterView: WorkerReader, OpenDataLink: DataLinkReader}
TOO_MANY = "too many others have not sent their first message"


@dataclass(frozen=True)
class PeerDisconnected:
    """Put into the inbox when the link to another server is lost."""


class Admission:
    """Members that may connect to a server in a view, by role."""

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
        self._known = {PeerHello: set(later), EnterView: set(workers), OpenDataLink: set(workers)}
        self._claimed: dict[str, str] = {}
        self._identified = identified

    def check(self, hello: Opening, link: Link) -> None:
        sender = hello.sender
        if hello.view != self._view:
            raise ProtocolError(f"it is in view {hello.view}, not in {self._view}")
        if sender not in self._known[type(hello)]:
            raise ProtocolError(f"an unexpected {kind_of(hello)!r} of {sender[:80]!r}")
        if self._identified and link.peer != sender:
            raise ProtocolError(f"it claims to be {sender!r}, and has the key of {link.peer!r}")
        if (first := self._claimed.setdefault(sender, link.peer)) != link.peer:
            raise ProtocolError(f"it claims to be {sender!r}, which is connected already: {first}")


class Acceptor:
    def __init__(
        self,
        name: str,
        listener: Listener,
        admission: Admission,
        *,
        place: Place,
        on_error: OnError,
        refused: Callable[[str, str], None] = lambda peer, why: None,
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

    def read(self, link: Link, peer: str) -> None:
        """Read from a link that this side has made to another server, from now on."""
        connection = self._connections[link] = Connection(self, link)
        connection.identify(PeerHello, peer)
        connection.reader.start()

    def drain(self, link: Link, *, timeout_s: float) -> None:
        """Wait until all messages of a dead peer are in the inbox."""
        if (connection := self._connections.get(link)) is not None:
            connection.reader.ended.wait(timeout_s)

    def turn_away(self, link: Link, peer: str, why: ProtocolError) -> None:
        """Close a link and send the reason, without waiting for the peer."""
        self.refusals.add(peer, why)
        link.send_last(refusal(why))
        self.report_refused(peer, why)

    def close(self) -> None:
        self.closed = True
        self._listener.close()
        self.refusals.close()
        for link in list(self._unidentified):
            link.close()

    def report_refused(self, peer: str, why: ManyhandsError) -> None:
        if not self.closed and not isinstance(why, WeightsUnknown):
            # In a thread of its own: it sends, and may have to wait for that.
            start_thread(
                self._refused, peer, str(why), name=f"{self.name}-refused", on_error=self._on_error
            )

    def identified(self, link: Link) -> bool:
        """Note a link's valid first message. Returns False if the link was dropped before."""
        return self._unidentified.pop(link, self) is None

    def ended(self, link: Link) -> bool:
        """Note the end of a link. Returns whether it was dropped here, in favour of other links."""
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
    """The beginning and the end of one link. In the thread of its event loop."""

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
        self._opened: type[Opening] | None = None
        self._sender = ""

    def identify(self, opened: type[Opening], sender: str) -> None:
        self._opened, self._sender = opened, sender
        inbox, place = self._acceptor.inbox, self._acceptor.place
        READERS[opened](sender, self._link, self.reader, inbox=inbox, place=place)

    def _first(self, received: Received) -> None:
        hello: Opening = received.message
        acceptor = self._acceptor
        acceptor.admission.check(hello, self._link)
        if not acceptor.identified(self._link):
            raise LinkClosed(TOO_MANY)
        self.identify(type(hello), hello.sender)
        by_worker = not isinstance(hello, PeerHello)
        acceptor.inbox.put(InboxItem(hello.sender, hello, link=self._link, by_worker=by_worker))

    def _no_payload(self, message: Any, nbytes: int) -> memoryview | None:
        raise ProtocolError(f"it begins with a payload of {nbytes} bytes")

    def _end(self, error: Exception) -> None:
        acceptor, peer = self._acceptor, self._link.peer
        dropped = acceptor.ended(self._link)
        if self._opened is None:
            acceptor.refusals.add(peer, TOO_MANY if dropped else error)
            return
        if isinstance(error, ProtocolError | BadFrame):
            acceptor.refusals.add(f"{self._sender} ({peer})", error)
            acceptor.report_refused(self._sender, error)
        elif isinstance(error, LinkError):
            logger.info("%s lost the link to %s: %s", acceptor.name, self._sender, error)
        else:
            acceptor.refusals.add(peer, repr(error))
        if self._opened is PeerHello and not acceptor.closed:
            acceptor.inbox.put(InboxItem(self._sender, PeerDisconnected()))
