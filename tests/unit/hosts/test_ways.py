"""Before torch connects the workers of a view, they may try whether each reaches each."""

from __future__ import annotations

import dataclasses
import json
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from manyhands.collectives.reachability import Unreachable, check_connections, exchange
from manyhands.errors import PeerLost, ViewChanging
from manyhands.hosts.me import Me
from manyhands.hosts.timeouts import Timeouts
from manyhands.hosts.view import Seat, View
from manyhands.testing.ports import reserve_port

HERE = "127.0.0.1"
VIEW = View(3, tuple(Seat(f"worker-{n}", f"host-{n}") for n in range(3)))


class Board:
    """Hears what a member has to say."""

    def __init__(self) -> None:
        self.sent: list[Any] = []

    def post(self, key: str, value: str) -> None: ...

    def fetch(self, key: str, *, timeout_s: float) -> str:
        raise AssertionError(key)

    def send(self, message: object) -> None:
        self.sent.append(message)


def member(rank: int, **timeouts: float) -> Me:
    limits = dataclasses.replace(Timeouts(), **timeouts)
    seat = VIEW.seats[rank]
    return Me(
        seat.name, seat.host, "cpu", Path(), VIEW, board=Board(), timeouts=limits, address=HERE
    )


@pytest.fixture
def store() -> dist.Store:
    return dist.HashStore()


@pytest.fixture
def closed_port() -> int:
    return reserve_port()


@pytest.fixture
def open_endpoint() -> Iterator[str]:
    with socket.create_server((HERE, 0)) as listener:
        yield f"{HERE} {listener.getsockname()[1]}"


def in_threads(store: dist.Store, members: list[Me]) -> list[BaseException | None]:
    ends: list[BaseException | None] = [None] * len(members)

    def run(number: int) -> None:
        try:
            check_connections(store, members[number], VIEW)
        except (Unreachable, ViewChanging) as error:
            ends[number] = error

    threads = [threading.Thread(target=run, args=(n,)) for n in range(len(members))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return ends


def test_all_reach_each_other(store: dist.Store) -> None:
    assert in_threads(store, [member(rank) for rank in range(3)]) == [None] * 3


def test_one_is_not_reached(store: dist.Store, closed_port: int) -> None:
    store.set("endpoint/2", f"{HERE} {closed_port}")
    store.set("closed/2", "[]")
    ends = in_threads(store, [member(0), member(1)])
    assert all(isinstance(end, Unreachable) for end in ends)
    assert [json.loads(store.get(f"closed/{rank}")) for rank in (0, 1)] == [[2], [2]]
    assert str(closed_port) in str(ends[0])


def test_others_wait_for_a_view_if_two_workers_cannot_connect(
    store: dist.Store, open_endpoint: str
) -> None:
    """A worker that reaches all others reports nothing, and waits for the next view."""
    for rank in (1, 2):
        store.set(f"endpoint/{rank}", open_endpoint)
        store.set(f"closed/{rank}", json.dumps([3 - rank]))
    me = member(0)
    threading.Timer(0.2, lambda: setattr(me, "newest_view", VIEW.number + 1)).start()
    (end,) = in_threads(store, [me])
    assert isinstance(end, ViewChanging)
    assert isinstance(me.board, Board)
    assert not me.board.sent


def test_the_address_in_the_error_tells_which_worker_is_reported() -> None:
    me = member(0)
    me.addresses = {"10.0.0.2": ["worker-1"], "10.0.0.21": ["worker-2"]}
    threading.Timer(0.3, lambda: setattr(me, "newest_view", VIEW.number + 1)).start()
    me.wait_for_a_view(RuntimeError("connection timed out: 10.0.0.21 4711"), grace_s=0.0)
    assert isinstance(me.board, Board)
    assert [message.peer for message in me.board.sent] == ["worker-2"]
    assert me.in_doubt


def test_waiting_for_a_missing_worker_ends(store: dist.Store) -> None:
    store.set("here/1", "")
    with pytest.raises(PeerLost, match="not all workers joined within 0 s"):
        exchange(store, member(0, view_s=0.05), VIEW, "here", "")


def test_a_newer_view_ends_the_exchange(store: dist.Store) -> None:
    me = member(0)
    me.newest_view = VIEW.number + 1
    with pytest.raises(ViewChanging, match="view 4 is coming"):
        exchange(store, me, VIEW, "here", "")
