"""A worker's client: which pushes are pending, what a connection counts, and what it sends again."""

from __future__ import annotations

import threading
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from ps_group import GOOD, SERVER, running_server

from manyhands.errors import LinkError, LinkTimeout
from manyhands.ps.client import (
    Client,
    PendingPushes,
    PushOutcome,
    ServerConnection,
    ServerWaiter,
)
from manyhands.ps.policies import Contribution, StartPermit
from manyhands.ps.protocol import AppliedPush, NewVersion, PullRequest, Rest, ViewBegun


def pushes(*seqs: int, servers: tuple[str, ...] = ("a", "b")) -> PendingPushes:
    pending = PendingPushes(servers)
    for seq in seqs:
        pending.add(Contribution("worker-0", seq, seq % 2, seq), began=0, row_grads={})
    return pending


def begun(*, done: int = 0, late: tuple[int, ...] = ()) -> ViewBegun:
    return ViewBegun(
        version=0,
        ticks=0,
        done=done,
        late=late,
        last=(),
        travels=False,
        placement=cast(Any, None),
        row_placement=None,
        permit=None,
    )


def test_a_push_is_resolved_once_every_server_has_applied_it() -> None:
    pending, outcomes = pushes(1, 2), {}
    pending.resolved = outcomes.__setitem__
    applied = [AppliedPush(1, staleness=3, lr=0.1)]
    pending.apply("a", applied)
    assert pending.holders(lambda push: push.seq == 1) == ["b"]
    assert not outcomes
    pending.apply("b", applied)
    assert outcomes == {1: PushOutcome(staleness=3, lr=0.1)}
    assert pending.holders() == ["a", "b"], "push 2 is pending"
    pending.apply("b", applied)  # reported again
    assert len(outcomes) == 1


def test_a_dropped_push_is_resolved_at_once() -> None:
    pending, outcomes = pushes(1, 2), {}
    pending.resolved = outcomes.__setitem__
    pending.drop([1, 7])
    assert outcomes == {1: PushOutcome(left_out=True)}
    assert set(pending.holders()) == {"a", "b"}


def test_a_slot_is_free_when_its_push_is_resolved() -> None:
    pending = pushes(1, 2)
    pending.drop([1])
    assert not pending.holders(lambda push: push.slot == 1)
    assert pending.holders(lambda push: push.slot == 0) == ["a", "b"]


def test_a_server_that_admits_the_worker_again_gets_the_pushes_that_it_lacks() -> None:
    pending, outcomes = pushes(1, 2, 3), {}
    pending.resolved = outcomes.__setitem__
    assert [push.seq for push in pending.enter("a", begun(done=1))] == [2, 3]
    assert [push.seq for push in pending.enter("b", begun(done=1, late=(2,)))] == [3]
    assert outcomes == {1: PushOutcome(), 2: PushOutcome(left_out=True)}


def test_pushes_too_late_for_their_round_are_released() -> None:
    pending = pushes(1, 2)
    pending.allow(StartPermit(at=2, until=2))
    pending.release()
    assert not pending.holders(lambda push: push.seq == 1 and not push.released)
    assert pending.holders(lambda push: push.seq == 2 and not push.released)
    pending.allow(None)
    assert pending.permit.at == 2


def connection() -> ServerConnection:
    client = SimpleNamespace(
        waiter=ServerWaiter("worker-0", check=lambda: None, timeout_s=1.0),
        handle=lambda server, message, payload: None,
    )
    return ServerConnection("server-0", cast(Client, client))


def link(bytes_sent: int) -> Any:
    return SimpleNamespace(bytes_sent=bytes_sent, close=lambda: None, send=lambda *frame: None)


def test_bytes_sent_do_not_fall_while_a_lost_link_is_replaced() -> None:
    """The coordinator refuses a report of a negative number, and ends the worker that sent it."""
    server = connection()
    counts = []
    for bytes_sent in (100, 0, 7):
        server._link = link(bytes_sent)
        counts.append(server.bytes_sent)
        if bytes_sent:
            server._disconnect()
            counts.append(server.bytes_sent)
    assert counts == [100, 100, 100, 107, 107]


def test_a_request_is_kept_until_it_is_answered_or_forgotten() -> None:
    server = connection()
    server.request(PullRequest())  # without a connection
    server.request(Rest())
    server._handle(NewVersion(1, 1), None)
    assert server.awaits(PullRequest), "news of an update, not the answer"
    server._handle(NewVersion(1, 1, pulled=True), None)
    assert not server.awaits(PullRequest)
    assert server.awaits(Rest)
    server.forget(Rest)
    assert not server.awaits(Rest)


def test_a_wait_ends_with_the_deadline_or_the_loss_of_a_server() -> None:
    waiter = ServerWaiter("worker-0", check=lambda: None, timeout_s=0.01)
    waiter.missing = ["worker-3"]
    with pytest.raises(LinkTimeout, match="for step 3 of a, which waits for worker-3"):
        waiter.wait("step 3", lambda: ["a"])
    waiter.lost["b"] = "it broke the protocol"
    with pytest.raises(LinkError, match=r"lost b \(it broke the protocol\) while waiting"):
        waiter.wait("step 3", lambda: ["b"])
    waiter.wait("step 3", list)
    waiter.fail(ValueError("in another thread"))
    with pytest.raises(ValueError, match="in another thread"):
        waiter.wait("step 3", list)


def test_the_server_that_was_behind_longest_is_the_one_waited_for() -> None:
    waiter = ServerWaiter("worker-0", check=lambda: None, timeout_s=60.0)
    assert waiter.take_longest() == ""
    behind, over = iter([["a", "b", "b"], ["b"], []]), threading.Event()

    def notify() -> None:
        while not over.wait(0.01):
            with waiter.changed:
                waiter.changed.notify_all()

    notifying = threading.Thread(target=notify)
    notifying.start()
    waiter.wait("step 3", lambda: next(behind))
    over.set()
    notifying.join()
    assert waiter.take_longest() == "b"
    assert waiter.take_longest() == "", "each wait counts once"


def test_resting_and_the_next_step(tmp_path: Path) -> None:
    with running_server("proof", tmp_path) as at:
        at.train()
        at.client.rest()
        at.client.rest()
        at.train()


def test_spans_of_an_incomplete_push_are_sent_again(tmp_path: Path) -> None:
    with running_server("proof", tmp_path) as at:
        at.train()
        seq, slot = at.client.begin(rounds=False)
        for buffer in at.slots[GOOD][slot].buffers:
            buffer.fill_(1.0)
        at.client.push_span(SERVER, 0, seq=seq, slot=slot, priority=0)
        for each in at.links:
            each.close()
        push = Contribution(GOOD, seq, slot, seq, share=(1, 2))
        at.client.push(push, began=at.client.version)
        at.client.drain()
        assert at.server.server_state.ledger.counts == {GOOD: 2}


@pytest.mark.parametrize("links_before_the_failure", [None, 0, 1])
def test_links_are_closed_if_connecting_fails_half_way(
    links_before_the_failure: int | None,
) -> None:
    closed: list[int] = []

    class HalfLink:
        """A link over which the peer stops reading."""

        def __init__(self, number: int) -> None:
            self.number = number

        def send(self, message: object, payload: object = None) -> None:
            if links_before_the_failure is None or self.number >= links_before_the_failure:
                raise LinkError("the peer closed the link")

        def __enter__(self) -> HalfLink:
            return self

        def __exit__(self, *unused: object) -> None:
            closed.append(self.number)

    server, dialed = connection(), []

    def dial(name: str) -> HalfLink:
        dialed.append(HalfLink(len(dialed)))
        return dialed[-1]

    client = cast(Any, server._client)
    client.node = SimpleNamespace(dial=dial)
    client.enter = SimpleNamespace(sender="worker-0", view=1)
    for_data_links = links_before_the_failure is not None
    connecting = partial(server._open_data_links, 2) if for_data_links else server.connect
    with pytest.raises(LinkError):
        connecting()
    assert sorted(closed) == [each.number for each in dialed]
