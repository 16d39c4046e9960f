"""The door of a server: takes connections in, asks who it is, and puts what they say into one inbox.

A connection has a thread that reads it. What a worker says is checked there (see protocol.py): what comes
into the inbox is as it should be. Whoever talks nonsense is told so, and its connection is closed.

Everything is bounded: connections that have not said who they are, what they may hold in memory, and the
words of a worker that nobody has heard yet.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

from manyhands.errors import BadFrame, LinkClosed, LinkError
from manyhands.ps.protocol import (
    ENTER,
    LANE,
    PEER,
    REFUSED,
    Forgotten,
    Nonsense,
    check_first,
    check_said,
    check_told,
)
from manyhands.threads import OnError, start_thread
from manyhands.transport import Link, Listener
from manyhands.transport.refusals import Refusals

logger = logging.getLogger("manyhands.ps")

HELLO_S = 10.0
"""A new connection says who it is within this time, or is dropped."""
MAX_STRANGERS = 64
"""Connections that have not said who they are; one more drops the oldest."""
MAX_UNHEARD = 64
"""Words of a worker in the inbox; it has a handful under way. More are not read until some are heard."""

Refusal = TypeVar("Refusal", bound=LinkError)
Place = Callable[[str, Mapping[str, Any]], memoryview | None]
"""(who, head) to where the payload goes; None: new memory."""


@dataclass(frozen=True)
class InboxItem:
    """Something for the server's thread: what, from whom."""

    kind: str
    who: str
    head: Mapping[str, Any]
    payload: memoryview | None = None
    link: Link | None = None
    """Where it came from: of a first word, and of all that a worker says."""
    by_worker: bool = False
    """Said as a worker, though a member of that name may serve too."""
    heard: Callable[[], None] = lambda: None
    """To be called when it was dealt with."""


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
        self._known = {PEER: set(behind), ENTER: set(workers), LANE: set(workers)}
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
        start_thread(self._read, link, who, PEER, name=name, on_error=self._on_error)

    def drain(self, link: Link, *, timeout_s: float) -> None:
        """Until all that a dead peer ever sent is in the inbox."""
        if (reader := self._readers.get(link)) is not None:
            reader.wait(timeout_s)

    def turn_away(self, link: Link, who: str, why: Nonsense) -> None:
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
            raise _told(link, Nonsense(f"it begins with a payload of {nbytes} bytes"))

        try:
            hello = link.recv(timeout_s=HELLO_S, place=nowhere).head
            line, who = self._identify(hello, link)
        except Nonsense as why:
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
            self.inbox.put(InboxItem(line, who, hello, link=link, by_worker=line != PEER))
            self._read(link, who, line)
        finally:
            self._strangers.pop(link, None)
            self._has_read(link)

    def _identify(self, hello: Mapping[str, Any], link: Link) -> tuple[str, str]:
        line, who = check_first(hello)
        if hello["view"] != self._view:
            raise Nonsense(f"it speaks of view {hello['view']}, not of {self._view}")
        if who not in self._known[line]:
            raise Nonsense(f"it says {line!r} as {who[:80]!r}, whom nobody expects")
        if self._identified and link.peer != who:
            raise Nonsense(f"it says that it is {who!r}, and has the key of {link.peer!r}")
        if (first := self._claimed.setdefault(who, link.peer)) != link.peer:
            raise Nonsense(f"it says that it is {who!r}, who is here already: {first}")
        return line, who

    def _read(self, link: Link, who: str, line: str) -> None:
        try:
            if line == PEER:
                self._read_server(link, who)
            else:
                self._read_worker(link, who, line)
        except LinkClosed as error:
            logger.info("%s no longer hears %s: %s", self.name, who, error)
        except (Nonsense, BadFrame) as why:
            self._refusals.add(f"{who} ({link.peer})", why)
            _part(link, why)
            self._tell_refused(who, why)
        except Exception as error:  # whatever it was, it was not meant for us
            self._drop(link, error)
        self._has_read(link)
        if line == PEER and not self._closed:
            self.inbox.put(InboxItem("torn", who, {}))

    def _has_read(self, link: Link) -> None:
        if (reader := self._readers.pop(link, None)) is not None:
            reader.set()

    def _tell_refused(self, who: str, why: LinkError) -> None:
        if not self._closed and not isinstance(why, Forgotten):
            self._refused(who, str(why))

    def _drop(self, link: Link, error: BaseException) -> None:
        self._refusals.add(link.peer, repr(error))
        link.close()

    def _read_server(self, link: Link, who: str) -> None:
        def place(head: Mapping[str, Any], nbytes: int) -> memoryview | None:
            kind = check_told(head)
            room = self._place(who, head) if kind == "replica" else None
            if kind not in ("block", "replica") or (room is not None and room.nbytes != nbytes):
                raise Nonsense(f"{kind!r} with a payload of {nbytes} bytes")
            return room

        while True:
            message = link.recv(place=place)
            kind = check_told(message.head)
            self.inbox.put(InboxItem(kind, who, message.head, message.payload))

    def _read_worker(self, link: Link, who: str, line: str) -> None:
        def place(head: Mapping[str, Any], nbytes: int) -> memoryview | None:
            try:
                kind = check_said(line, who, head, payload=True)
                room = self._place(who, head)
                if room is None or room.nbytes != nbytes:
                    raise Nonsense(f"{kind!r} with a payload of {nbytes} bytes")
            except Nonsense as why:
                raise _told(link, why) from None
            return room

        unheard = threading.Semaphore(MAX_UNHEARD)
        while True:
            message = link.recv(place=place)
            if message.payload is None:
                check_said(line, who, message.head, payload=False)
            while not unheard.acquire(timeout=1.0):
                if self._closed:
                    return
            kind = str(message.head["k"])
            self.inbox.put(
                InboxItem(kind, who, message.head, message.payload, link, True, unheard.release)
            )


def _part(link: Link, why: LinkError) -> None:
    _told(link, why)
    link.close()


def _told(link: Link, why: Refusal) -> Refusal:
    """`why`, after a word of it: where a payload has no place, recv() closes the link at once."""
    with suppress(LinkError):
        link.send({"k": REFUSED, "why": str(why), "lost": isinstance(why, Forgotten)})
    return why
