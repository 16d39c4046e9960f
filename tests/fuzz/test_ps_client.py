"""A worker whose parameter server sends anything, before the view begins and in it."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from generator import Variant
from test_ps_workers import NONSENSE, ends, say
from torch import nn
from variants import (
    ANSWER_S,
    GREW_BYTES,
    Dialect,
    Watched,
    answered,
    sample,
    send_bytes,
    strange_frames,
    variants,
    watching,
)

from manyhands.errors import LinkError, ManyhandsError, ViewChanging
from manyhands.ps.block_store import FlatTensors
from manyhands.ps.client import Client, ServerWaiter
from manyhands.ps.model_layout import layout_of
from manyhands.ps.node import PsNode
from manyhands.ps.placement import place
from manyhands.ps.policies import StartPermit
from manyhands.ps.protocol import TO_WORKER, EnterView, ViewBegun
from manyhands.transport import Link, Listener, connect
from manyhands.transport.event_loop import DATA_LINKS
from manyhands.transport.fields import write

SERVER, WORKER = "server-0", "worker-0"
SECRET = "the secret of a run"
MODEL = nn.Linear(3, 2)
LAYOUT = layout_of(MODEL, torch.optim.SGD(MODEL.parameters(), lr=0.1))
BEGIN = ViewBegun(
    0,
    0,
    done=0,
    late=(),
    last=(),
    travels=True,
    placement=place(LAYOUT, [SERVER], replicas=0, hosts={SERVER: "here"}).to_record(),
    row_placement=None,
    permit=StartPermit(1, None),
)
CLIENT = Dialect.of(
    "server to worker",
    TO_WORKER,
    payloads={
        "ParameterSpan": (bytes(4 * 8), bytes(4 * 6)),
        "Statistics": (bytes(8),),
        "RowsAnswer": (bytes(8),),
        "TensorMessage": (None, bytes(32)),
    },
)
VOCABULARY: dict[str, Any] = {
    "placement": (write(BEGIN)["placement"],),
    "version": (1, 2, 3),
    "seq": (1, 2),
    "done": (0, 1),
    "span": (0,),
    "row_placement": (None,),
    "travels": (True, False),
    "layout": (LAYOUT.digest,),
    "servers": ([SERVER],),
    "block": (0, 1),
    "state": ('{"=": {"~tensor": 0, "dtype": "float32", "shape": [8]}}', '{"=": null}'),
}


class Worker:
    """A real client in a thread, which does what a worker does, until it is told that a view comes."""

    def __init__(self, address: str, watched: Watched) -> None:
        self._address, self._watched = address, watched
        self._over = threading.Event()
        self._client: Client | None = None
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _dial(self, _server: str) -> Link:
        if self._over.is_set():
            raise ViewChanging("a view comes")
        return connect(self._address, secret=SECRET, name=WORKER, timeout_s=ANSWER_S)

    def _check(self) -> None:
        if self._over.is_set():
            raise ViewChanging("a view comes")

    def _run(self) -> None:
        try:
            node = SimpleNamespace(dial=self._dial, refused=lambda server, why: None)
            self._client = client = Client(
                EnterView(WORKER, 7, [], [], 0),
                [SERVER],
                node=cast(PsNode, node),
                params=FlatTensors.private(LAYOUT),
                slots=[FlatTensors.private(LAYOUT)],
                waiter=ServerWaiter(WORKER, check=self._check, timeout_s=60.0),
            )
            client.requests.states()
            client.pull()
            client.begin(rounds=False)
            while True:
                client.requests.receive_statistics(1)
        except ManyhandsError:
            pass
        except BaseException as error:
            self._watched.fail(error)

    def close(self) -> None:
        """A view comes: nothing may keep the worker from leaving this one."""
        self._over.set()
        if self._client is not None:
            self._client.wake_up()
        self._thread.join(ANSWER_S)
        assert not self._thread.is_alive(), "the worker does not leave the view"
        if self._client is not None:
            self._client.close()


@contextlib.contextmanager
def connected(watched: Watched, *, begun: bool) -> Iterator[tuple[Worker, list[Link]]]:
    """A worker and the server's side of its connections."""
    with Listener("tcp://127.0.0.1:0", secret=SECRET) as listener, contextlib.ExitStack() as stack:
        worker = Worker(listener.address, watched)
        stack.callback(worker.close)
        links = [stack.enter_context(listener.accept())]
        assert links[0].recv(timeout_s=ANSWER_S).message["kind"] == "EnterView"
        if begun:
            links[0].send(BEGIN)
            for _ in range(DATA_LINKS):
                links.append(stack.enter_context(listener.accept()))
                assert links[-1].recv(timeout_s=ANSWER_S).message["kind"] == "OpenDataLink"
        yield worker, links


def attack(these: list[Variant], watched: Watched) -> None:
    for number, variant in enumerate(these):
        stage = number % 3
        with connected(watched, begun=stage > 0) as (_, links):
            link = links[-1 if stage == 2 else 0]
            say(link, variant, variant, NONSENSE)
            ends(link, variant)
        watched.check(variant)


def test_a_server_sends_anything_to_its_worker() -> None:
    these = sample(variants(CLIENT, vocabulary=VOCABULARY), each=6)
    with watching() as watched:
        attack(these, watched)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(3))
def test_a_server_sends_everything_to_its_worker(seed: int) -> None:
    everything = list(variants(CLIENT, seed=seed, vocabulary=VOCABULARY, examples=100))
    with watching() as watched:
        attack(everything[seed:] + everything[:seed], watched)  # each at another stage


def test_frames_that_are_no_messages_of_a_server() -> None:
    with watching() as watched:
        for name, data in strange_frames():
            with connected(watched, begun=True) as (_, links):
                with contextlib.suppress(LinkError):
                    send_bytes(links[0], data)
                ends(links[0], name)


FLOODS = {
    "RowsAnswer": {"tag": 0},
    "Statistics": {"tag": 0},
    "TensorMessage": {"block": 0, "role": "own"},
    "NewVersion": {"version": 1, "ticks": 0, "own": [{"seq": 1, "staleness": 0, "lr": 0.1}] * 1000},
    "MissingWorkers": {"names": ["x" * 1000] * 60},
}


@pytest.mark.parametrize("kind", FLOODS)
def test_a_server_floods_its_worker(kind: str) -> None:
    """What nobody asked for is not kept."""
    payload = bytes(1 << 20) if kind in CLIENT.payloads else None
    state = '{"=": {"~tensor": 0, "dtype": "uint8", "shape": [1048576]}}'
    with watching() as watched, connected(watched, begun=True) as (_, links):
        link = links[0]
        with answered(kind), contextlib.suppress(LinkError):
            for number in range((GREW_BYTES + (128 << 20)) >> 20 if payload else 200):
                head = {"kind": kind, **FLOODS[kind]}
                if "tag" in head:
                    head["tag"] = number
                if kind == "TensorMessage":
                    link.send({**head, "block": number, "state": state})
                    head["block"] = number
                if kind == "NewVersion":
                    head["own"] = [
                        {"seq": 1000 * number + i + 1, "staleness": 0, "lr": 0.1}
                        for i in range(1000)
                    ]
                link.send(head, payload)
        say(link, NONSENSE)
        ends(link, kind)
