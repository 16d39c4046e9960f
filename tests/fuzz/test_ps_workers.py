"""A worker sends anything to a parameter server: as its first message, on its link, on its data links."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
from generator import Variant
from ps_group import (
    BAD,
    DATA_LINK,
    ENTER,
    GOOD,
    LONG_S,
    STATISTICS,
    VIEW,
    RunningServer,
    running_server,
)
from variants import (
    ANSWER_S,
    Dialect,
    answered,
    sample,
    send,
    send_bytes,
    strange_frames,
    variants,
    watching,
)

from manyhands.errors import LinkClosed, LinkError
from manyhands.ps.protocol import FROM_DATA_LINK, FROM_WORKER, OPENINGS, TO_WORKER, ViewBegun
from manyhands.transport import Link

SPAN = bytes(4 * 8)
VOCABULARY = {
    "worker": (BAD, BAD, GOOD),
    "sender": (BAD, BAD, GOOD),
    "view": (VIEW,),
    "seq": (1, 2, 3),
    "after": (0, 1),
    "began": (0, 1),
    "slot": (0, 1),
    "span": (0,),
    "seen": (0,),
    "staleness": (0,),
    "slots": ([],),
    "row_grads": ([],),
    "sums": ([],),
    "undo": ([],),
    "bytes": (8,),
}
OPENING = Dialect.of("first messages of a server's connections", OPENINGS)
WORKER = Dialect.of(
    "worker to server",
    FROM_WORKER,
    payloads={
        "Statistics": (STATISTICS,),
        "RowGradients": (bytes(8),),
        "RowsRequest": (bytes(8),),
    },
)
DATA_LINKS = Dialect.of("data link to server", FROM_DATA_LINK, payloads={"GradientSpan": (SPAN,)})
NONSENSE = Variant("nonsense", "is no message", {"kind": "nonsense"})


def serves(at: RunningServer) -> None:
    """The other worker makes a step."""
    at.push(at.client, GOOD)
    at.client.drain()
    at.client.pull()
    at.check()


def ends(link: Link, variant: object) -> None:
    """The other side closes the connection, and does not take long for it."""
    with answered(variant), contextlib.suppress(LinkClosed):
        while True:
            link.recv(timeout_s=ANSWER_S)


def say(link: Link, *all_variants: Variant) -> None:
    with contextlib.suppress(LinkError):
        for variant in all_variants:
            send(link, variant)


def attack(at: RunningServer, dialect: Dialect, these: list[Variant]) -> None:
    for variant in these:
        with at.dial(BAD) as link:
            if dialect is OPENING:
                say(link, variant, NONSENSE)
                ends(link, variant)
                continue
            link.send(ENTER)
            if dialect is WORKER:
                say(link, variant, NONSENSE)
                ends(link, variant)
                continue
            assert isinstance(link.recv(TO_WORKER, timeout_s=LONG_S).message, ViewBegun)
            with at.dial(BAD) as data_link:
                data_link.send(DATA_LINK)
                say(data_link, variant, NONSENSE)
                ends(data_link, variant)


@pytest.mark.parametrize("dialect", [OPENING, WORKER, DATA_LINKS], ids=lambda dialect: dialect.name)
@pytest.mark.parametrize("kind", ["proof", "unix"])
def test_a_worker_sends_anything(dialect: Dialect, kind: str, tmp_path: Path) -> None:
    if dialect is DATA_LINKS and kind == "unix":
        return
    these = sample(variants(dialect, vocabulary=VOCABULARY), each=8)
    with watching() as watched, running_server(kind, tmp_path) as at:
        attack(at, dialect, these)
        watched.check()
        serves(at)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("dialect", [OPENING, WORKER, DATA_LINKS], ids=lambda dialect: dialect.name)
@pytest.mark.parametrize("rounds", [False, True], ids=["async", "sync"])
def test_a_worker_sends_everything(
    dialect: Dialect, rounds: bool, seed: int, tmp_path: Path
) -> None:
    these = list(variants(dialect, seed=seed, vocabulary=VOCABULARY, examples=60))
    with watching() as watched, running_server("proof", tmp_path, rounds=rounds) as at:
        for start in range(0, len(these), 100):
            attack(at, dialect, these[start : start + 100])
            watched.check(these[start])
            if not rounds:
                serves(at)


def test_frames_that_are_no_messages(tmp_path: Path) -> None:
    with watching(), running_server("proof", tmp_path) as at:
        for name, data in strange_frames():
            for entered in (False, True):
                with at.dial(BAD) as link:
                    if entered:
                        link.send(ENTER)
                    with contextlib.suppress(LinkError):
                        send_bytes(link, data)
                    ends(link, name)
        serves(at)
