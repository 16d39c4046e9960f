"""When faults are injected: with fake members and a fake clock."""

from __future__ import annotations

import signal
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import pytest

from manyhands.coordinator import fault_injector as injector_module
from manyhands.coordinator.fault_injector import FaultInjector
from manyhands.coordinator.fault_spec import parse_chaos
from manyhands.events import events as ev
from manyhands.events.sinks import Sink, Stream
from manyhands.hosts.launchers.local import LocalHandle


class Dummy(LocalHandle):
    def __init__(self, name: str, pid: int) -> None:
        self.name, self.pid = name, pid
        self.got: list[int] = []

    def signal(self, number: signal.Signals) -> None:
        self.got.append(number)


@dataclass
class Kept(Sink):
    seen: list[ev.Event] = field(default_factory=list)

    def handle(self, event: ev.Event) -> None:
        self.seen.append(event)

    def close(self) -> None:
        pass


class Play:
    """A run of which only what an injector looks at is there."""

    def __init__(self, chaos: str, *names: str) -> None:
        members = {name: Dummy(name, 1000 + n) for n, name in enumerate(names)}
        self.handles = members
        self.coordinator = SimpleNamespace(
            port=0,
            members={
                n: SimpleNamespace(alive=True, handle=handle) for n, handle in members.items()
            },
        )
        self.membership = SimpleNamespace(
            pool=SimpleNamespace(expects_members=False),
            views=SimpleNamespace(joining=False, current=SimpleNamespace(names=names)),
            roster=SimpleNamespace(is_worker=lambda name: name.startswith("worker")),
        )
        self.training_plan = SimpleNamespace(step=0, committed_step=0)
        self.kept = Kept()
        self.now = 100.0
        self.injector = FaultInjector(
            parse_chaos(chaos),
            cast(Any, self.coordinator),
            cast(Any, self.membership),
            Stream([self.kept]),
            clock=lambda: self.now,
        )

    def tick(self, after_s: float = 0.0, *, ending: bool = False) -> None:
        self.now += after_s
        samples = self.training_plan.committed_step
        self.injector.tick(cast(Any, self.training_plan), samples=samples, ending=ending)

    def train(self, steps: int = 2) -> None:
        """Some steps more are given out, and all of them committed."""
        self.training_plan.step += steps
        self.training_plan.committed_step = self.training_plan.step

    def bury(self, name: str) -> None:
        self.membership.views.current = SimpleNamespace(
            names=tuple(n for n in self.membership.views.current.names if n != name)
        )

    @property
    def faults(self) -> list[tuple[str, str]]:
        return [(e.fault, e.member) for e in self.kept.seen if isinstance(e, ev.Injected)]

    @property
    def notices(self) -> str:
        return "\n".join(e.message for e in self.kept.seen if isinstance(e, ev.Noticed))


FOUR = ("worker-0", "worker-1", "worker-2", "worker-3")


def test_no_kill_before_the_last_one_is_recovered_from() -> None:
    play = Play("kill worker every 10s; seed 1", *FOUR)
    play.tick()
    assert not play.faults
    play.tick(10.0)
    ((fault, victim),) = play.faults
    assert fault == "kill"
    assert play.handles[victim].got == [signal.SIGKILL]

    play.tick(10.0)  # not even noticed
    play.membership.views.joining = True
    play.bury(victim)
    play.tick(10.0)
    play.membership.views.joining = False
    play.tick(10.0)  # no step yet
    assert len(play.faults) == 1
    play.train()
    play.tick()
    assert len(play.faults) == 2


def test_two_workers_are_left() -> None:
    play = Play("kill member every 1s; seed 1", "worker-0", "worker-1", "server-0", "server-1")
    play.tick()
    play.tick(1.0)
    ((_, victim),) = play.faults
    assert victim.startswith("server")
    play.bury(victim)
    play.membership.pool.expects_members = True
    for _ in range(3):
        play.train()
        play.tick(1.0)
    assert len(play.faults) == 1
    assert "waits" not in play.notices
    play.membership.pool.expects_members = False
    for _ in range(3):
        play.train()
        play.tick(1.0)
    assert len(play.faults) == 1
    assert play.notices.count("waits: no member is left for it (a kill leaves two workers") == 1


def test_a_paused_member_continues_after_its_pause_or_at_the_end() -> None:
    play = Play("pause worker-1 2s every 10s", *FOUR)
    play.tick()
    play.tick(10.0)
    got = play.handles["worker-1"].got
    play.tick(1.9)
    assert got == [signal.SIGSTOP]
    play.tick(0.1)
    assert got == [signal.SIGSTOP, signal.SIGCONT]
    play.tick(8.0)
    assert got == [signal.SIGSTOP, signal.SIGCONT, signal.SIGSTOP]
    play.tick(ending=True)
    assert got[-2:] == [signal.SIGSTOP, signal.SIGCONT]
    play.tick(100.0, ending=True)
    assert len(play.faults) == 2


def test_the_same_seed_the_same_victims() -> None:
    def victims(seed: int) -> list[tuple[str, str]]:
        play = Play(f"pause member 1s every 2s; seed {seed}", *FOUR)
        for _ in range(40):
            play.tick(0.5)
        return play.faults

    assert len(victims(1)) >= 8
    assert victims(1) == victims(1)
    assert len({tuple(victims(seed)) for seed in range(5)}) > 1


def test_without_a_seed_one_is_drawn_and_reported() -> None:
    play = Play("kill worker", *FOUR)
    play.tick()
    assert play.notices == f"chaos: kill worker every 10s; seed {play.injector.chaos.seed}"


def test_a_kernel_that_refuses_is_reported_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(*_: object, **__: object) -> bool:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(injector_module, "cut_a_link", refuses)
    play = Play("cut link every 1s; pause worker-0 1s at 5s", *FOUR)
    for _ in range(12):
        play.tick(0.5)
    assert play.notices.count("links can't be cut here") == 1
    assert play.faults == [("pause", "worker-0")]


def test_links_stay_cut_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    cut: list[int] = []
    monkeypatch.setattr(
        injector_module, "cut_a_link", lambda pid, rng, *, but_port: cut.append(pid) or True
    )
    play = Play("cut link of worker-2 1s at 1s", *FOUR)
    for _ in range(20):
        play.tick(0.25)
    assert cut == [1002] * 4, "at 1, 1.25, 1.5 and 1.75 s"
    assert play.faults == [("cut link", "worker-2")]


def test_a_missing_link_is_reported_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(injector_module, "cut_a_link", lambda pid, rng, *, but_port: False)
    play = Play("cut link every 1s", *FOUR)
    for _ in range(8):
        play.tick(0.5)
    assert play.notices.count("no TCP connection") == 1
    assert not play.faults


def test_recoveries_are_counted_and_their_pauses_measured() -> None:
    play = Play("pause worker-1 2s at 1s; pause worker-2 1s at 10s", *FOUR)
    play.tick()
    play.tick(1.0)
    play.training_plan.step += 3
    play.tick(2.0)
    assert play.injector.summary(finished=False) == {"recovered": 0, "median_pause_s": None}
    play.training_plan.committed_step = 3
    play.tick(0.5)
    assert play.injector.summary(finished=False) == {"recovered": 1, "median_pause_s": 2.5}
    play.tick(10.0)
    assert play.injector.summary(finished=False)["recovered"] == 1
    assert play.injector.summary(finished=True)["recovered"] == 2
