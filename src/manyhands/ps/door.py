"""The door of a server: takes connections in, asks who it is, and puts what they say into one inbox."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from manyhands.errors import LinkError
from manyhands.wire import Link, Listener

logger = logging.getLogger("manyhands.ps")

HELLO_S = 10.0
"""A new connection says who it is within this time, or is dropped."""

Place = Callable[[str, Mapping[str, Any]], memoryview | None]
"""(who, head) to where the payload goes; None: new memory."""


@dataclass(frozen=True)
class Happened:
    """Something for the server's thread: what, from whom."""

    kind: str
    who: str
    head: Mapping[str, Any]
    payload: memoryview | None = None
    link: Link | None = None


Inbox = queue.SimpleQueue[Happened | None]


class Door:
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
    ) -> None:
        """`identified`: the peer of a link is who its key says, so nobody can speak for another."""
        self.name = name
        self.inbox: Inbox = queue.SimpleQueue()
        self._listener = listener
        self._view = view
        self._known = {"peer": set(servers), "enter": set(workers), "lane": set(workers)}
        self._identified = identified
        self._place = place
        self._readers: dict[Link, threading.Thread] = {}
        threading.Thread(target=self._accept, name=f"{name}-accept", daemon=True).start()

    def read(self, link: Link, who: str) -> None:
        """Read from a link that this side has made, from now on."""
        thread = threading.Thread(
            target=self._read, args=(link, who), name=f"{self.name}-reads-{who}", daemon=True
        )
        self._readers[link] = thread
        thread.start()

    def drain(self, link: Link, *, timeout_s: float) -> None:
        """Until all that a dead peer ever sent is in the inbox."""
        if (reader := self._readers.get(link)) is not None:
            reader.join(timeout_s)

    def close(self) -> None:
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                link = self._listener.accept()
            except LinkError:
                return
            thread = threading.Thread(
                target=self._welcome, args=(link,), name=f"{self.name}-reads", daemon=True
            )
            self._readers[link] = thread
            thread.start()

    def _welcome(self, link: Link) -> None:
        try:
            hello = link.recv(timeout_s=HELLO_S).head
            kind, who = self._identify(hello, link)
        except LinkError as error:
            logger.warning("%s refused %s: %s", self.name, link.peer, error)
            link.close()
            return
        self.inbox.put(Happened(kind, who, hello, link=link))
        self._read(link, who)

    def _identify(self, hello: Mapping[str, Any], link: Link) -> tuple[str, str]:
        kind = str(hello.get("k"))
        if hello.get("view") != self._view:
            raise LinkError(f"it speaks of view {hello.get('view')!r}, not of {self._view}")
        who = hello.get("server" if kind == "peer" else "worker")
        if who not in self._known.get(kind, ()):
            raise LinkError(f"it says {kind!r} as {who!r}, who is not in this view")
        if self._identified and link.peer != who:
            raise LinkError(f"it says that it is {who!r}, and has the key of {link.peer!r}")
        return kind, str(who)

    def _read(self, link: Link, who: str) -> None:
        def place(head: Mapping[str, Any], nbytes: int) -> memoryview | None:
            return self._place(who, head)

        try:
            while True:
                message = link.recv(place=place)
                kind = str(message.head.get("k"))
                self.inbox.put(Happened(kind, who, message.head, message.payload))
        except LinkError as error:
            logger.info("%s no longer hears %s: %s", self.name, who, error)
        except Exception as error:  # whatever it was, it was not meant for us
            logger.warning("%s dropped its link to %s: %r", self.name, who, error)
            link.close()
        self._readers.pop(link, None)
