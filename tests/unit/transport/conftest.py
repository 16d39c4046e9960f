"""Both ends of a link of each kind, a bare socket with a link at its end, and work in a thread."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from manyhands.transport import Authority, Limits, Link, Listener, connect

LONG_S = 20.0
KINDS = ("unix", "tcp", "proof", "tls")
Pair = tuple[Link, Link]
InThread = Callable[[Callable[[], Any]], tuple[threading.Thread, list[Any]]]


@contextlib.contextmanager
def linked(kind: str, folder: Path) -> Iterator[Pair]:
    """The two ends of a new link."""
    address = f"unix:{folder}/s" if kind == "unix" else "tcp://127.0.0.1:0"
    authority = Authority.create("run") if kind == "tls" else None
    near: dict[str, Any] = {"insecure": True}
    far: dict[str, Any] = {"insecure": True}
    if kind == "proof":
        near, far = {"secret": "secret of the run", "name": "near"}, {"secret": "secret of the run"}
    elif authority:
        near, far = ({"credentials": authority.issue(name)} for name in ("near", "far"))
    with (
        Listener(address, **far) as listener,
        connect(listener.address, timeout_s=LONG_S, **near) as client,
        listener.accept(LONG_S) as server,
    ):
        # A test that would hang fails instead: its blocked threads get LinkClosed.
        watchdog = threading.Timer(LONG_S, lambda: (client.close(), server.close()))
        watchdog.start()
        try:
            yield client, server
        finally:
            watchdog.cancel()
            watchdog.join()


@pytest.fixture(params=KINDS)
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Pair]:
    with linked(request.param, tmp_path) as ends:
        yield ends


@pytest.fixture
def raw() -> Iterator[tuple[socket.socket, Link]]:
    """A bare socket, to send anything, and the link at its other end."""
    left, right = socket.socketpair()
    with left, Link(right, peer="raw", limits=Limits(512, 2048)) as link:
        left.settimeout(LONG_S)
        yield left, link


@pytest.fixture
def in_thread() -> InThread:
    return run_in_thread


def run_in_thread(work: Callable[[], Any]) -> tuple[threading.Thread, list[Any]]:
    """Run `work` beside the test; its result or exception is put in the list."""
    results: list[Any] = []

    def run() -> None:
        try:
            results.append(work())
        except BaseException as error:
            results.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, results
