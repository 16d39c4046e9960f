"""Measures the network between two hosts: round trips, bandwidth both ways, and the difference of clocks.

Each host has a Probe, which listens and answers, and measures other hosts on request. The data sent is
meaningless, and encrypting it would measure the cores, so links are authenticated by a secret of this
measurement and otherwise plain. Messages on them:

    ping                     answered by pong, with the time of that host's clock
    upload, then chunks      answered by uploaded, with the bandwidth that the receiver measured
    download, for a time     answered by chunks, then chunks_end

Cost per pair: NUM_PINGS round trips, and twice the seconds allowed.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TypeVar

from manyhands.errors import LinkError, LinkTimeout, ManyhandsError, ProtocolError
from manyhands.hosts.host_facts import PairFacts
from manyhands.threads import fail_process, start_timer
from manyhands.transport import Address, Limits, Link, Listener, connect
from manyhands.transport.fields import Finite, MessageSet, Seconds

T = TypeVar("T")

REACH_S = 3.0
"""Time limit for another host's answer."""
STUCK_S = 5.0
"""Time by which a measurement may exceed its allowed time before its link is closed."""
MAX_S = 1.0
"""Longest download that another host may ask for."""
NUM_PINGS = 21
CHUNK = bytes(1 << 18)
LIMITS = Limits(head_bytes=4096, payload_bytes=len(CHUNK))


@dataclass(frozen=True)
class Ping:
    pass


@dataclass(frozen=True)
class Pong:
    time: Finite


@dataclass(frozen=True)
class Upload:
    pass


@dataclass(frozen=True)
class Uploaded:
    bytes_per_s: Finite


@dataclass(frozen=True)
class Download:
    seconds: Seconds


@dataclass(frozen=True)
class Chunk:
    """Its payload is the data."""


@dataclass(frozen=True)
class ChunksEnd:
    pass


PROBE = MessageSet(Ping, Pong, Upload, Uploaded, Download, Chunk, ChunksEnd)
"""The messages between two probes, in both directions."""


class Probe:
    """One host's end of the measurements; listens at the host's address. Use as a context manager."""

    def __init__(self, host: str, address: str, secret: str) -> None:
        self._host = host
        self._secret = secret
        self._buffer = bytearray(len(CHUNK))
        endpoint = str(Address(host=address, port=0))
        self._listener = Listener(
            endpoint, secret=secret, limits=LIMITS, on_refused=lambda *_: None
        )
        self.address = self._listener.address
        self._listener.hand_over(self._answer, name="answer", on_error=fail_process)

    def measure(self, other: str, address: str, seconds: float) -> PairFacts:
        """Measure the connection to another host. With 0 seconds, only see whether it can be reached."""
        try:
            with self._linked(other, address, 2 * seconds) as link:
                if not seconds:
                    _ask(link, Ping(), Pong)
                    return PairFacts(self._host, other)
                delay_s, ahead_s = _ping(link)
                return PairFacts(
                    self._host,
                    other,
                    round_trip_s=delay_s,
                    clock_s=ahead_s,
                    there_bytes_per_s=_push(link, seconds),
                    back_bytes_per_s=self._pull(link, seconds),
                )
        except (ManyhandsError, ValueError) as error:
            return PairFacts(self._host, other, trouble=_reason(error))

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
            # A send over a cut connection blocks, and only closing the link ends it.
            stuck = start_timer(seconds + STUCK_S, link.close, name="stuck", on_error=fail_process)
            try:
                yield link
            finally:
                stuck.cancel()

    def _pull(self, link: Link, seconds: float) -> float:
        link.send(Download(seconds))
        return self._receive(link)

    def _receive(self, link: Link) -> float:
        """Read chunks to their end; bytes per second, from the first chunk to the last."""
        first, num_bytes = 0.0, 0
        while True:
            received = link.recv(PROBE, timeout_s=STUCK_S, place=self._place)
            if not isinstance(received.message, Chunk):
                break
            if not first:
                first = time.monotonic()  # the first chunk itself was sent before
            else:
                num_bytes += len(CHUNK)
        took_s = time.monotonic() - first
        return num_bytes / took_s if num_bytes and took_s else 0.0

    def _place(self, _message: object, num_bytes: int) -> memoryview:
        return memoryview(self._buffer)[:num_bytes]

    def _answer(self, link: Link) -> None:
        with link, suppress(LinkError, ProtocolError):
            while True:
                match link.recv(PROBE, timeout_s=2 * STUCK_S).message:
                    case Ping():
                        link.send(Pong(time.time()))
                    case Upload():
                        link.send(Uploaded(self._receive(link)))
                    case Download(seconds):
                        _send_chunks(link, min(seconds, MAX_S))
                    case _:
                        return


def _ping(link: Link) -> tuple[float, float]:
    """Measure the median round trip, and how far the other clock is ahead, by the fastest one."""
    delays, ahead = [], []
    for _ in range(NUM_PINGS):
        sent, began = time.time(), time.monotonic()
        there = _ask(link, Ping(), Pong).time
        delays.append(time.monotonic() - began)
        ahead.append(there - sent - delays[-1] / 2)
    return statistics.median(delays), ahead[delays.index(min(delays))]


def _push(link: Link, seconds: float) -> float:
    link.send(Upload())
    _send_chunks(link, seconds)
    return _receive_one(link, Uploaded).bytes_per_s


def _send_chunks(link: Link, seconds: float) -> None:
    # One more than is counted: the receiver's clock starts with the first.
    deadline = time.monotonic() + seconds
    link.send(Chunk(), CHUNK)
    while True:
        link.send(Chunk(), CHUNK)
        if time.monotonic() > deadline:
            break
    link.send(ChunksEnd())


def _ask(link: Link, message: object, kind: type[T]) -> T:
    link.send(message)
    return _receive_one(link, kind)


def _receive_one(link: Link, kind: type[T]) -> T:
    message = link.recv(PROBE, timeout_s=STUCK_S).message
    if not isinstance(message, kind):
        raise ProtocolError(f"{link.peer} sent an unexpected answer")
    return message


def _reason(error: Exception) -> str:
    cause = error.__cause__
    if isinstance(error, LinkTimeout) and cause is not None:
        return str(getattr(cause, "strerror", None) or cause)
    return str(error).rstrip(".")
