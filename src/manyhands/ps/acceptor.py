"""Accepts a server's connections, identifies the peers, and puts their messages into one inbox.

A connection has a thread that reads it and parses each message (see protocol.py): the inbox has only
well-formed ones. A peer that breaks the protocol is told why, and its connection is closed.

Everything is bounded: connections without a first message, the memory that they may use, and the messages
of a worker that were not handled yet.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

from manyhands.errors import BadFrame, LinkClosed, LinkError, ManyhandsError, ProtocolError
from manyhands.ps.protocol import (
    BETWEEN_SERVERS,
    FROM_LANE,
    FROM_WORKER,
    OPENINGS,
    TO_WORKER,
    EnterView,
    Opening,
    OpenLane,
    PeerHello,
    Refused,
    ReplicaSum,
    TensorMessage,
    WeightsUnknown,
    kind_of,
    parse_worker_message,
)
from manyhands.threads import OnError, start_thread
from manyhands.transport import Link, Listener
from manyhands.transport.fields import MessageSet
from manyhands.transport.refusals import Refusals

logger = logging.getLogger("manyhands.ps")

HELLO_S = 10.0
"""A new connection says who it is within this time, or is dropped."""
MAX_STRANGERS = 64
"""Connections that have not said who they are; one more drops the oldest."""
MAX_UNHEARD = 64
"""Words of a worker in the inbox; it has a handful under way. More are not read until some are heard."""

Refusal = TypeVar("Refusal", bound=ManyhandsError)
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


class Acceptor:
    def __init__(
        self,
        name: str,
        listener: Listener,
        *,
        view: int,
        servers: Sequence[str],
        workers: Sequence[str],
        identified: bool,
        place: Place,
        on_error: OnError,
        refused: Callable[[str, str], None] = lambda who, why: None,
    ) -> None:
        """`identified`: the peer of a link is who its key says, so nobody can speak for another.
        Otherwise it is a process, and the first one that says a name has it. `on_error`: called if nobody
        can be let in any more, or a server that was heard no longer is. `refused`: told of a member whose
        link was closed for what it said, and why."""
        self.name = name
        self.inbox: Inbox = queue.SimpleQueue()
        self._listener = listener
        self._view = view
        behind = servers[servers.index(name) + 1 :]  # those before it are called from here
        self._known = {PeerHello: set(behind), EnterView: set(workers), OpenLane: set(workers)}
        self._claimed: dict[str, str] = {}
        self._identified = identified
        self._place = place
        self._closed = False
        self._readers: dict[Link, threading.Event] = {}
        """Set when all that came by a link is in the inbox. Made before its thread, which removes it."""
        self._strangers: dict[Link, None] = {}
        self._on_error, self._refused = on_error, refused
        self._refusals = Refusals(logger, name)
        start_thread(self._accept, name=f"{name}-accept", on_error=on_error)

    def read(self, link: Link, who: str) -> None:
        """Read from a link to another server that this side has made, from now on."""
        name = f"{self.name}-reads-{who}"
        self._readers[link] = threading.Event()
        start_thread(self._read, link, who, PeerHello, name=name, on_error=self._on_error)

    def drain(self, link: Link, *, timeout_s: float) -> None:
        """Until all that a dead peer ever sent is in the inbox."""
        if (reader := self._readers.get(link)) is not None:
            reader.wait(timeout_s)

    def turn_away(self, link: Link, who: str, why: ProtocolError) -> None:
        """Close a link, with a word why; does not wait for the one who is told."""
        self._refusals.add(who, why)
        name = f"{self.name}-parts"
        start_thread(_part, link, why, name=name, on_error=lambda error: self._drop(link, error))
        self._tell_refused(who, why)

    def close(self) -> None:
        self._closed = True
        self._listener.close()
        self._refusals.close()
        for link in list(self._strangers):
            link.close()

    def _accept(self) -> None:
        while True:
            try:
                link = self._listener.accept()
            except LinkClosed:
                return
            strangers = list(self._strangers)
            if len(strangers) >= MAX_STRANGERS:
                self._strangers.pop(strangers[0], None)
                strangers[0].close()
            self._strangers[link] = None
            self._readers[link] = threading.Event()
            start_thread(self._welcome, link, name=f"{self.name}-reads", on_error=self._on_error)

    def _welcome(self, link: Link) -> None:
        def nowhere(head: Mapping[str, Any], nbytes: int) -> memoryview | None:
            raise _told(link, ProtocolError(f"it begins with a payload of {nbytes} bytes"))

        try:
            hello: Opening = OPENINGS.read(link.recv(timeout_s=HELLO_S, place=nowhere).head)
            who = self._identify(hello, link)
        except ProtocolError as why:
            self._refusals.add(link.peer, why)
            _part(link, why)
        except LinkError as error:
            dropped = link not in self._strangers and not self._closed
            reason = "too many others have not said who they are" if dropped else error
            self._refusals.add(link.peer, reason)
            link.close()
        except Exception as error:  # of its first message: nobody depends on it yet
            self._drop(link, error)
        else:
            self._strangers.pop(link, None)
            by_worker = not isinstance(hello, PeerHello)
            self.inbox.put(InboxItem(who, hello, link=link, by_worker=by_worker))
            self._read(link, who, type(hello))
        finally:
            self._strangers.pop(link, None)
            self._has_read(link)

    def _identify(self, hello: Opening, link: Link) -> str:
        who = hello.sender
        if hello.view != self._view:
            raise ProtocolError(f"it is in view {hello.view}, not in {self._view}")
        if who not in self._known[type(hello)]:
            raise ProtocolError(f"an unexpected {kind_of(hello)!r} of {who[:80]!r}")
        if self._identified and link.peer != who:
            raise ProtocolError(f"it claims to be {who!r}, and has the key of {link.peer!r}")
        if (first := self._claimed.setdefault(who, link.peer)) != link.peer:
            raise ProtocolError(f"it claims to be {who!r}, which is connected already: {first}")
        return who

    def _read(self, link: Link, who: str, opened: type[Opening]) -> None:
        try:
            if opened is PeerHello:
                self._read_server(link, who)
            else:
                self._read_worker(link, who, FROM_WORKER if opened is EnterView else FROM_LANE)
        except LinkClosed as error:
            logger.info("%s no longer hears %s: %s", self.name, who, error)
        except (ProtocolError, BadFrame) as why:
            self._refusals.add(f"{who} ({link.peer})", why)
            _part(link, why)
            self._tell_refused(who, why)
        except Exception as error:  # whatever it was, it was not meant for us
            self._drop(link, error)
        self._has_read(link)
        if opened is PeerHello and not self._closed:
            self.inbox.put(InboxItem(who, PeerDisconnected()))

    def _has_read(self, link: Link) -> None:
        if (reader := self._readers.pop(link, None)) is not None:
            reader.set()

    def _tell_refused(self, who: str, why: ManyhandsError) -> None:
        if not self._closed and not isinstance(why, WeightsUnknown):
            self._refused(who, str(why))

    def _drop(self, link: Link, error: BaseException) -> None:
        self._refusals.add(link.peer, repr(error))
        link.close()

    def _read_server(self, link: Link, who: str) -> None:
        parsed: Any = None

        def place(head: Mapping[str, Any], nbytes: int) -> memoryview | None:
            nonlocal parsed
            parsed = BETWEEN_SERVERS.read(head)
            room = self._place(who, parsed) if isinstance(parsed, ReplicaSum) else None
            wrong_size = room is not None and room.nbytes != nbytes
            if not isinstance(parsed, ReplicaSum | TensorMessage) or wrong_size:
                raise ProtocolError(f"{kind_of(parsed)!r} with a payload of {nbytes} bytes")
            return room

        while True:
            message = link.recv(place=place)
            if message.payload is None:
                parsed = BETWEEN_SERVERS.read(message.head)
            self.inbox.put(InboxItem(who, parsed, message.payload))

    def _read_worker(self, link: Link, who: str, messages: MessageSet) -> None:
        parsed: Any = None

        def place(head: Mapping[str, Any], nbytes: int) -> memoryview | None:
            nonlocal parsed
            try:
                parsed = parse_worker_message(messages, who, head, payload=True)
                room = self._place(who, parsed)
                if room is None or room.nbytes != nbytes:
                    raise ProtocolError(f"{kind_of(parsed)!r} with a payload of {nbytes} bytes")
            except ProtocolError as why:
                raise _told(link, why) from None
            return room

        unheard = threading.Semaphore(MAX_UNHEARD)
        while True:
            message = link.recv(place=place)
            if message.payload is None:
                parsed = parse_worker_message(messages, who, message.head, payload=False)
            while not unheard.acquire(timeout=1.0):
                if self._closed:
                    return
            self.inbox.put(InboxItem(who, parsed, message.payload, link, True, unheard.release))


def _part(link: Link, why: ManyhandsError) -> None:
    _told(link, why)
    link.close()


def _told(link: Link, why: Refusal) -> Refusal:
    """`why`, after telling the peer: where a payload has no place, recv() closes the link at once."""
    with suppress(LinkError):
        link.send(TO_WORKER.write(Refused(str(why), isinstance(why, WeightsUnknown))))
    return why
