"""The messages that are sent over a link in a fuzz test, and what is watched meanwhile.

A Dialect is what one side of a link may send: a MessageSet, or other classes in an envelope of their own.
`variants` makes all messages to try, `sample` a few of each sort.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import random
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from generator import DEEP, TOO_LONG, Generator, Variant, Vocabulary

from manyhands.errors import ManyhandsError, ProtocolError
from manyhands.threads import on_process_failure
from manyhands.transport import Limits, Link
from manyhands.transport.fields import MessageSet, read
from manyhands.transport.link import HAS_PAYLOAD, HEADER, MAGIC, VERSION, pack

ANSWER_S = 10.0
"""The longest that a peer may take to answer, or to close the connection."""
GREW_BYTES = 256 << 20
"""How much a process may grow."""
NO_LIMITS = Limits(head_bytes=1 << 30, payload_bytes=1 << 40)
STRANGE = "a strange frame"
"""The kind of a variant that is no message at all."""


@dataclass(frozen=True)
class Dialect:
    """What one side of a link may send."""

    name: str
    kinds: Mapping[str, type[Any]]
    accepts: Callable[[Mapping[str, Any]], Any]
    """Reads a message; raises ProtocolError."""
    envelope: Callable[[str], dict[str, Any]] = lambda kind: {"kind": kind}
    """The fields that say what kind a message is."""
    payloads: Mapping[str, Sequence[bytes | None]] = field(default_factory=dict)
    """By kind, payloads that belong to it; the others have none."""
    messages: MessageSet | None = None
    """What is covered by this dialect."""

    @classmethod
    def of(cls, name: str, messages: MessageSet, **options: Any) -> Dialect:
        return cls(name, messages.kinds, messages.read, messages=messages, **options)


def single(name: str, kind: type[Any]) -> Dialect:
    """A class that is read by itself, without a kind."""
    return Dialect(name, {"": kind}, lambda head: read(kind, head), envelope=lambda _: {})


def variants(
    dialect: Dialect, *, seed: int = 0, vocabulary: Vocabulary | None = None, examples: int = 12
) -> Iterator[Variant]:
    """All messages to try: `examples` good ones of each kind, and all broken ones."""
    generator = Generator(seed, vocabulary)
    for name, kind in dialect.kinds.items():
        start = dialect.envelope(name)

        def accepted(fields: Mapping[str, Any], start: dict[str, Any] = start) -> bool:
            try:
                dialect.accepts({**start, **fields})
            except ProtocolError:
                return False
            return True

        payloads = dialect.payloads.get(name, (None,))
        for number in range(examples):
            wild = number / examples
            fields = generator.example(kind, accepted, wild=wild)
            payload = generator.chance.choice(payloads)
            yield Variant(name, "", {**start, **fields}, payload)
        good = generator.example(kind, accepted, wild=0.0)
        for flaw, fields in generator.broken(kind, good):
            if not accepted(fields):
                yield Variant(name, flaw, {**start, **fields}, payloads[0])
        yield Variant(name, "has an unknown field", {**start, **good, "more": 1}, payloads[0])
        yield Variant(
            name, "has a deep unknown field", {**start, **good, "more": DEEP}, payloads[0]
        )
        for payload in (None, b"", bytes(7), bytes(1 << 16)):
            if payload not in payloads:
                yield Variant(
                    name,
                    f"has a wrong payload: {payload and len(payload)}",
                    {**start, **good},
                    payload,
                )
    for flaw, head in (
        ("has no kind", {}),
        ("has an unknown kind", {"kind": "nonsense"}),
        ("has a kind of a wrong type", {"kind": [1]}),
        ("has a kind that is an object", {"kind": {"kind": "x"}}),
        ("has a kind that is too long", {"kind": TOO_LONG}),
        ("has the kind null", {"kind": None}),
    ):
        yield Variant(STRANGE, flaw, head)


def sample(all_variants: Iterable[Variant], *, each: int, seed: int = 0) -> list[Variant]:
    """At most `each` good and `each` broken messages of every kind, of as many sorts of flaws as possible."""
    chance = random.Random(seed)
    by_kind: dict[tuple[str, bool], dict[str, list[Variant]]] = defaultdict(
        lambda: defaultdict(list)
    )
    for variant in all_variants:
        by_kind[variant.kind, bool(variant.flaw)][variant.flaw].append(variant)
    chosen = []
    for flaws in by_kind.values():
        sorts = list(flaws)
        chance.shuffle(sorts)
        few = [chance.choice(flaws[sort]) for sort in sorts[:each]]
        if not sorts[0]:
            few = flaws[""][:: max(1, len(flaws[""]) // each)][:each]
        chosen += few
    return chosen


def frame(variant: Variant) -> list[memoryview]:
    """The message as bytes."""
    return pack(variant.head, variant.payload, limits=NO_LIMITS)


def header(head_bytes: int, payload_bytes: int | None = None) -> bytes:
    flags = 0 if payload_bytes is None else HAS_PAYLOAD
    return HEADER.pack(MAGIC, VERSION, flags, 0, head_bytes, payload_bytes or 0)


def strange_frames() -> Iterator[tuple[str, bytes]]:
    """Bytes that are no message: what is wrong, and the frame."""
    for name, head in {
        "a list": b"[]",
        "a number": b"1",
        "no JSON": b"{",
        "no UTF-8": b"\xff\xfe",
        "nothing": b"",
        "an endless nesting": b"[" * 30_000,
        "a nesting of objects": b'{"a":' * 30_000 + b"1" + b"}" * 30_000,
        "a key twice": b'{"kind":"x","kind":"y"}',
        "a number of a million digits": b'{"kind":' + b"9" * 60_000 + b"}",
    }.items():
        yield name, header(len(head)) + head
    yield "a huge payload", header(2, 1 << 62) + b"{}"
    yield "a huge head", header((1 << 32) - 1) + bytes(100)
    yield "another version", HEADER.pack(MAGIC, 99, 0, 0, 2, 0) + b"{}"
    yield "noise", random.Random(3).randbytes(64)


def send(link: Link, variant: Variant) -> None:
    link.send_packed(frame(variant))


def send_bytes(link: Link, data: bytes) -> None:
    link.send_packed([memoryview(data)])


# What is watched ------------------------------------------------------------------------------------


def resident_bytes(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return 1024 * int(line.split()[1])
    return 0  # it has ended


class Watched(logging.Handler):
    """Notes what must not happen in this process, and how much processes grow."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.failures: list[str] = []
        self._before: dict[int, int] = {}
        self._grew: dict[int, int] = {}
        self._over = threading.Event()
        self.add(os.getpid())

    def add(self, pid: int) -> None:
        """Watch one more process."""
        self._before[pid] = resident_bytes(pid)

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        if error is not None and not isinstance(error, ManyhandsError):
            self.fail(error)

    def fail(self, error: BaseException) -> None:
        """For errors that reach the `on_error` of a thread."""
        if isinstance(error, ManyhandsError):
            return
        frames = []
        trace = error.__traceback__
        while trace is not None:
            frames.append(f"{trace.tb_frame.f_code.co_filename}:{trace.tb_lineno}")
            trace = trace.tb_next
        self.failures.append(
            f"{type(error).__name__}: {str(error)[:200]} at {' > '.join(frames[-4:])}"
        )

    def run(self) -> None:
        while not self._over.wait(0.05):
            self.look()

    def look(self) -> None:
        for pid, before in list(self._before.items()):
            with contextlib.suppress(OSError):
                self._grew[pid] = max(self._grew.get(pid, 0), resident_bytes(pid) - before)

    def check(self, after: object = "") -> None:
        assert not self.failures, f"{self.failures} after {after}"
        too_much = {
            pid: f"{grew >> 20} MB" for pid, grew in self._grew.items() if grew > GREW_BYTES
        }
        assert not too_much, f"grew by {too_much} after {after}"


@contextlib.contextmanager
def watching() -> Iterator[Watched]:
    """Fail afterwards if anything unexpected was raised in a thread, or a process has grown too much."""
    watched = Watched()
    thread = threading.Thread(target=watched.run)
    hook = threading.excepthook
    threading.excepthook = lambda args: watched.fail(args.exc_value or RuntimeError(args.exc_type))
    on_process_failure(watched.fail)
    logging.getLogger("manyhands").addHandler(watched)
    thread.start()
    try:
        yield watched
        watched.look()
        watched.check()
    finally:
        watched._over.set()
        thread.join()
        logging.getLogger("manyhands").removeHandler(watched)
        on_process_failure(_raise)
        threading.excepthook = hook


def _raise(error: BaseException) -> None:
    raise error


@contextlib.contextmanager
def answered(variant: object) -> Iterator[None]:
    """Fail if what is inside takes too long."""
    began = time.monotonic()
    yield
    took = time.monotonic() - began
    assert took < ANSWER_S, f"took {took:.1f} s: {variant}"


def as_line(variant: Variant) -> str:
    """The message as a line of text."""
    return json.dumps(variant.head)
