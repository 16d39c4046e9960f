"""Gathers the agents of a cluster as a training run does, and has every pair of hosts measured.

Rank 0 of `manyhands doctor --cluster` is a ClusterProbe; every other process is an agent (hosts/agent.py)
that answers probes. Rendezvous, links, authentication and the roster of agents are those of training runs.
Pairs are measured one at a time, so that none disturbs another; with many hosts each pair gets less time.
"""

from __future__ import annotations

import itertools
import queue
import secrets
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

from manyhands.doctor.finding import Finding
from manyhands.errors import LinkError, ProtocolError, UsageError
from manyhands.hosts.agent_messages import (
    AgentHello,
    Measured,
    MeasureHost,
)
from manyhands.hosts.connect import LIMITS
from manyhands.hosts.host_facts import HostFacts, PairFacts
from manyhands.hosts.interfaces import reach
from manyhands.hosts.launchers.base import AGENT, LauncherContext
from manyhands.hosts.launchers.nodes import AgentNode
from manyhands.hosts.launchers.roster import AgentRoster, Refusal, RosterOwner, describe_entries
from manyhands.hosts.probe import REACH_S, STUCK_S, Probe
from manyhands.hosts.refused_peers import RefusedPeers
from manyhands.hosts.rendezvous import publish
from manyhands.hosts.scratch import Scratch
from manyhands.hosts.spec import ClusterSpec
from manyhands.hosts.timeouts import Timeouts
from manyhands.transport import Authority, Link, Listener
from manyhands.transport.fields import MessageSet

FIRST = MessageSet(AgentHello)
HELLO_S = 5.0
LATER_S = 10.0
"""Agents wait longer than rank 0, which reports who is missing."""
PAIR_S = 0.4
"""Duration of a measurement per direction; less if all pairs would take longer than ALL_S."""
ALL_S = 60.0
PRINT_AFTER_S = 4.0
LOST_S = 2.0
"""Time for the roster to report an agent lost after its link was closed."""


def agent_timeouts(wait_s: float) -> Timeouts:
    """Timeouts of the other processes."""
    return Timeouts(gather_s=wait_s + LATER_S, rejoin_s=LATER_S)


class ClusterProbe(RosterOwner):
    """Rank 0. Use as a context manager; call `end` with the exit code of all processes.

    `gathered` stays false: a rank that two processes have is always an error here. Agents of other versions
    may join: they are findings.
    """

    def __init__(
        self,
        spec: ClusterSpec,
        address: str,
        *,
        authority: Authority | None,
        wait_s: float,
        notify: Callable[[str], None],
    ) -> None:
        self.findings: list[Finding] = []
        """About processes that are missing, lost or were refused."""
        self._spec = spec
        self._wait_s = wait_s
        self._notify = notify
        self._keyed = authority is not None
        self._secret = secrets.token_hex(32)
        self._lost_ranks: set[int] = set()
        self._news: queue.SimpleQueue[Finding | BaseException] = queue.SimpleQueue()
        """Findings from the threads of links, or why no more agents can connect."""
        try:
            self._listener = Listener(
                address,
                credentials=authority.issue("coordinator") if authority else None,
                limits=LIMITS,
                on_refused=RefusedPeers(lambda text: self._news.put(_wrong_key(text))),
            )
        except LinkError as error:
            raise UsageError(
                f"{error} If another process of this cluster is rank 0, too, give each its own rank; else "
                "give all processes another address:  --control tcp://HOST:PORT"
            ) from error
        self._scratch = Scratch()
        self._probe: Probe | None = None
        folder = self._scratch.path
        timeouts = agent_timeouts(wait_s)
        context = LauncherContext(self._listener.address, folder, folder, timeouts, notify)
        self._roster = AgentRoster(spec, self, context, probe_secret=self._secret)
        self._own_facts = HostFacts.here(self._roster.machine.host, self._roster.own.reach)
        if spec.store is not None:
            publish(spec.store, self._listener.address, notify)
        self._listener.hand_over(self._accept, name="agent", on_error=self._news.put)

    def _accept(self, link: Link) -> None:
        with suppress(LinkError, ProtocolError):
            hello = link.recv(FIRST, timeout_s=HELLO_S).message
            if not self._keyed or link.peer.startswith(AGENT):
                self._roster.serve(link, hello)
        link.close()

    # The roster's owner -----------------------------------------------------------------------

    def on_refused(self, host: str, refusal: Refusal) -> None:
        self._news.put(Finding(host, False, refusal.problem, refusal.remedy))

    def on_lost(self, node: AgentNode, why: str) -> None:
        self._lost_ranks.add(node.entry.rank)
        self._news.put(
            Finding(
                node.host,
                False,
                f"{node.entry.name} joined and was lost: its process {why}",
                "Look at its output, and whether that host still runs.",
            )
        )

    # Gathering --------------------------------------------------------------------------------

    def gather(self) -> None:
        """Wait until all processes have joined or were refused, or time is up; missing ones are findings."""
        began, printed = time.monotonic(), False
        while len(self._roster.missing) > len(self.findings):
            now = time.monotonic()
            if now - began > self._wait_s:
                break
            if now - began > PRINT_AFTER_S and not printed:
                printed = True
                names = describe_entries(self._roster.missing)
                self._notify(f"waiting at {self._listener.address} for {names}")
            self._collect(0.2)
        waited_s = time.monotonic() - began
        in_time = f" within {waited_s:.0f} s" if waited_s > self._wait_s else ""
        instead = "; another process was refused" if self.findings and not in_time else ""
        for entry in self._roster.missing:
            if entry.rank in self._lost_ranks:
                continue
            self.findings.append(
                Finding(
                    describe_entries([entry]),
                    False,
                    f"did not connect to {self._listener.address}{in_time}{instead}",
                    "Was this command started there, with the same key? Does that host reach this address? "
                    f"Look at its output. More time:  --wait {max(60, round(2 * self._wait_s))}",
                )
            )

    def _collect(self, timeout_s: float) -> None:
        """Take findings from the threads of links."""
        with suppress(queue.Empty):
            while True:
                news = self._news.get(timeout=timeout_s)
                if isinstance(news, BaseException):
                    raise news
                self.findings.append(news)
                timeout_s = 0.0

    # Measuring --------------------------------------------------------------------------------

    @property
    def hosts(self) -> list[HostFacts]:
        """The coordinator's own host first."""
        found = {self._own_facts.host: replace(self._own_facts, ranks=(0,))}
        for node in self._ready:
            assert node.probe is not None
            facts = found.get(node.host, replace(node.probe.facts, host=node.host, ranks=()))
            found[node.host] = replace(facts, ranks=(*facts.ranks, node.entry.rank))
        return list(found.values())

    @property
    def _ready(self) -> list[AgentNode]:
        return [node for node in self._roster.agents if node.probe is not None]

    def measure(self) -> list[PairFacts]:
        """Measure every pair of hosts, one after the other."""
        joined = self._ready
        own_host = next((node.link.own_host for node in joined if node.link.own_host), "")
        own = reach(own_host or "127.0.0.1")  # one host has reached us there, so others will
        facts = self._own_facts
        self._own_facts = replace(facts, address=own.address, interface=own.interface)
        self._probe = Probe(facts.host, own.address, self._secret)
        # One process of each host.
        by_host = {node.host: node for node in reversed(joined) if node.host != facts.host}
        nodes = sorted(by_host.values(), key=lambda node: node.entry.rank)
        num_pairs = len(nodes) * (len(nodes) + 1) // 2
        seconds = min(PAIR_S, ALL_S / max(1, num_pairs) / 2)
        both = itertools.combinations([None, *nodes], 2)
        pairs = [self._measure(self._probe, one, other, seconds) for one, other in both if other]
        self._collect(0.0)
        return [pair for pair in pairs if pair is not None]

    def _measure(
        self, probe: Probe, one: AgentNode | None, other: AgentNode, seconds: float
    ) -> PairFacts | None:
        """Measure between two hosts; `one` is None for this one. None if one of them is lost."""
        if other.lost or (one is not None and one.lost):
            return None
        if one is None:
            pair = probe.measure(other.host, _address(other), seconds)
            return self._with_way_back(pair, other, probe.address)
        measured = self._ask(one, other.host, _address(other), seconds)
        return measured and self._with_way_back(measured, other, _address(one))

    def _with_way_back(self, pair: PairFacts, other: AgentNode, address: str) -> PairFacts:
        back = self._ask(other, pair.one, address, 0.0)
        return pair if back is None else replace(pair, trouble_back=back.trouble)

    def _ask(self, node: AgentNode, other: str, address: str, seconds: float) -> PairFacts | None:
        """Have an agent measure its connection to another host; None if the agent is lost."""
        try:
            request = MeasureHost(other, address, seconds)
            limit_s = 2 * seconds + REACH_S + 2 * STUCK_S
            return node.ask(request, Measured, timeout_s=limit_s).pair
        except LinkError:
            self._lose(node)
            return None

    def _lose(self, node: AgentNode) -> None:
        """Close the link of an agent that does not answer; the roster then reports it lost."""
        node.link.close()
        self._collect(LOST_S)

    # The end ----------------------------------------------------------------------------------

    def end(self, code: int) -> None:
        self._roster.end(code)

    def __enter__(self) -> ClusterProbe:
        return self

    def __exit__(self, *_: object) -> None:
        self._roster.ended.set()
        self._listener.close()
        if self._probe is not None:
            self._probe.close()
        for node in self._roster.agents:
            node.link.close()
        self._scratch.close()


def _address(node: AgentNode) -> str:
    assert node.probe is not None
    return node.probe.address


def _wrong_key(text: str) -> Finding:
    return Finding(
        "key", False, text, "Give the same MANYHANDS_KEY, or the same --key-file, to all processes."
    )
