"""The coordinator with real members that do not train: board, keys, views."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from manyhands.control.messages import Notice
from manyhands.coordinator.coordinator import Coordinator
from manyhands.coordinator.fact_board import MAX_CHARS
from manyhands.coordinator.inbox import (
    MAX_UNREAD_BYTES,
    HostNotice,
    LinkLost,
    MemberMessage,
    Signalled,
)
from manyhands.errors import LinkError
from manyhands.hosts.invitation import Invitation
from manyhands.hosts.launchers.base import Handle, StartRequest
from manyhands.hosts.launchers.local import LocalLauncher
from manyhands.hosts.messages import BoardPost
from manyhands.hosts.refused_peers import RefusedPeers
from manyhands.hosts.view import Seat
from manyhands.transport import Authority, Link, Listener, connect

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
    coordinator.start(name, entry="scripted_member", local_rank=0, threads=1, assignment=assignment)


def await_message(coordinator: Coordinator, member: str, kind: type[Any]) -> Any:
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline:
        match coordinator.next(0.1):
            case MemberMessage(name, message) if name == member and isinstance(message, kind):
                return message
    raise AssertionError(f"{member} did not send {kind.__name__}")


def await_facts(coordinator: Coordinator, member: str) -> dict[str, Any]:
    return json.loads(await_message(coordinator, member, Notice).message)


def test_a_late_member_gets_earlier_posts(tmp_path: Path) -> None:
    with coordinating(tmp_path) as coordinator:
        start(coordinator, "worker-0", post={"ps/1/worker-0": "here", "ps/1/other": "there"})
        await_message(coordinator, "worker-0", BoardPost)
        await_message(coordinator, "worker-0", BoardPost)
        start(coordinator, "worker-1", fetch="ps/1/worker-0")
        await_facts(coordinator, "worker-1")
        assert await_facts(coordinator, "worker-1")["got"] == "here"


@pytest.mark.parametrize("keys", [False, True])
def test_certificates_on_request_and_a_secret_always(tmp_path: Path, keys: bool) -> None:
    with coordinating(tmp_path, keys=keys) as coordinator:
        told = []
        for name in ("worker-0", "server-0"):
            start(coordinator, name)
            told.append(await_facts(coordinator, name))
        assert len(told[0]["secret"]) == 64
        assert told[0]["secret"] == told[1]["secret"]
        certificates = {one["certificate"] for one in told}
        assert len(certificates) == 2 if keys else certificates == {None}


def test_two_runs_have_two_secrets(tmp_path: Path) -> None:
    secrets = set()
    for _ in range(2):
        with coordinating(tmp_path) as coordinator:
            start(coordinator, "worker-0")
            secrets.add(await_facts(coordinator, "worker-0")["secret"])
    assert len(secrets) == 2


def test_a_view_change_ends_the_wait_for_a_post(tmp_path: Path) -> None:
    with coordinating(tmp_path) as coordinator:
        start(coordinator, "worker-0", wait_through_views=True)
        await_facts(coordinator, "worker-0")
        seat = Seat("worker-0", "here")
        coordinator.form_view([seat])
        time.sleep(0.5)
        coordinator.form_view([seat])
        report = await_facts(coordinator, "worker-0")
        assert report["noted"] == [[1, False], [2, False]], "each before it can be received"
        assert report["first"] == 1
        assert report["seconds"] < 10


def test_all_can_be_ended_and_others_started(tmp_path: Path) -> None:
    """Also one that is frozen; what comes meanwhile is not lost, and what they said is not heard later."""
    with coordinating(tmp_path) as coordinator:
        for name in ("worker-0", "worker-1"):
            start(coordinator, name)
            await_facts(coordinator, name)
        os.kill(coordinator.members["worker-1"].handle.pid, signal.SIGSTOP)
        coordinator.interrupt(signal.SIGTERM)
        coordinator.end_members()
        assert not any(member.alive for member in coordinator.members.values())
        assert coordinator.next(1.0) == Signalled(signal.SIGTERM)
        assert coordinator.next(0.0) is None
        start(coordinator, "worker-2")
        await_facts(coordinator, "worker-2")


class Inviting(LocalLauncher):
    """Starts nobody, and keeps what members would be told."""

    def __init__(self) -> None:
        super().__init__()
        self.invitations: dict[str, Invitation] = {}
        self.over = threading.Event()

    def start(self, request: StartRequest) -> Any:
        self.invitations[request.name] = request.invitation
        return Nobody(request.name, self.over)

    def close(self) -> None:
        self.over.set()


class Nobody(Handle):
    def __init__(self, name: str, over: threading.Event) -> None:
        self.name, self.pid, self.host, self._over = name, 0, "here", over

    def wait(self) -> int:
        self._over.wait()
        return 0

    def terminate(self) -> None: ...
    def kill(self) -> None: ...


@contextmanager
def inviting(
    tmp_path: Path, authority: Authority | None = None
) -> Iterator[tuple[Coordinator, Invitation]]:
    launcher = Inviting()
    with Coordinator(
        launcher, logs=tmp_path, control="tcp://127.0.0.1:0", authority=authority
    ) as made:
        start(made, "worker-0")
        yield made, launcher.invitations["worker-0"]


def dial(address: str, by: Invitation) -> Link:
    return connect(address, credentials=by.credentials, timeout_s=DEADLINE_S)


def test_a_members_certificate_is_for_its_run_also_where_two_runs_have_one_key(
    tmp_path: Path,
) -> None:
    key = Authority.from_secret("manyhands run", "one key for the whole project")
    with inviting(tmp_path, key) as (one, mine), inviting(tmp_path, key) as (_, theirs):
        with dial(mine.address, by=mine) as link:
            assert link.peer == "coordinator"
            link.send({"kind": "Hello", "member": "worker-0"})
            assert isinstance(one.next(DEADLINE_S), MemberMessage)
        with pytest.raises(LinkError, match="refused"):
            dial(theirs.address, by=mine)
        with (
            Listener("tcp://127.0.0.1:0", credentials=theirs.credentials) as listener,
            pytest.raises(LinkError, match="refused"),
        ):
            dial(listener.address, by=mine)
        # Whoever has the key is let in to be an agent, and trusts no member that says it is coordinator.
        agent = key.issue("agent-x")
        with connect(theirs.address, credentials=agent, timeout_s=DEADLINE_S) as link:
            assert link.peer == "coordinator"
        with (
            Listener("tcp://127.0.0.1:0", credentials=mine.credentials) as listener,
            pytest.raises(LinkError, match="refused"),
        ):
            connect(listener.address, credentials=agent, timeout_s=DEADLINE_S)


def test_unread_messages_of_a_member_are_limited(tmp_path: Path) -> None:
    with (
        inviting(tmp_path) as (coordinator, invitation),
        dial(invitation.address, by=invitation) as link,
    ):
        link.send({"kind": "Hello", "member": "worker-0"})

        def flood() -> None:
            with contextlib.suppress(LinkError):
                for number in range(1000):
                    link.send({"kind": "BoardPost", "key": str(number), "value": "x" * 250_000})

        thread = threading.Thread(target=flood)
        thread.start()
        deadline = time.monotonic() + DEADLINE_S
        quota = coordinator.members["worker-0"].quota
        while quota._used < MAX_UNREAD_BYTES - 300_000:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        time.sleep(0.2)
        assert quota._used <= MAX_UNREAD_BYTES
        # It never reads what all are told: nobody waits for it.
        heard: list[object] = []
        while not any(isinstance(event, LinkLost) for event in heard):
            heard.append(coordinator.next(0.1))
            assert time.monotonic() < deadline
        assert HostNotice("worker-0 does not read its messages; its link is closed") in heard or (
            coordinator.next(DEADLINE_S)
            == HostNotice("worker-0 does not read its messages; its link is closed")
        )
        assert sum(len(value) for _, value in coordinator._board.facts.items()) <= MAX_CHARS
        thread.join(DEADLINE_S)


def test_the_first_message_of_a_connection_is_limited(tmp_path: Path) -> None:
    with inviting(tmp_path) as (_, invitation), dial(invitation.address, by=invitation) as link:
        with contextlib.suppress(LinkError):  # the other end may be quicker
            link.send({"kind": "Hello", "member": "worker-0", "more": "x" * (1 << 19)})
        with pytest.raises(LinkError):
            link.recv(timeout_s=DEADLINE_S)


def test_refused_hosts_are_reported_once_and_then_counted() -> None:
    told: queue.SimpleQueue[str] = queue.SimpleQueue()
    strangers = RefusedPeers(told.put, told.put)
    for number in range(1000):
        strangers(f"127.0.0.1:{number}", "unknown ca")
        strangers(f"fe80::{number}:77", "garbage")
    lines = []
    with contextlib.suppress(queue.Empty):
        while len(lines) < 12:
            lines.append(told.get(timeout=DEADLINE_S))
    assert strangers.count == 2000
    assert told.empty()
    counts = [line for line in lines if "so far" in line]
    assert [line.split()[0] for line in counts] == ["100", "1,000"]
    assert sum("was refused: it has another key" in line for line in lines) == 1
