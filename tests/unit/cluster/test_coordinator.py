"""The coordinator and real members that know nothing of training: board, keys, views."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from manyhands.cluster.coordinator import Coordinator, Said, Signalled
from manyhands.cluster.launchers import LocalLauncher
from manyhands.cluster.messages import Post
from manyhands.cluster.view import Seat

DEADLINE_S = 30.0


@pytest.fixture(autouse=True)
def members_find_their_program(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=os.pathsep)


@contextmanager
def coordinating(tmp_path: Path, **options: Any) -> Iterator[Coordinator]:
    with Coordinator(LocalLauncher(), logs=tmp_path, **options) as coordinator:
        try:
            yield coordinator
        finally:
            coordinator.stop()


def start(coordinator: Coordinator, name: str, **assignment: Any) -> None:
    coordinator.start(name, entry="chatty", local_rank=0, threads=1, assignment=assignment)


def await_said(coordinator: Coordinator, member: str, kind: str) -> Any:
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline:
        match coordinator.next(0.1):
            case Said(name, Post() as message) if name == member and kind == "post":
                return message
            case Said(name, {"kind": said} as message) if name == member and said == kind:
                return message
    raise AssertionError(f"{member} did not say {kind}")


def test_who_comes_late_reads_what_was_posted_before(tmp_path: Path) -> None:
    with coordinating(tmp_path) as coordinator:
        start(coordinator, "worker-0", post={"ps/1/worker-0": "here", "ps/1/other": "there"})
        await_said(coordinator, "worker-0", "post")
        await_said(coordinator, "worker-0", "post")
        start(coordinator, "worker-1", fetch="ps/1/worker-0")
        assert await_said(coordinator, "worker-1", "report")["got"] == "here"


@pytest.mark.parametrize("keys", [False, True])
def test_keys_are_given_on_request_and_the_secret_always(tmp_path: Path, keys: bool) -> None:
    with coordinating(tmp_path, keys=keys) as coordinator:
        told = []
        for name in ("worker-0", "server-0"):
            start(coordinator, name)
            told.append(await_said(coordinator, name, "ready"))
        assert len(told[0]["secret"]) == 64
        assert told[0]["secret"] == told[1]["secret"]
        certificates = {one["certificate"] for one in told}
        assert len(certificates) == 2 if keys else certificates == {None}


def test_two_runs_have_two_secrets(tmp_path: Path) -> None:
    secrets = set()
    for _ in range(2):
        with coordinating(tmp_path) as coordinator:
            start(coordinator, "worker-0")
            secrets.add(await_said(coordinator, "worker-0", "ready")["secret"])
    assert len(secrets) == 2


def test_a_view_ends_the_wait_for_what_nobody_posts(tmp_path: Path) -> None:
    with coordinating(tmp_path) as coordinator:
        start(coordinator, "worker-0", wait_through_views=True)
        await_said(coordinator, "worker-0", "ready")
        seat = Seat("worker-0", "here")
        coordinator.form_view([seat])
        time.sleep(0.5)
        coordinator.form_view([seat])
        report = await_said(coordinator, "worker-0", "report")
        assert report["noted"] == [[1, False], [2, False]], "each before it can be heard"
        assert report["heard"]["view"]["number"] == 1
        assert report["seconds"] < 10


def test_all_can_be_ended_and_others_started(tmp_path: Path) -> None:
    """Also one that is frozen; what comes meanwhile is not lost, and what they said is not heard later."""
    with coordinating(tmp_path) as coordinator:
        for name in ("worker-0", "worker-1"):
            start(coordinator, name)
            await_said(coordinator, name, "ready")
        os.kill(coordinator.members["worker-1"].handle.pid, signal.SIGSTOP)
        coordinator.interrupt(signal.SIGTERM)
        coordinator.end_members()
        assert not any(member.alive for member in coordinator.members.values())
        assert coordinator.next(1.0) == Signalled(signal.SIGTERM)
        assert coordinator.next(0.0) is None
        start(coordinator, "worker-2")
        await_said(coordinator, "worker-2", "ready")
