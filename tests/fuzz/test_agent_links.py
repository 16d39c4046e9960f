"""An agent that sends anything to the coordinator, and a coordinator that sends anything to an agent."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import agent_program
import pytest
from agent_program import KEY, spec
from generator import Variant
from test_ps_workers import NONSENSE, ends, say
from variants import ANSWER_S, Dialect, Watched, sample, variants, watching

from manyhands.coordinator.coordinator import Coordinator
from manyhands.coordinator.inbox import ThreadFailed
from manyhands.errors import LinkError, LinkTimeout
from manyhands.hosts.agent_messages import (
    FROM_AGENT,
    TO_AGENT,
    AgentAdmitted,
    AgentHello,
    AgentReady,
)
from manyhands.hosts.launchers.agents import AgentLauncher
from manyhands.hosts.machine import Machine
from manyhands.transport import Link, Listener, connect

AGENT = Dialect.of("agent to coordinator", FROM_AGENT, payloads={"MemberOutput": (b"x",)})
COORDINATOR = Dialect.of("coordinator to agent", TO_AGENT)
NOT_ADMITTED = ("AgentAdmitted", "AgentRefused", "RankTaken")
"""Answers to an agent's first message."""
ENDS_AGENT = ("EndAgent", "AgentRefused")
"""After these an agent ends, as it should."""
VOCABULARY: dict[str, Any] = {
    "name": ("worker-0", "rank-1"),
    "role": ("worker",),
    "rank": (1, 1, 2),
    "slots": (1,),
    "code": (0, 3),
    "address": ("tcp://127.0.0.1:1",),
    "beat_s": (0.2, 1.0),
    "host_s": (5.0,),
    "entry": ("this", "no.such.module"),
    "token": ("fuzzed",),
    "threads": (1,),
    "scratch": (None,),
    "timeouts": ({},),
    "seconds": (0.0, 0.1),
}


# From an agent --------------------------------------------------------------------------------------


def join(address: str, *, process: str = "p") -> Link:
    """A connection of an agent that was admitted."""
    link = connect(address, credentials=KEY.issue("agent-here"), timeout_s=ANSWER_S)
    link.send(AgentHello(Machine.here(), spec(1).me, process))
    assert isinstance(link.recv(TO_AGENT, timeout_s=ANSWER_S).message, AgentAdmitted)
    return link


def attack_coordinator(these: list[Variant], folder: Path) -> None:
    launcher = AgentLauncher(spec(0))
    with (
        watching() as watched,
        Coordinator(
            launcher, logs=folder, control="tcp://127.0.0.1:0", authority=KEY
        ) as coordinator,
    ):
        address = f"tcp://127.0.0.1:{coordinator.port}"
        for number, variant in enumerate(these):
            if variant.kind == "AgentHello" or not number % 5:
                link = connect(address, credentials=KEY.issue("agent-here"), timeout_s=ANSWER_S)
            else:
                link = join(address)
                link.send(AgentReady(True))
            with link:
                say(link, variant, NONSENSE)
                ends(link, variant)
            while (happening := coordinator.next(0.0)) is not None:
                assert not isinstance(happening, ThreadFailed), f"{happening} after {variant}"
            watched.check(variant)
        join(address).close()
        coordinator.stop()


def test_an_agent_sends_anything(tmp_path: Path) -> None:
    attack_coordinator(sample(variants(AGENT, vocabulary=VOCABULARY), each=4), tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(2))
def test_an_agent_sends_everything(seed: int, tmp_path: Path) -> None:
    everything = variants(AGENT, seed=seed, vocabulary=VOCABULARY, examples=60)
    attack_coordinator(sample(everything, each=100, seed=seed), tmp_path)


# To an agent ----------------------------------------------------------------------------------------


class AgentProcess:
    """A real agent, started again whenever it has ended."""

    def __init__(self, folder: Path, listener: Listener, watched: Watched) -> None:
        self._folder, self._listener, self._watched = folder, listener, watched
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def out(self) -> str:
        return (self._folder / "out").read_text(errors="replace")

    def accept(self) -> Link:
        """The agent's next connection, and its hello."""
        if self._process is None or self._process.poll() is not None:
            with open(self._folder / "out", "wb") as out:
                self._process = subprocess.Popen(
                    [sys.executable, agent_program.__file__, self._listener.address],
                    stdout=out,
                    stderr=subprocess.STDOUT,
                )
        deadline = time.monotonic() + 3 * ANSWER_S
        while True:
            assert self._process.poll() is None, f"ended: {self.out}"
            try:
                link = self._listener.accept(timeout_s=0.2)
            except LinkTimeout:
                assert time.monotonic() < deadline, f"it does not connect: {self.out}"
                continue
            assert isinstance(link.recv(FROM_AGENT, timeout_s=ANSWER_S).message, AgentHello)
            self._watched.add(self._process.pid)
            return link

    def check(self, variant: Variant) -> None:
        assert self._process is not None
        assert "Traceback" not in self.out, f"{self.out} after {variant}"
        if variant.kind in ENDS_AGENT:
            self.close()
        else:
            assert self._process.poll() is None, f"it has ended after {variant}: {self.out}"
        self._watched.check(variant)

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()


def attack_agent(these: list[Variant], folder: Path) -> None:
    with (
        watching() as watched,
        Listener("tcp://127.0.0.1:0", credentials=KEY.issue("coordinator")) as listener,
    ):
        agent = AgentProcess(folder, listener, watched)
        try:
            for variant in these:
                with agent.accept() as link:
                    if variant.kind not in NOT_ADMITTED:
                        link.send(
                            AgentAdmitted(
                                "here", "there", None, "fuzzed", "/no", 1.0, 15.0, "secret"
                            )
                        )
                        try:
                            answer = link.recv(FROM_AGENT, timeout_s=ANSWER_S).message
                        except LinkError as error:
                            raise AssertionError(
                                f"{error}\n{agent.out}\nbefore {variant}"
                            ) from error
                        assert isinstance(answer, AgentReady)
                    say(link, variant, NONSENSE)
                    ends(link, variant)
                agent.check(variant)
        finally:
            agent.close()


def test_a_coordinator_sends_anything_to_an_agent(tmp_path: Path) -> None:
    these = sample(variants(COORDINATOR, vocabulary=VOCABULARY), each=1)
    # An agent that was not admitted waits for a second before it connects again.
    few = [each for each in these if each.kind not in NOT_ADMITTED or not each.flaw]
    attack_agent(few, tmp_path)


@pytest.mark.long
def test_a_coordinator_sends_everything_to_an_agent(tmp_path: Path) -> None:
    everything = variants(COORDINATOR, vocabulary=VOCABULARY, examples=30)
    attack_agent(sample(everything, each=6), tmp_path)
