"""A new worker receives an older state, applies the updates since then, and equals the others."""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from manyhands.collectives import state_transfer as catching_up
from manyhands.collectives.state_transfer import (
    StateNumbers,
    StateReceiver,
    StateSender,
    StateText,
)
from manyhands.compute.train_state import TrainState
from manyhands.contract import Context
from manyhands.errors import LinkClosed, LinkError, LinkTimeout, ProtocolError
from manyhands.hosts.me import Me
from manyhands.hosts.view import Seat, View
from manyhands.runs.saver import gather_state
from manyhands.strategies.allreduce import AllReduce
from manyhands.testing.conformance import assert_same_bits
from manyhands.testing.jobs import Regression
from manyhands.transport import Link, Listener, connect

VIEW = View(2, (Seat("worker-0", "here"), Seat("worker-1", "here")))


class Facts(dict[str, str]):
    """A board that both can read."""

    def post(self, key: str, value: str) -> None:
        self[key] = value

    def fetch(self, key: str, *, timeout_s: float) -> str:
        deadline = time.monotonic() + timeout_s
        while key not in self:
            if time.monotonic() > deadline:
                raise LinkTimeout(key)
            time.sleep(0.001)
        return self[key]

    def send(self, message: object) -> None:
        raise AssertionError(message)


def step(train_state: TrainState, number: int) -> list[torch.nn.Parameter]:
    """The gradients of a step, the same for all, and what its order says of the learning rate."""
    generator = torch.Generator().manual_seed(number)
    parameters = list(train_state.model.parameters())
    for parameter in parameters:
        parameter.grad = torch.randn(parameter.shape, generator=generator)
    train_state.lr_factor, train_state.ticks = 1.0 + number / 4, number % 3
    return parameters


@pytest.mark.parametrize("early", [0, 3])
def test_kept_updates_use_the_learning_rate_of_their_steps(tmp_path: Path, early: int) -> None:
    """Also of steps after which a warm-up has gone on; `early`: the state is here before so many."""
    old = TrainState.of(Regression(), device="cpu", num_steps=20)
    new = TrainState.of(Regression(seed=1), device="cpu", num_steps=20)
    board = Facts()
    seats = [Me(seat.name, "here", "cpu", tmp_path, VIEW, board=board) for seat in VIEW.seats]
    for number in range(1, 4):
        step(old, number)
        old.update()
    sender = StateSender(seats[0], VIEW, gather_state(old, {}), num_new=1)
    catching = StateReceiver(seats[1], VIEW, new, AllReduce().build(Context(new, seats[1])))
    try:
        for number in range(4, 9):
            step(old, number)
            old.update()
            if number > 8 - early:
                assert catching.caught_up(list(new.model.parameters()), wait_s=30.0)
            catching.keep(step(new, number))
        assert catching.caught_up(list(new.model.parameters()), wait_s=30.0)
    finally:
        catching.close()
        sender.close()
    assert_same_bits(gather_state(new, {}), gather_state(old, {}))


def test_a_stalled_sender_times_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catching_up, "STALLED_S", 0.2)
    new, board = TrainState.of(Regression(), device="cpu", num_steps=20), Facts()
    me = Me("worker-1", "here", "cpu", tmp_path, VIEW, board=board)
    with Listener(f"unix:{tmp_path}/silent") as listener:
        board.post(f"state/{VIEW.number}", listener.address)
        catching = StateReceiver(me, VIEW, new, None)
        with listener.accept(), pytest.raises(LinkTimeout, match="did not send"):
            catching.caught_up(list(new.model.parameters()), wait_s=30.0)
        catching.close()


STATE = '{"model": {"a": {"~tensor": 0, "dtype": "float32", "shape": [2]}}}'


def unusual(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(catching_up, "put_state", fail)


@pytest.mark.parametrize(
    "text",
    [
        7,
        "[",
        STATE.replace("float32", "nosuch"),
        STATE.replace("float32", "nn"),
        STATE.replace("[2]", '["x"]'),
        STATE.replace("[2]", "[-1]"),
        STATE.replace("[2]", "[1099511627776, 8]"),
        STATE.replace('"~tensor": 0', '"~tensor": 5'),
        STATE,
        "{}",
        "null",
        '{"model": {}, "optimizer": {}}',
        "[" * 100_000,
    ],
    ids=lambda text: str(text)[:60],
)
def test_an_invalid_state_raises_in_the_receiver(tmp_path: Path, text: Any) -> None:
    new, board = TrainState.of(Regression(), device="cpu", num_steps=20), Facts()
    me = Me("worker-1", "here", "cpu", tmp_path, VIEW, board=board)
    with Listener(f"unix:{tmp_path}/bad") as listener:
        board.post(f"state/{VIEW.number}", listener.address)
        catching = StateReceiver(me, VIEW, new, None)
        with listener.accept() as link:
            link.send(StateText(text))
            if text == STATE:
                link.send(StateNumbers(), bytes(8))
            with pytest.raises(Exception):  # noqa: B017 - any: what matters is that it is not taken
                catching.caught_up(list(new.model.parameters()), wait_s=30.0)
        catching.close()


@pytest.mark.parametrize(
    "error", [MemoryError(), TypeError("t"), SystemExit(3), AttributeError("a"), OSError("o")]
)
def test_any_error_of_loading_the_state_raises_in_the_receiver(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    unusual(monkeypatch, error)
    old = TrainState.of(Regression(), device="cpu", num_steps=20)
    new, board = TrainState.of(Regression(), device="cpu", num_steps=20), Facts()
    seats = [Me(seat.name, "here", "cpu", tmp_path, VIEW, board=board) for seat in VIEW.seats]
    sender = StateSender(seats[0], VIEW, gather_state(old, {}), num_new=1)
    catching = StateReceiver(seats[1], VIEW, new, AllReduce().build(Context(new, seats[1])))
    try:
        with pytest.raises(type(error)):
            catching.caught_up(list(new.model.parameters()), wait_s=30.0)
    finally:
        catching.close()
        sender.close()


def test_the_allocation_for_a_state_is_limited(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: object, **__: object) -> None:
        raise AssertionError("allocated")

    new, board = TrainState.of(Regression(), device="cpu", num_steps=20), Facts()
    me = Me("worker-1", "here", "cpu", tmp_path, VIEW, board=board)
    with Listener(f"unix:{tmp_path}/huge") as listener:
        board.post(f"state/{VIEW.number}", listener.address)
        catching = StateReceiver(me, VIEW, new, None)
        with listener.accept() as link:
            monkeypatch.setattr(torch, "empty", never)
            link.send(StateText(STATE.replace("[2]", "[100000000]")))
            with pytest.raises(ProtocolError, match="a state of 400000000 bytes; at most"):
                catching.caught_up(list(new.model.parameters()), wait_s=30.0)
        catching.close()


def last_of(link: Link) -> None:
    while True:
        link.recv(timeout_s=30.0)


def test_a_sender_accepts_no_messages(tmp_path: Path) -> None:
    old, board = TrainState.of(Regression(), device="cpu", num_steps=20), Facts()
    me = Me("worker-0", "here", "cpu", tmp_path, VIEW, board=board)
    sender = StateSender(me, VIEW, gather_state(old, {}), num_new=1)
    try:
        with connect(board[f"state/{VIEW.number}"], timeout_s=30.0) as link:
            with suppress(LinkError):  # the other end may be quicker
                link.send(StateNumbers(), bytes(1 << 20))
            with pytest.raises(LinkClosed):
                last_of(link)
    finally:
        sender.close()
