"""Two parameter servers, one of which sends anything while a view begins, and in it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, TypeVar

import pytest
import torch
from generator import Variant
from test_ps_workers import NONSENSE, ends, say
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from variants import ANSWER_S, Dialect, Watched, sample, variants, watching

from manyhands.compute.train_state import TrainState
from manyhands.errors import WeightsLost
from manyhands.ps.block_store import FlatTensors, ScheduleClock
from manyhands.ps.mode import PsMode
from manyhands.ps.model_layout import layout_of
from manyhands.ps.policies import AsyncPolicy, SyncPolicy
from manyhands.ps.protocol import BETWEEN_SERVERS, EnterView, Go, Moved, PeerHello
from manyhands.ps.recovery_plan import BlockMove, RecoveryPlan, ServerStatus, make_plan
from manyhands.ps.server import Server, ServerEvents, ServerView
from manyhands.ps.server_state import ServerState
from manyhands.transport import Link, Listener, connect
from manyhands.transport.fields import write

T = TypeVar("T")

FIRST, SECOND, WORKER = "server-0", "server-1", "worker-0"
VIEW = 7
SECRET = "the secret of a run"
MODES = {
    "async": PsMode(AsyncPolicy, rounds=False, slots=2),
    "sync": PsMode(SyncPolicy, rounds=True, slots=1, for_all=True),
    "clipped": PsMode(SyncPolicy, rounds=True, slots=1, clip_norm=1.0),
}
STAGES = ("peer", "begins", "moving", "begun")
"""How far the view is when the hostile server sends its message."""


def make_state(name: str) -> ServerState:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer._opt_called = True  # type: ignore[attr-defined]  # as learners and servers do
    train_state = TrainState(
        model,
        optimizer,
        loss=lambda m, b: b,
        scheduler=LambdaLR(optimizer, lambda step: 1.0),
        schedule_of=lambda optimizer, num_steps: LambdaLR(optimizer, lambda step: 1.0),
    )
    return ServerState(
        name,
        f"host of {name}",
        train_state,
        FlatTensors.private(layout_of(model, train_state.optimizer)),
        ScheduleClock(train_state.scheduler),
        replicas=1,
    )


class Hostile:
    """The other server: does what it should up to a stage."""

    def __init__(self, name: str, server: Server, link: Link) -> None:
        self.name, self.server, self.link = name, server, link
        self.state = make_state(name)

    def advance(self, stage: str) -> None:
        if stage == "peer":
            return
        self.tell(PeerHello(self.name, VIEW, [], []))
        self.expect(PeerHello)
        if self.name == SECOND:
            if stage == "begins":
                return
            self.tell(self.state.status())
            self.expect(RecoveryPlan)
            self.tell(Moved())
            self.expect(Go)
            return
        theirs = self.expect(ServerStatus)
        if stage == "begins":
            return
        plan = make_plan([self.state.status(), theirs], self.state.layout, replicas=1)
        if stage == "moving":
            moves = (BlockMove(0, FIRST, SECOND, "own"), BlockMove(0, FIRST, SECOND, "replica"))
            self.tell(replace(plan, moves=moves))
            return
        self.tell(plan)
        self.expect(Moved)
        self.tell(Go())
        assert self.server.begun.wait(ANSWER_S)

    def tell(self, message: Any) -> None:
        self.link.send(message)

    def expect(self, kind: type[T]) -> T:
        message = self.link.recv(BETWEEN_SERVERS, timeout_s=ANSWER_S).message
        assert isinstance(message, kind), message
        return message


@contextlib.contextmanager
def two_servers(hostile: str, mode: PsMode, watched: Watched) -> Iterator[Hostile]:
    """A real server, and the connection of a hostile one to it."""
    name = SECOND if hostile == FIRST else FIRST
    listener = Listener("tcp://127.0.0.1:0", secret=SECRET)
    server = Server(
        make_state(name),
        mode,
        listener,
        ServerView(VIEW, [FIRST, SECOND], [WORKER]),
        events=ServerEvents(failed=watched.fail),
    )
    with contextlib.ExitStack() as stack:
        stack.callback(server.freeze)

        def dial(address: str, by: str) -> Link:
            link = connect(address, secret=SECRET, name=by, timeout_s=ANSWER_S)
            stack.callback(link.close)
            return link

        if hostile == FIRST:
            theirs = stack.enter_context(Listener("tcp://127.0.0.1:0", secret=SECRET))
            server.meet(lambda _: dial(theirs.address, SECOND))
            link = stack.enter_context(theirs.accept())
        else:
            server.meet(lambda _: dial("", ""))
            link = dial(server.address, SECOND)
        worker = dial(server.address, WORKER)
        worker.send(EnterView(WORKER, VIEW, [], [], 0))
        yield Hostile(hostile, server, link)


def vocabulary(hostile: str) -> dict[str, Any]:
    """Values that mean something at this moment."""
    mine, theirs = (
        make_state(hostile).status(),
        make_state(SECOND if hostile == FIRST else FIRST).status(),
    )
    both = [mine, theirs] if hostile == FIRST else [theirs, mine]
    plan = make_plan(both, make_state(hostile).layout, replicas=1)
    written = write(plan)
    return {
        "server": (hostile,),
        "sender": (hostile,),
        "host": ("a", "b"),
        "owner": (FIRST, SECOND),
        "worker": (WORKER,),
        "view": (0, 1, VIEW - 1, VIEW),
        "prepared": (0, 1, VIEW - 1),
        "standing": (0, 1, VIEW - 1),
        "seq": (1, 2),
        "after": (0, 1),
        "began": (0,),
        "version": (1, 2, 0),
        "span": (0,),
        "slot": (0, 1),
        "block": (0, 1),
        "role": ("own", "replica", "row:t"),
        "staleness": (0,),
        "placement": (written["placement"], None),
        "previous": (written["placement"], None),
        "ledger": (written["ledger"], written["ledger"] | {"version": 3}),
        "moves": ([], [{"shard": 0, "source": FIRST, "target": SECOND, "role": "own"}]),
        "row_moves": ([],),
        "row_placement": (None,),
        "stale": ([], [[FIRST, SECOND]]),
        "replicas": ({}, {FIRST: 0, SECOND: 0}),
        "sums": ([],),
        "undo": ([],),
        "state": ('{"=": {"~tensor": 0, "dtype": "float32", "shape": [8]}}', '{"=": null}'),
        "progress": ([1, 1],),
        "firsts": (written["placement"]["firsts"],),
        "seconds": (written["placement"]["seconds"], None),
        "layout": (written["placement"]["layout"],),
        "servers": ([FIRST, SECOND],),
        "shares": (written["placement"]["shares"],),
    }


SERVERS = Dialect.of(
    "server to server",
    BETWEEN_SERVERS,
    payloads={"TensorMessage": (None, bytes(32)), "ReplicaSum": (None, bytes(32), bytes(24))},
)


def attack(hostile: str, mode: str, stage: str, these: list[Variant], watched: Watched) -> None:
    for variant in these:
        with two_servers(hostile, MODES[mode], watched) as peer:
            peer.advance(stage)
            # Twice: what may be said once may be too much the second time.
            say(peer.link, variant, variant, NONSENSE)
            ends(peer.link, variant)
        # A server that claims to have known weights which nobody has ends the start, not the run.
        error = peer.server.error
        assert error is None or isinstance(error, WeightsLost), f"{error!r} after {variant}"
        watched.check(variant)


@pytest.mark.parametrize(
    ("hostile", "mode", "stage"),
    [
        (FIRST, "async", "begins"),
        (SECOND, "async", "begins"),
        (FIRST, "sync", "moving"),
        (SECOND, "clipped", "begun"),
    ],
)
def test_a_server_sends_anything(hostile: str, mode: str, stage: str) -> None:
    these = sample(variants(SERVERS, vocabulary=vocabulary(hostile)), each=2)
    with watching() as watched:
        attack(hostile, mode, stage, these, watched)


@pytest.mark.long
@pytest.mark.parametrize("hostile", [FIRST, SECOND])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("stage", STAGES)
def test_a_server_sends_everything(hostile: str, mode: str, stage: str) -> None:
    everything = list(variants(SERVERS, vocabulary=vocabulary(hostile), examples=100))
    with watching() as watched:
        attack(hostile, mode, stage, sample(everything, each=100), watched)
