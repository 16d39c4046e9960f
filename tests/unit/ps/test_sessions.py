"""Worker sessions: a push is complete when all its parts are, in any order and with any duplicates."""

from __future__ import annotations

import contextlib
import itertools
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from manyhands.errors import LinkClosed, LinkError, ProtocolError
from manyhands.ps.block_store import FlatTensors
from manyhands.ps.blocks import BlockLayout, FlatParameter
from manyhands.ps.policies import Contribution
from manyhands.ps.protocol import GradientSpan, NewVersion, PushMessage
from manyhands.ps.sessions import RemoteSession, WorkerSession
from manyhands.ps.spans import spans_of
from manyhands.transport import Link, Listener, connect
from manyhands.transport.event_loop import DATA_LINKS

LONG_S = 20.0
LAYOUT = BlockLayout.of([FlatParameter("p", 96, 4, dtype="float32")], block_bytes=128)
SPANS = spans_of(LAYOUT, [0, 2])
PUSH = PushMessage(Contribution("w0", 1), 0, 0)


def push(seq: int) -> PushMessage:
    return PushMessage(Contribution("w0", seq), 0, 0)


class Connections:
    """Creates connections and worker sessions on a real socket."""

    def __init__(self, listener: Listener, stack: contextlib.ExitStack) -> None:
        self._listener, self._stack = listener, stack

    def link(self) -> tuple[Link, Link]:
        """Open a connection; returns the server's end and the worker's."""
        worker = self._stack.enter_context(connect(self._listener.address, timeout_s=LONG_S))
        return self._stack.enter_context(self._listener.accept(LONG_S)), worker

    def session(self) -> RemoteSession:
        link, slots = self.link()[0], [FlatTensors.private(LAYOUT) for _ in range(2)]
        session = RemoteSession("w0", link, slots, spans=SPANS, wants=[1, 0])
        self._stack.callback(session.close)
        return session


@pytest.fixture
def connections(tmp_path: Path) -> Iterator[Connections]:
    with contextlib.ExitStack() as stack:
        yield Connections(stack.enter_context(Listener(f"unix:{tmp_path}/g")), stack)


@pytest.mark.parametrize("order", list(itertools.permutations(["head", 0, 1])))
def test_a_push_is_complete_with_its_header_and_all_spans(
    connections: Connections, order: tuple[str | int, ...]
) -> None:
    session = connections.session()
    for what in order[:-1]:
        for _ in range(2):  # sent again after a connection broke
            assert arrive(session, 1, what) is None
    assert arrive(session, 1, order[-1]) == PUSH


def arrive(session: WorkerSession, seq: int, what: str | int) -> object:
    if isinstance(what, str):
        return session.push_arrived(push(seq))
    return session.span_arrived(GradientSpan(seq, 0, what))


def test_two_pushes_may_interleave_and_applied_pushes_are_ignored(connections: Connections) -> None:
    session = connections.session()
    words: list[tuple[int, str | int]] = [(s, w) for s in (1, 2) for w in ("head", 0, 1)]
    random.Random(1).shuffle(words)
    whole = [seq for seq, what in words if arrive(session, seq, what) is not None]
    assert sorted(whole) == [1, 2]
    session.done = 2
    assert all(arrive(session, seq, what) is None for seq, what in words)


def test_inside_a_host_a_push_is_only_a_header(connections: Connections) -> None:
    session = WorkerSession("w0", connections.link()[0], [FlatTensors.private(LAYOUT)])
    assert session.push_arrived(PUSH) == PUSH
    session.done = 1
    assert session.push_arrived(PUSH) is None, "sent again"
    for slot in (1, -1):
        with pytest.raises(ProtocolError):
            session.push_arrived(PushMessage(replace(PUSH.push, seq=2, slot=slot), 0, 0))
    for refused in (
        lambda: session.buffer_for(0, 0),
        lambda: session.span_arrived(GradientSpan(2, 0, 0)),
        lambda: session.add_data_link(connections.link()[0]),
    ):
        with pytest.raises(ProtocolError):
            refused()
    session.close()


def test_a_span_is_received_into_its_slot(connections: Connections) -> None:
    session = connections.session()
    session.buffer_for(1, 1)[:4] = b"\x00\x00\x80\x3f"
    assert float(session.slots[1].block(2)[0]) == 1.0
    assert session.buffer_for(0, 0).nbytes == SPANS[0].numel * 4
    for slot, i in [(2, 0), (-1, 0), (0, 2), (0, -1)]:
        with pytest.raises(ProtocolError):
            session.buffer_for(slot, i)


def test_parameters_are_sent_once_all_data_links_are_open(connections: Connections) -> None:
    session, params = connections.session(), FlatTensors.private(LAYOUT)
    params.block(0).fill_(1.0)
    params.block(2).fill_(2.0)
    session.send_params(3, params)  # no data link yet: parameters are sent when all are open
    far = []
    for number in range(DATA_LINKS):
        near, worker = connections.link()
        far.append(worker)
        assert session.add_data_link(near) == (number == DATA_LINKS - 1)
    session.send_params(4, params)
    heard = []
    for link in far:
        with contextlib.suppress(LinkError):
            while len(heard) < len(SPANS):
                heard.append(link.recv(timeout_s=0.2))
    assert sorted(m.message["span"] for m in heard) == [0, 1]
    for message in heard:
        assert message.message["version"] == 4
        assert message.payload is not None
        first = memoryview(message.payload).cast("f")[0]
        assert first == {0: 1.0, 1: 2.0}[message.message["span"]]


def test_a_reconnect_replaces_the_link_and_keeps_the_byte_count(connections: Connections) -> None:
    session = connections.session()
    near, _ = connections.link()
    session.send(NewVersion(1, 1))
    sent = session.bytes_sent
    assert sent > 0
    old = session.link
    session.enter_again(near)
    assert session.bytes_sent - near.bytes_sent == sent
    with pytest.raises(LinkClosed):
        old.send({})
    assert session.span_arrived(GradientSpan(1, 0, 0)) is None
    session.close()
    session.send(NewVersion(1, 1))  # dropped: the worker is gone, or reconnects and asks again
