"""The agents that have joined: admits them, reads their links, sends beats, and ends them.

An agent that connects sends AgentHello and is admitted, refused, or told that its rank is taken. Each agent
that is admitted is an AgentNode (nodes.py), and one thread reads its link. When the link breaks or falls
silent, the node is dropped; an agent that connects again is a new node. The owner of a roster decides which
agents may join: a launcher, or `manyhands doctor --cluster`.

Cost: one thread and one small message a second for each agent.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass

from manyhands.errors import LinkError
from manyhands.hosts.agent_messages import (
    AgentAdmitted,
    AgentHello,
    AgentRefused,
    EndAgent,
    LinkBeat,
    RankTaken,
)
from manyhands.hosts.launchers.base import LauncherContext
from manyhands.hosts.launchers.nodes import AgentNode, LocalNode, Node
from manyhands.hosts.log_stream import LogFiles
from manyhands.hosts.machine import Machine
from manyhands.hosts.spec import EVALUATOR, ClusterSpec, Entry
from manyhands.threads import describe, start_thread
from manyhands.transport import Link

logger = logging.getLogger("manyhands.hosts")

END_S = 3.0
"""Time for agents to close their links after the end."""


@dataclass(frozen=True)
class Refusal:
    """Reason why an agent can't join."""

    problem: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.problem}. {self.remedy}"


class RosterOwner:
    """Decides which agents may join. Its methods are called in the threads of the agents' links."""

    gathered = False
    """If true, the run has begun: an agent whose rank is taken waits instead of being refused."""

    def refusal(self, hello: AgentHello) -> Refusal | None:
        """Return why this agent can't join, or None if it can."""
        return None

    def on_refused(self, host: str, refusal: Refusal) -> None: ...

    def on_ready(self, node: AgentNode) -> None: ...

    def on_lost(self, node: AgentNode, why: str) -> None: ...

    def on_beat(self) -> None:
        """Called about once a second."""


class AgentRoster:
    def __init__(
        self,
        spec: ClusterSpec,
        owner: RosterOwner,
        context: LauncherContext,
        *,
        probe_secret: str = "",
    ) -> None:
        """`probe_secret`: if not empty, this is `manyhands doctor`, and agents start probes with it."""
        self.context = context
        self.machine = Machine.here()
        self.own = LocalNode(spec.me, self.machine)
        """The coordinator's own host."""
        self.ended = threading.Event()
        self._spec = spec
        self._owner = owner
        self._probe_secret = probe_secret
        self._nodes: list[Node] = [self.own]
        """By rank."""
        self._host_names = {self.machine.identity: self.machine.host}
        self._lock = threading.Lock()
        self._logs = LogFiles(context.logs, context.notify)
        self._token = secrets.token_hex(8)
        self._marker = context.logs / f".{self._token}"
        """The file by which agents recognize the run folder."""
        self._marker.touch()
        start_thread(self._beat, name="beat", on_error=context.on_error)

    @property
    def nodes(self) -> list[Node]:
        with self._lock:
            return list(self._nodes)

    @property
    def agents(self) -> list[AgentNode]:
        return [node for node in self.nodes if isinstance(node, AgentNode)]

    @property
    def missing(self) -> list[Entry]:
        """The announced entries that have no node yet."""
        present = {node.entry.rank for node in self.nodes if node.ready and not node.lost}
        expected = (entry for entry in self._spec.entries if entry.role != EVALUATOR)
        return [entry for entry in expected if entry.rank not in present]

    def serve(self, link: Link, hello: AgentHello) -> None:
        """Admit or refuse an agent, and handle its messages until it is gone."""
        try:
            node = self._admit(link, hello)
        except LinkError:
            link.close()  # it is gone
            return
        if node is None:
            return
        try:
            why = node.read_messages(self._owner.on_ready)
        except Exception as error:  # any error: its members count as dead, not as silent
            logger.error("messages of %s can't be handled any more", node.host, exc_info=error)
            why = f"failed: its messages can't be handled any more ({describe(error)})"
        with self._lock:
            present = node in self._nodes
            if present:
                self._nodes.remove(node)
        node.drop()
        if present and not self.ended.is_set():
            self._owner.on_lost(node, why)

    def end(self, code: int) -> None:
        """End the agents with this exit code."""
        self.ended.set()
        for node in self.agents:
            node.send(EndAgent(code))
        deadline = time.monotonic() + END_S
        for node in self.agents:
            while not node.lost and time.monotonic() < deadline:
                time.sleep(0.01)
            node.link.close()

    def remove_marker(self) -> None:
        self._marker.unlink(missing_ok=True)

    def _admit(self, link: Link, hello: AgentHello) -> AgentNode | None:
        """Admit an agent, or tell it why not."""
        if (refusal := self._wrong_command(hello) or self._owner.refusal(hello)) is not None:
            self._refuse(link, hello.machine.host, refusal)
            return None
        with self._lock:
            if self.ended.is_set():
                link.close()
                return None
            host = self._name_of(hello.machine)
            node = AgentNode(hello, host, link, self.context, self._logs)
            old = next((n for n in self._nodes if n.entry.rank == hello.entry.rank), None)
            if isinstance(old, AgentNode) and old.process == node.process:
                self._nodes.remove(old)  # the agent itself has given up that link
                old.drop()
                old = None
            if old is None:
                self._nodes.append(node)
                self._nodes.sort(key=lambda node: node.entry.rank)
        if old is not None:
            self._refuse_rank(node, old)
            return None
        same_host = hello.machine.identity == self.machine.identity
        node.link.send(
            AgentAdmitted(
                host,
                self.machine.host,
                str(self.context.scratch) if same_host else None,
                self._token,
                str(self._marker.resolve()),
                self.context.timeouts.beat_s,
                self.context.timeouts.host_s,
                self._probe_secret,
            )
        )
        return node

    def _wrong_command(self, hello: AgentHello) -> Refusal | None:
        if hello.doctor == bool(self._probe_secret):
            return None
        what = {True: "runs  manyhands doctor --cluster", False: "trains"}
        return Refusal(
            f"{hello.machine.host} ({hello.entry.name}) {what[hello.doctor]}, and {self.machine.host} "
            f"{what[not hello.doctor]}",
            "Start the same command on every host.",
        )

    def _refuse_rank(self, node: AgentNode, old: Node) -> None:
        """Refuse an agent whose rank is taken. The agent that has it may just have died, so wait first for
        another message from it."""
        began = time.monotonic()
        while not self._owner.gathered and not old.lost:
            if not isinstance(old, AgentNode) or old.last_message_at > began:
                problem = (
                    f"{node.entry.name} is both the process on {old.host} and one on {node.host}"
                )
                remedy = "Give each process a rank of its own: RANK=0, 1, 2, ..."
                self._refuse(node.link, node.host, Refusal(problem, remedy))
                return
            time.sleep(0.05)
        node.send(RankTaken(old.host))
        node.link.close()

    def _refuse(self, link: Link, host: str, refusal: Refusal) -> None:
        with suppress(LinkError):
            link.send(AgentRefused(str(refusal)))
        self._owner.on_refused(host, refusal)
        with suppress(LinkError):
            link.recv(timeout_s=END_S)  # it closes the link when it has read that
        link.close()

    def _name_of(self, machine: Machine) -> str:
        """Return the machine's name, with a number if another machine has the same."""
        others = {
            name for identity, name in self._host_names.items() if identity != machine.identity
        }
        name, number = machine.host, 2
        while name in others:
            name, number = f"{machine.host}~{number}", number + 1
        return self._host_names.setdefault(machine.identity, name)

    def _beat(self) -> None:
        while not self.ended.wait(self.context.timeouts.beat_s):
            for node in self.agents:
                if node.ready:  # else it waits for another message
                    node.send(LinkBeat())
            self._owner.on_beat()


def describe_entries(entries: Iterable[Entry]) -> str:
    """`rank-1, rank-2 (gpu-b)`"""
    return ", ".join(entry.name + (f" ({entry.host})" if entry.host else "") for entry in entries)
