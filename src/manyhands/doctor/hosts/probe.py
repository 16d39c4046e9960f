"""One host's part: a listener that answers whoever measures it, and the measuring of another host.

What is sent here is worth nothing, and encrypting it would measure the cores: links are authenticated by a
secret of this meeting and plain beyond that. A question is one frame, and so is its answer:

    ping                    pong, with the time of that host's clock
    take (its payload) ...  nothing; then  taken  with the seconds from the first to the last
    give for some seconds   take ...; then  given

Cost: NUM_PINGS round trips, and twice the seconds that are allowed, of a pair.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from manyhands.doctor.hosts.facts import PairFacts
from manyhands.errors import LinkError, LinkTimeout
from manyhands.threads import fail_process, start_timer
from manyhands.transport import Address, Limits, Link, Listener, connect

REACH_S = 3.0
"""How long another host may take to answer at all."""
STUCK_S = 5.0
"""Beyond what was allowed: then the link is closed, whoever waits for it."""
NUM_PINGS = 21
CHUNK = bytes(1 << 18)
LIMITS = Limits(head_bytes=4096, payload_bytes=len(CHUNK))


class Probe:
    """Listens at this host's address. Use as a context manager."""

    def __init__(self, host: str, address: str, secret: str) -> None:
        self._host = host
        self._secret = secret
        self._room = bytearray(len(CHUNK))
        where = str(Address(host=address, port=0))
        self._listener = Listener(where, secret=secret, limits=LIMITS, on_refused=lambda *_: None)
        self.address = self._listener.address
        self._listener.hand_over(self._answer, name="answer", on_error=fail_process)

    def measure(self, other: str, address: str, seconds: float) -> PairFacts:
        try:
            with self._linked(other, address, 2 * seconds) as link:
                delays, ahead = _ping(link)
                there = _push(link, seconds)
                back = self._pull(link, seconds)
        except LinkError as error:
            return PairFacts(self._host, other, trouble=_in_short(error))
        return PairFacts(
            self._host,
            other,
            round_trip_s=delays,
            clock_s=ahead,
            there_bytes_per_s=there,
            back_bytes_per_s=back,
        )

    def reach(self, other: str, address: str) -> str:
        """Why the other host can't be reached; empty if it can."""
        try:
            with self._linked(other, address, 0.0) as link:
                _ask(link, {"kind": "ping"}, "pong")
        except LinkError as error:
            return _in_short(error)
        return ""

    def close(self) -> None:
        self._listener.close()

    def __enter__(self) -> Probe:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @contextmanager
    def _linked(self, other: str, address: str, seconds: float) -> Iterator[Link]:
        name = self._host[:64]
        with connect(
            address, secret=self._secret, name=name, timeout_s=REACH_S, peer=other, limits=LIMITS
        ) as link:
            # A send on a way that is cut blocks, and nothing but closing ends that.
            stuck = start_timer(seconds + STUCK_S, link.close, name="stuck", on_error=fail_process)
            try:
                yield link
            finally:
                stuck.cancel()

    def _pull(self, link: Link, seconds: float) -> float:
        link.send({"kind": "give", "seconds": seconds})
        return self._receive(link)

    def _receive(self, link: Link) -> float:
        """Bytes a second, from the first chunk to the last."""
        first, num_bytes = 0.0, 0
        while True:
            message = link.recv(timeout_s=STUCK_S, place=self._place)
            if message.head.get("kind") != "take":
                break
            if not first:
                first = time.monotonic()  # what came with it came before
            else:
                num_bytes += len(CHUNK)
        took_s = time.monotonic() - first
        return num_bytes / took_s if num_bytes and took_s else 0.0

    def _place(self, _head: object, num_bytes: int) -> memoryview:
        return memoryview(self._room)[:num_bytes]

    def _answer(self, link: Link) -> None:
        with link, suppress(LinkError):
            while True:
                head = link.recv(timeout_s=2 * STUCK_S).head
                match head:
                    case {"kind": "ping"}:
                        link.send({"kind": "pong", "time": time.time()})
                    case {"kind": "takes"}:
                        link.send({"kind": "taken", "bytes_per_s": self._receive(link)})
                    case {"kind": "give", "seconds": float(seconds)}:
                        _send(link, min(seconds, 1.0))
                    case _:
                        return


def _ping(link: Link) -> tuple[float, float]:
    """The median round trip, and what the other clock is ahead, by the fastest one."""
    delays, ahead = [], []
    for _ in range(NUM_PINGS):
        sent, began = time.time(), time.monotonic()
        there = float(_ask(link, {"kind": "ping"}, "pong")["time"])
        delays.append(time.monotonic() - began)
        ahead.append(there - sent - delays[-1] / 2)
    return statistics.median(delays), ahead[delays.index(min(delays))]


def _push(link: Link, seconds: float) -> float:
    link.send({"kind": "takes"})
    _send(link, seconds)
    return float(_answer_of(link, "taken")["bytes_per_s"])


def _send(link: Link, seconds: float) -> None:
    # One more than is counted: the first begins the time.
    deadline = time.monotonic() + seconds
    link.send({"kind": "take"}, CHUNK)
    while True:
        link.send({"kind": "take"}, CHUNK)
        if time.monotonic() > deadline:
            break
    link.send({"kind": "given"})


def _ask(link: Link, head: dict[str, Any], kind: str) -> dict[str, Any]:
    link.send(head)
    return _answer_of(link, kind)


def _answer_of(link: Link, kind: str) -> dict[str, Any]:
    head = link.recv(timeout_s=STUCK_S).head
    if head.get("kind") != kind:
        link.close()
        raise LinkError(f"{link.peer} answered something else.")
    return head


def _in_short(error: LinkError) -> str:
    cause = error.__cause__
    if isinstance(error, LinkTimeout) and cause is not None:
        return str(getattr(cause, "strerror", None) or cause)
    return str(error).rstrip(".")
