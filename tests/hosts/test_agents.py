"""A coordinator and real agents, whose members know nothing of training."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from together import KEY, LONG_S, Process, Together, manyhands, place, together, until

from manyhands.control.messages import Ready
from manyhands.coordinator.coordinator import Coordinator
from manyhands.coordinator.inbox import Exited, HostNotice, InboxEvent, MemberMessage
from manyhands.errors import ManyhandsError, UsageError
from manyhands.hosts.discovery import detect
from manyhands.hosts.launchers.agents import AgentLauncher
from manyhands.hosts.timeouts import Timeouts
from manyhands.hosts.view import WORKER
from manyhands.testing.harness import gone
from manyhands.transport import Authority, connect

CHATTY = Path(__file__).parents[1] / "unit" / "coordinator"
OTHER_VERSION = """
import sys
import manyhands
manyhands.__version__ = "9.9"
from manyhands.cli.main import main
sys.exit(main(sys.argv[1:]))
"""


class Scene:
    """A coordinator in this process, and agents."""

    def __init__(
        self, folder: Path, hosts: Together, world: int, timeouts: Timeouts, least: int | None
    ) -> None:
        self.launcher = AgentLauncher(detect(place(0, world, 29500)), least=least)
        self.coordinator = Coordinator(
            self.launcher,
            logs=folder,
            control="tcp://127.0.0.1:0",
            timeouts=timeouts,
            authority=Authority.from_secret("manyhands run", KEY),
        )
        self.heard: list[InboxEvent] = []
        self._hosts = hosts
        self._world = world

    def agent(self, rank: int, *, version: bool = True, **more: str) -> Process:
        address = f"tcp://127.0.0.1:{self.coordinator.port}"
        command = manyhands("train", "job.py", "--on", "env", "--control", address)
        if not version:
            command[1:3] = ["-c", OTHER_VERSION]
        environ = place(rank, self._world, 29500, PYTHONPATH=path(), **more)
        return self._hosts.start(command, environ=environ)

    def gather(self) -> None:
        until(lambda: self.listen(0.01) or self.launcher.complete())

    def start(self, name: str, **assignment: Any) -> Any:
        return self.coordinator.start(
            name, entry="scripted_member", local_rank=0, threads=1, assignment=assignment
        ).handle

    def listen(self, timeout_s: float) -> None:
        if (event := self.coordinator.next(timeout_s)) is not None:
            self.heard.append(event)

    def hear(self, wanted: Any) -> Any:
        """The first thing that has happened which fits."""

        def found() -> bool:
            self.listen(0.01)
            return any(wanted(event) for event in self.heard)

        until(found)
        return next(event for event in self.heard if wanted(event))

    def ready(self, name: str) -> None:
        def is_ready(event: InboxEvent) -> bool:
            match event:
                case MemberMessage(member, Ready()):
                    return member == name
            return False

        self.hear(is_ready)

    def exit_of(self, name: str) -> int:
        return int(self.hear(lambda h: isinstance(h, Exited) and h.member == name).exit_code)

    @property
    def told(self) -> str:
        return "\n".join(h.message for h in self.heard if isinstance(h, HostNotice))


def path() -> str:
    return os.pathsep.join([str(CHATTY), os.environ.get("PYTHONPATH", "")])


@pytest.fixture(autouse=True)
def _members_find_their_program(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", path())


@contextmanager
def scene(
    tmp_path: Path, *, world: int, timeouts: Timeouts | None = None, least: int | None = None
) -> Iterator[Scene]:
    with together(tmp_path) as hosts:
        made = Scene(tmp_path, hosts, world, timeouts or Timeouts(), least)
        try:
            with made.coordinator:
                yield made
        finally:
            made.launcher.end(7)


def test_members_are_spread_over_hosts_and_watched_there(tmp_path: Path) -> None:
    with scene(tmp_path, world=3) as made:
        agents = [made.agent(1), made.agent(2)]
        made.gather()
        assert made.launcher.spans_hosts
        assert made.launcher.slots(WORKER) == 3
        handles = [made.start(f"worker-{n}", print=f"I am {n}") for n in range(3)]
        assert len({handle.host for handle in handles}) == 3
        assert handles[0].host == made.launcher.roster.machine.host, (
            "the first is beside the run folder"
        )
        for n in range(3):
            made.ready(f"worker-{n}")
        with pytest.raises(ManyhandsError, match="no host has a free slot"):
            made.start("worker-3")
        handles[2].kill()
        assert made.exit_of("worker-2") == -signal.SIGKILL
        assert (tmp_path / "worker-2.log").read_text() == "I am 2\n"
        assert made.launcher.slots(WORKER) == 1
        made.start("worker-3")
        made.ready("worker-3")
        members = [handle.pid for handle in handles]
        made.coordinator.stop()
        made.launcher.end(7)
        assert [agent.wait() for agent in agents] == [7, 7]
        assert gone(members)
        for agent in agents:
            serves, ends = agent.out.splitlines()  # and no more
            assert " serves " in serves
            assert "exits with code 7" in ends
            assert "serves" in agent.out


def test_who_dies_with_its_host_is_dead_and_another_may_come(tmp_path: Path) -> None:
    with scene(tmp_path, world=2) as made:
        agent = made.agent(1)
        made.gather()
        made.start("worker-0")
        handle = made.start("worker-1")
        made.ready("worker-1")
        agent.signal(signal.SIGKILL)
        assert made.exit_of("worker-1") == -signal.SIGKILL
        assert "which is lost" in handle.why
        assert gone([handle.pid])
        assert made.launcher.slots(WORKER) == 0
        made.agent(1)
        until(lambda: made.listen(0.01) or made.launcher.slots(WORKER))
        made.start("worker-2")
        made.ready("worker-2")
        assert "is lost: its agent closed its link" in made.told
        assert "has joined" in made.told


def test_another_key_and_another_version_are_refused_on_both_sides(tmp_path: Path) -> None:
    with scene(tmp_path, world=2) as made:
        stranger = made.agent(1, MANYHANDS_KEY="another key than the others")
        assert stranger.wait() == 2
        assert "do not have the same key" in stranger.out
        until(lambda: made.listen(0.01) or "127.0.0.1" in made.told)
        assert "was refused: it has another key" in made.told
        assert not made.launcher.complete()
        older = made.agent(1, version=False)
        assert older.wait() == 2
        both = r"can't take part: it has manyhands 9\.9, and the coordinator manyhands 0"
        with pytest.raises(UsageError, match=both):
            made.launcher.complete()
        assert "it has manyhands 9.9" in older.out
        for text in (KEY, "another key than the others"):
            assert text not in made.told + stranger.out + older.out


@pytest.mark.long
def test_a_frozen_host_is_given_up_and_its_members_end(tmp_path: Path) -> None:
    with scene(tmp_path, world=2, timeouts=Timeouts(host_s=2.0)) as made:
        agent = made.agent(1)
        made.gather()
        made.start("worker-0")
        handle = made.start("worker-1")
        made.ready("worker-1")
        agent.signal(signal.SIGSTOP)
        assert made.exit_of("worker-1") == -signal.SIGKILL
        assert "sent nothing for 2 s" in made.told
        # Its agent can't kill it now: it has lost the coordinator, and ends itself.
        until(lambda: Path(f"/proc/{handle.pid}/stat").read_text().split()[2] == "Z")
        agent.signal(signal.SIGCONT)
        until(lambda: made.listen(0.01) or made.launcher.slots(WORKER))
        made.start("worker-2")
        made.ready("worker-2")


@pytest.mark.long
def test_agents_that_lose_the_coordinator_for_good_end(tmp_path: Path) -> None:
    with scene(tmp_path, world=2) as made:
        agent = made.agent(1)
        made.gather()
        handle = made.start("worker-0")
        handle = made.start("worker-1")
        made.ready("worker-1")
        made.coordinator._listener.close()
        for node in made.launcher.roster.agents:
            node.link.close()
        assert gone([handle.pid], LONG_S)
        assert agent.wait() == 70
        assert "has ended" in agent.out


def test_a_rank_that_two_processes_have_is_an_error_on_all_sides(tmp_path: Path) -> None:
    with scene(tmp_path, world=3) as made:
        first = made.agent(1)
        until(lambda: made.listen(0.01) or "serves" in first.out)
        second = made.agent(1)
        assert second.wait() == 2
        text = "rank-1 is both the process on .*~2 and one on .*~3. Give each process a rank"
        assert re.search(text, second.out)
        with pytest.raises(UsageError, match=text):
            made.launcher.complete()
        made.launcher.end(2)
        assert first.wait() == 2


@pytest.mark.long
def test_a_rank_is_one_process(tmp_path: Path) -> None:
    with scene(tmp_path, world=2) as made:
        first = made.agent(1)
        made.gather()
        second = made.agent(1)
        until(lambda: "is already rank-1" in second.out)
        first.signal(signal.SIGKILL)
        until(lambda: "serves" in second.out)


def test_nobody_comes(tmp_path: Path) -> None:
    with together(tmp_path) as hosts:
        began = time.monotonic()
        command = manyhands("train", "job.py", "--on", "env", "--wait", "1")
        agent = hosts.start(command, environ=place(1, 2, 9))
        assert agent.wait() == 1
        assert (
            "found no coordinator at tcp://127.0.0.1:9 within 1 s: Connection refused" in agent.out
        )
        assert time.monotonic() - began < LONG_S
    with scene(tmp_path, world=2, timeouts=Timeouts(gather_s=0.2)) as made:
        time.sleep(0.3)
        with pytest.raises(UsageError, match=r"rank-1 of 2 did not connect to tcp://"):
            made.launcher.complete()
    with scene(tmp_path, world=2, timeouts=Timeouts(grace_s=0.2), least=1) as made:
        assert not made.launcher.complete(), "the other may come yet"
        time.sleep(0.3)
        assert made.launcher.complete(), "one is enough"


def test_a_log_that_cannot_be_written_ends_nothing_and_a_kill_is_noticed(tmp_path: Path) -> None:
    with scene(tmp_path, world=2) as made:
        made.agent(1)
        made.gather()
        (tmp_path / "worker-1.log").symlink_to("/dev/full")
        made.start("worker-0")
        handle = made.start("worker-1", print="to a full disk")
        made.ready("worker-1")
        until(lambda: made.listen(0.01) or "the log of worker-1 can't be written" in made.told)
        handle.kill()
        assert made.exit_of("worker-1") == -signal.SIGKILL
        made.start("worker-2", print="again")
        made.ready("worker-2")
        assert "is lost" not in made.told, "the agent is still heard"
        made.coordinator.stop()


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ({"kind": "MemberEnded", "name": "worker-9", "code": 0}, "worker-9"),
        ({"kind": "Started", "name": "worker-1"}, "pid is missing"),
        ({"kind": "nonsense"}, "not one of "),
    ],
    ids=["unknown", "short", "kind"],
)
def test_an_agent_that_talks_nonsense_is_given_up(
    tmp_path: Path, said: dict[str, Any], why: str
) -> None:
    with scene(tmp_path, world=2) as made:
        credentials = Authority.from_secret("manyhands run", KEY).issue("agent-bad")
        address = f"tcp://127.0.0.1:{made.coordinator.port}"
        with connect(address, credentials=credentials, timeout_s=LONG_S) as link:
            machine = {**vars(made.launcher.roster.machine), "host": "bad", "identity": "bad"}
            entry = {"name": "rank-1", "role": WORKER, "rank": 1, "devices": []}
            link.send({"kind": "AgentHello", "machine": machine, "entry": entry, "process": "p"})
            assert link.recv(timeout_s=LONG_S).message["kind"] == "AgentAdmitted"
            link.send({"kind": "AgentReady", "sees_run": False})
            made.gather()
            link.send(said)
            until(lambda: made.listen(0.01) or "bad is lost" in made.told)
            assert "sent an invalid message: " in made.told
            assert why in made.told
        made.coordinator.stop()
