"""Probes of hosts, the state sent to a new worker, and requests in the run folder: each gets anything."""

from __future__ import annotations

import contextlib
import json
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from generator import TEXTS, Variant
from test_ps_workers import NONSENSE, ends, say
from variants import (
    ANSWER_S,
    Dialect,
    answered,
    sample,
    send_bytes,
    single,
    strange_frames,
    variants,
    watching,
)

from manyhands.collectives.state_transfer import STATE, StateReceiver, StateSender
from manyhands.compute.train_state import TrainState
from manyhands.contract import Context
from manyhands.errors import LinkError, LinkTimeout, ProtocolError
from manyhands.hosts import probe
from manyhands.hosts.me import Me
from manyhands.hosts.probe import CHUNK, PROBE, Probe
from manyhands.hosts.view import Seat, View
from manyhands.runs.folder import REQUEST, RunFolder, ScaleRequest
from manyhands.runs.saver import gather_state
from manyhands.strategies.allreduce import AllReduce
from manyhands.testing.jobs import Regression
from manyhands.transport import Limits, Link, Listener, connect

SECRET = "the secret of a measurement"
# Probes ---------------------------------------------------------------------------------------------

PROBES = Dialect.of("probe to probe", PROBE, payloads={"Chunk": (CHUNK,)})


def few_or_all(dialect: Dialect, number: int | None, **options: Any) -> list[Variant]:
    if number is None:
        return list(variants(dialect, examples=60, **options))
    return sample(variants(dialect, **options), each=number)


@pytest.mark.parametrize("number", [3, pytest.param(None, marks=pytest.mark.long)])
def test_a_host_asks_a_probe_anything(number: int | None) -> None:
    with watching() as watched, Probe("here", "127.0.0.1", SECRET) as measured:
        for variant in few_or_all(PROBES, number, vocabulary={"seconds": (0.0, 0.01)}):
            with connect(measured.address, secret=SECRET, name="there", timeout_s=ANSWER_S) as link:
                say(link, variant, Variant("ChunksEnd", "", {"kind": "ChunksEnd"}), NONSENSE)
                ends(link, variant)
            watched.check(variant)
        with Probe("there", "127.0.0.1", SECRET) as other:
            assert other.measure("here", measured.address, 0.0).trouble == ""


@pytest.mark.parametrize("number", [2, pytest.param(None, marks=pytest.mark.long)])
def test_a_probe_answers_anything(number: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "STUCK_S", 0.2)
    with (
        watching() as watched,
        Listener("tcp://127.0.0.1:0", secret=SECRET) as hostile,
        Probe("here", "127.0.0.1", SECRET) as mine,
    ):
        for at, variant in enumerate(few_or_all(PROBES, number)):
            with answered(variant):
                measuring = threading.Thread(
                    target=mine.measure, args=("there", hostile.address, 0.01)
                )
                measuring.start()
                with hostile.accept() as link:
                    for _ in range(at % 2 * probe.NUM_PINGS):
                        link.recv(timeout_s=ANSWER_S)
                        link.send(probe.Pong(1.0))
                    say(link, variant, NONSENSE)
                    measuring.join(ANSWER_S)
            assert not measuring.is_alive(), variant
            watched.check(variant)


# State transfer -------------------------------------------------------------------------------------

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


@contextlib.contextmanager
def receiving(folder: Path) -> Iterator[tuple[StateReceiver, list[Any], Link]]:
    """A new worker, its parameters, and the link over which it gets the state."""
    new, board = TrainState.of(Regression(), device="cpu", num_steps=20), Facts()
    me = Me("worker-1", "here", "cpu", folder, VIEW, board=board)
    with Listener(f"unix:{folder}/state") as listener:
        board.post(f"state/{VIEW.number}", listener.address)
        receiver = StateReceiver(me, VIEW, new, AllReduce().build(Context(new, me)))
        try:
            with listener.accept() as link:
                yield receiver, list(new.model.parameters()), link
        finally:
            receiver.close()


STATES = Dialect.of(
    "state to a new worker", STATE, payloads={"StateNumbers": (bytes(8), bytes(1 << 10))}
)
STATE_TEXTS = (
    "{}",
    '{"model": {"a": {"~tensor": 0, "dtype": "float32", "shape": [2]}}}',
    '{"model": {}, "optimizer": {}, "scheduler": {}}',
    '{"a": {"~tensor": 7, "dtype": "float32", "shape": [2]}}',
    '{"a": {"~tensor": 0, "dtype": "float32", "shape": [1000000, 1000000]}}',
    "[" * 50_000,
)


@pytest.mark.parametrize("number", [12, pytest.param(None, marks=pytest.mark.long)])
def test_a_worker_sends_any_state(number: int | None, tmp_path: Path) -> None:
    with watching() as watched:
        for variant in few_or_all(STATES, number, vocabulary={"text": STATE_TEXTS}):
            with receiving(tmp_path) as (receiver, parameters, link):
                say(link, variant, Variant("", "", {"kind": "StateNumbers"}, bytes(8)), NONSENSE)
                # Whatever is wrong with a state, the new worker reports it and ends.
                with answered(variant), pytest.raises(Exception):  # noqa: B017
                    receiver.caught_up(parameters, wait_s=ANSWER_S)
            watched.check(variant)


def test_frames_that_are_no_state(tmp_path: Path) -> None:
    with watching():
        for name, data in strange_frames():
            with receiving(tmp_path) as (receiver, parameters, link):
                with contextlib.suppress(LinkError):
                    send_bytes(link, data)
                link.close()
                with answered(name), pytest.raises((LinkError, ProtocolError)):
                    receiver.caught_up(parameters, wait_s=ANSWER_S)


def test_a_worker_that_sends_its_state_reads_nothing(tmp_path: Path) -> None:
    old, board = TrainState.of(Regression(), device="cpu", num_steps=20), Facts()
    me = Me("worker-0", "here", "cpu", tmp_path, VIEW, board=board)
    sender = StateSender(me, VIEW, gather_state(old, {}), num_new=2)
    try:
        with watching():
            for name, data in strange_frames():
                with connect(board[f"state/{VIEW.number}"], timeout_s=ANSWER_S) as link:
                    with contextlib.suppress(LinkError):
                        send_bytes(link, data)
                    ends(link, name)
    finally:
        sender.close()


@pytest.mark.parametrize("secret", ["", SECRET])
def test_a_member_posts_an_address_that_is_none(secret: str, tmp_path: Path) -> None:
    """Its peers count it as unreachable, and not as a mistake of the user."""
    me = Me("worker-0", "here", "cpu", tmp_path, VIEW, board=Facts(), secret=secret or "x")
    for address in (
        *TEXTS,
        "tcp://",
        "tcp://\x00:1",
        f"tcp://{'x' * 300}:1",
        "unix:\x00",
        "tcp://h:99999",
    ):
        with answered(address), pytest.raises(LinkError):
            me.dial(address, timeout_s=0.01, limits=Limits(), peer="worker-1")


# Requests in the run folder -------------------------------------------------------------------------

REQUESTS = single("requests in the run folder", ScaleRequest)


def test_any_request_in_the_run_folder(tmp_path: Path) -> None:
    run = RunFolder.create("job", path=tmp_path / "run")
    with watching():
        for variant in variants(REQUESTS, examples=30):
            (run.path / REQUEST).write_text(json.dumps(variant.head))
            with answered(variant):
                request = run.take_request()
            assert request is not None
            refused = variant.flaw and not re.search("unknown|payload", variant.flaw)
            assert not refused or request == ScaleRequest(0)
        for data in (b"", b"\xff", b"[]", b"[" * 100_000, b'{"workers":' * 50_000, bytes(1 << 20)):
            (run.path / REQUEST).write_bytes(data)
            assert run.take_request() == ScaleRequest(0)
        (run.path / REQUEST).mkdir()
        assert run.take_request() is None
