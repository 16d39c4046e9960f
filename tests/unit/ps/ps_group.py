"""A server in this process behind a real socket, with a valid worker and one that sends invalid messages.

`worker-0` has a valid key and sends invalid messages. `worker-1` is a real client that pushes a step now and
then; only its gradients may be in the weights.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import nn

from manyhands.compute.train_state import TrainState
from manyhands.errors import LinkClosed, LinkError, LinkTimeout
from manyhands.ps.block_store import FlatTensors, ScheduleClock
from manyhands.ps.client import Client, PushOutcome, ServerWaiter
from manyhands.ps.mode import PsMode
from manyhands.ps.model_layout import layout_of
from manyhands.ps.node import PsNode
from manyhands.ps.policies import AsyncPolicy, Contribution, SyncPolicy
from manyhands.ps.protocol import EnterView
from manyhands.ps.server import Server, ServerView
from manyhands.ps.server_state import ServerState, SharedServerState
from manyhands.ps.staleness import Rule
from manyhands.transport import Authority, Limits, Link, Listener, connect
from manyhands.transport.event_loop import DATA_LINKS
from manyhands.transport.fields import write

BAD, GOOD, SERVER = "worker-0", "worker-1", "server-0"
VIEW = 7
SECRET = "the secret of a run"
LIMITS = Limits(head_bytes=1 << 16, payload_bytes=1 << 16)
LR, SHARE = 0.1, 0.5
LONG_S = 20.0
Dial = Callable[[str], Link]


class RunningServer:
    """A server in this process, and how to knock at it."""

    def __init__(self, server: Server, dial: Dial, *, shared: bool, slots: int) -> None:
        self.server = server
        self.dial = dial
        self.layout = server.server_state.layout
        self._shared, self._num_slots = shared, slots
        self.slots: dict[str, list[FlatTensors]] = {}
        self.links: list[Link] = []
        """Of clients."""
        self.outcomes: list[PushOutcome] = []
        """Of all pushes."""
        self.before = [buffer.clone() for buffer in server.server_state.params.buffers]
        self.pushed = 0
        self.client = self.enter(GOOD)

    def enter(self, name: str, *, seen: int = 0) -> Client:
        self.slots[name] = [
            FlatTensors.shared(self.layout, label="test-gradients")
            if self._shared
            else FlatTensors.private(self.layout)
            for _ in range(self._num_slots)
        ]
        shared = self.server.server_state.params
        addresses = [slot.segment.address for slot in self.slots[name] if slot.segment is not None]
        node = SimpleNamespace(
            dial=lambda server: self._dial_for_client(name), refused=lambda peer, why: None
        )
        client = Client(
            EnterView(name, VIEW, addresses, [], seen),
            [SERVER],
            node=cast(PsNode, node),
            params=shared if self._shared else FlatTensors.private(self.layout),
            slots=self.slots[name],
            waiter=ServerWaiter(name, check=self.check, timeout_s=LONG_S),
        )
        client.pushes.resolved = lambda seq, outcome: self.outcomes.append(outcome)
        return client

    def _dial_for_client(self, name: str) -> Link:
        self.links.append(self.dial(name))
        return self.links[-1]

    def check(self) -> None:
        assert self.server.error is None

    def push(self, client: Client, name: str, *, rounds: bool = False, **wrong: Any) -> int:
        client.wait_for_params()
        seq, slot = client.begin(rounds=rounds)
        for buffer in self.slots[name][slot].buffers:
            buffer.fill_(1.0)
        for i in range(len(client.spans.get(SERVER, ()))):
            client.push_span(SERVER, i, seq=seq, slot=slot, priority=i)
        push = Contribution(**push_of(name, seq, slot) | wrong)
        client.push(push, began=client.version)
        return seq

    def train(self) -> None:
        """The good worker makes a step, which is in the weights then, and nothing else is."""
        self.push(self.client, GOOD)
        self.client.drain()
        self.client.pull()
        self.pushed += 1
        self.check()
        assert self.server.server_state.ledger.counts == {GOOD: self.pushed}
        for now, before in zip(self.server.server_state.params.buffers, self.before, strict=True):
            torch.testing.assert_close(now, before - LR * SHARE * self.pushed)

    def say(self, *heads: Mapping[str, Any], payload: bytes | None = None) -> str:
        """Words on one connection of the bad worker, one after the other; why it was refused."""
        with self.dial(BAD) as link:
            return last_words(link, *heads, payload=payload)

    def on_data_link(self, head: Mapping[str, Any], payload: bytes | None) -> str:
        """A word of the bad worker on a data link, after it has entered."""
        with self.dial(BAD) as words:
            words.send(ENTER)
            assert words.recv(timeout_s=LONG_S).message["kind"] == "ViewBegun"
            return self.say(DATA_LINK, head, payload=payload)


def last_words(link: Link, *heads: Mapping[str, Any], payload: bytes | None = None) -> str:
    with contextlib.suppress(LinkError):
        for head in heads[:-1]:
            link.send(head)
        link.send(heads[-1], payload)
    why = ""
    with contextlib.suppress(LinkClosed):
        while True:
            # "begin", the answer to an "enter", is said by another thread: it may come behind a refusal.
            head = link.recv(timeout_s=LONG_S).message
            assert not why or head["kind"] == "ViewBegun", "a refusal is the last word"
            if head["kind"] == "Refused":
                why = head["why"]
    return why


@contextlib.contextmanager
def running_server(
    kind: str, folder: Path, *, rounds: bool = False, lr_rule: Rule = "none"
) -> Iterator[RunningServer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    train_state = TrainState(model, torch.optim.SGD(model.parameters(), lr=LR), loss=lambda m, b: b)
    layout, shared = layout_of(train_state.model, train_state.optimizer), kind == "unix"
    params = (
        FlatTensors.shared(layout, label="test-parameters")
        if shared
        else FlatTensors.private(layout)
    )
    slots = 1 if rounds else 2
    mode = PsMode(
        SyncPolicy if rounds else AsyncPolicy, rounds=rounds, slots=slots, lr_rule=lr_rule
    )
    server_state = (SharedServerState if shared else ServerState)(
        SERVER,
        "here",
        train_state,
        params,
        ScheduleClock(train_state.scheduler),
        replicas=0,
    )
    authority = Authority.create("run") if kind == "tls" else None
    if authority is not None:
        listener = Listener("tcp://127.0.0.1:0", credentials=authority.issue(SERVER), limits=LIMITS)
    elif kind == "proof":
        listener = Listener("tcp://127.0.0.1:0", secret=SECRET, limits=LIMITS)
    else:
        listener = Listener(f"unix:{folder}/s", limits=LIMITS)

    def dial(name: str) -> Link:
        how: dict[str, Any] = {}
        if authority is not None:
            how = {"credentials": authority.issue(name)}
        elif kind == "proof":
            how = {"secret": SECRET, "name": name}
        return connect(listener.address, timeout_s=LONG_S, limits=LIMITS, **how)

    server = Server(
        server_state,
        mode,
        listener,
        ServerView(VIEW, [SERVER], [BAD, GOOD]),
    )
    try:
        server.meet(dial)
        running = RunningServer(server, dial, shared=shared, slots=slots)
        try:
            yield running
            running.check()
        finally:
            running.client.close()
    finally:
        server.freeze()


def push_of(worker: str, seq: int, slot: int) -> dict[str, Any]:
    return write(Contribution(worker, seq, slot, seq, share=(1, 2), loss=0.5))


ENTER = {"kind": "EnterView", "sender": BAD, "view": VIEW, "slots": [], "row_grads": [], "seen": 0}
DATA_LINK = {"kind": "OpenDataLink", "sender": BAD, "view": VIEW}
PUSH = {"kind": "PushMessage", "push": push_of(BAD, 1, 0), "began": 0, "after": 0}
SPAN = {"kind": "GradientSpan", "seq": 1, "slot": 0, "span": 0}
BUFFERS = {"kind": "Statistics", "tag": 1}
WHO = {"kind": "AskMissing", "seq": 1}
PLAIN = [{"kind": kind} for kind in ("Rest", "Wake", "PushesEnd", "PullRequest", "StateRequest")]
WORDS = [PUSH, WHO, BUFFERS, *PLAIN]
"""All messages of a worker, each in a valid form."""

NEVER = [None, True, "1", [], {}, [1], -1, math.nan, math.inf, -math.inf, 10**400]
"""Values that are invalid for every field."""
NEVER_A_COUNT = [*NEVER, 1.0, 1.5, 1 << 60]
STATISTICS = bytes(8 * 5)  # mean and variance of two features, and the number of batches


def without(head: Mapping[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in head.items() if key != name}


def mutated(head: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The word with one field gone, one too many, or one of a wrong type or out of range."""
    yield {**head, "more": 1}
    for name in head.keys() - {"push", "kind"}:
        yield without(head, name)
        for wrong in NEVER_A_COUNT:
            if not (name in ("slots", "row_grads") and wrong == []):
                yield {**head, name: wrong}
    for wrong in NEVER_A_COUNT:
        yield {**head, "kind": wrong}
    if "push" in head:
        yield without(head, "push")
        for wrong in NEVER_A_COUNT:
            yield {**head, "push": wrong}
        for record in mutated_pushes(head["push"]):
            yield {**head, "push": record}


def mutated_pushes(push: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for name in ("worker", "seq"):  # the other fields have defaults
        yield without(push, name)
    for name in push:
        is_amount = name in ("samples", "total", "scale", "lr_factor", "loss")
        for wrong in NEVER if is_amount else NEVER_A_COUNT:
            if not (name == "loss" and wrong == -1):  # a loss may be negative
                yield {**push, name: wrong}
    for share in ([1, 0], [3, 2], [-1, 2], [1, 2, 3], ["1", 2], [1, math.nan], [1 << 60, 1 << 60]):
        yield {**push, "share": share}
    yield {**push, "worker": GOOD}
    yield {**push, "total": 0.0}
    yield {**push, "staleness": 1}
    yield {**push, "scale": 1.5}
    yield {**push, "lr_factor": 0.0}
    yield {**push, "ticks": 1 << 20}


@contextlib.contextmanager
def entered(at: RunningServer) -> Iterator[tuple[Link, list[Link], bytes]]:
    """The bad worker, with its data links; and a run's worth of a gradient."""
    (span,) = at.client.spans[SERVER]
    with contextlib.ExitStack() as stack:
        words = stack.enter_context(at.dial(BAD))
        words.send(ENTER)
        assert words.recv(timeout_s=LONG_S).message["kind"] == "ViewBegun"
        channel = [stack.enter_context(at.dial(BAD)) for _ in range(DATA_LINKS)]
        for data_link in channel:
            data_link.send(DATA_LINK)
        # When all data links are there, the parameters come by one of them.
        for _, data_link in zip(range(400), itertools.cycle(channel), strict=False):
            with contextlib.suppress(LinkTimeout):
                assert data_link.recv(timeout_s=0.05).message["kind"] == "ParameterSpan"
                break
        yield words, channel, bytes(span.numel * 4)
