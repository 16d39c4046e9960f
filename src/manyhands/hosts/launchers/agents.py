"""Starts members on many hosts: each host has an agent, which starts and ends members for the coordinator.

The launcher waits until the announced hosts have joined (roster.py), and places each member on the host
with the fewest members of its role. Starting a member takes one round trip to its agent (nodes.py). An agent
whose link breaks or falls silent counts as lost, and so do its members. The agent kills them when it loses
the coordinator, so none keeps running alone.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from manyhands.errors import ManyhandsError, UsageError
from manyhands.events.units import plural
from manyhands.hosts.agent_messages import AgentHello, KillMember
from manyhands.hosts.interfaces import Endpoint, is_any, is_loopback, reach, way_out
from manyhands.hosts.launchers.base import Handle, Launcher, LauncherContext, StartRequest
from manyhands.hosts.launchers.nodes import AgentNode, Node
from manyhands.hosts.launchers.roster import AgentRoster, Refusal, RosterOwner, describe_entries
from manyhands.hosts.machine import unfit
from manyhands.hosts.rendezvous import publish
from manyhands.hosts.spec import ClusterSpec, Entry
from manyhands.hosts.view import SERVER, WORKER
from manyhands.transport import Link, parse_address


class AgentLauncher(Launcher, RosterOwner):
    """Starts members on the hosts of a ClusterSpec: on this one directly, on the others through agents."""

    kind = "env"
    again = "--on env"
    ask_every_s = 10.0
    """Interval of messages that name the missing hosts."""

    def __init__(
        self, spec: ClusterSpec, *, least: int | None = None, shares_memory: bool = False
    ) -> None:
        """`least`: the number of workers that is enough to begin after the grace period. `shares_memory`: if
        true, members of other hosts can't join a run that began inside one host."""
        self.spec = spec
        self.gathered = False
        """If true, training may begin, or has begun."""
        self._least = least
        self._shares_memory = shares_memory
        self._refused = ""
        """Reason why training can't begin."""
        self._roster: AgentRoster | None = None
        self._began = time.monotonic()
        self._asked = self._began

    @property
    def roster(self) -> AgentRoster:
        assert self._roster is not None, "attached to a coordinator"
        return self._roster

    @property
    def context(self) -> LauncherContext:
        return self.roster.context

    # Gathering --------------------------------------------------------------------------------

    def attach(self, context: LauncherContext) -> None:
        self._began = self._asked = time.monotonic()
        self._roster = AgentRoster(self.spec, self, context)
        self._roster.own.reach = _own_endpoint(context.address)
        if self.spec.store is not None:
            publish(self.spec.store, context.address, context.notify)

    def complete(self) -> bool:
        """Return whether all announced hosts have joined, or enough of them after the grace period. Stays
        true."""
        if self.gathered:
            return True
        if self._refused:
            raise UsageError(self._refused)
        waited = time.monotonic() - self._began
        missing = self.roster.missing
        if not missing or (self._enough(missing) and waited > self._grace_s):
            self.gathered = True
            self.spans_hosts = len({node.host for node in self.roster.nodes}) > 1
            if self.spans_hosts:
                self.context.notify(self._introduction())
            return True
        if waited > self.context.timeouts.gather_s:
            raise UsageError(self._too_late(missing))
        if time.monotonic() - self._asked > self.ask_every_s:
            self._asked = time.monotonic()
            self.context.notify(self._waiting(missing))
        return False

    def _enough(self, missing: Sequence[Entry]) -> bool:
        """Return whether training may begin without the missing entries."""
        if self._least is None or any(entry.role == SERVER for entry in missing):
            return False
        return self.slots(WORKER) >= self._least

    @property
    def _grace_s(self) -> float:
        """Time to wait for the rest when enough have joined."""
        return self.context.timeouts.grace_s

    def _too_late(self, missing: Sequence[Entry]) -> str:
        return (
            f"Not all processes joined within {self.context.timeouts.gather_s:.0f} s: "
            f"{describe_entries(missing)} of {self.spec.size} did not connect to {self.context.address}. "
            "Were they started, with the same command? Can they reach that address? Give another with  "
            "--control tcp://HOST:PORT."
        )

    def _waiting(self, missing: Sequence[Entry]) -> str:
        return f"waiting at {self.context.address} for {describe_entries(missing)}"

    def _introduction(self) -> str:
        """List the hosts and the interface, printed once."""
        parts, everywhere = [], self.roster.nodes
        for host in dict.fromkeys(node.host for node in everywhere):
            nodes = [node for node in everywhere if node.host == host]
            num_slots = sum(node.entry.slots for node in nodes)
            parts.append(f"{host} ({nodes[0].machine}, {plural(num_slots, 'slot')})")
        return f"hosts: {', '.join(parts)}; reached over {self.roster.own.reach}"

    def accept_agent(self, link: Link, hello: AgentHello) -> None:
        self.roster.serve(link, hello)

    # The roster's owner: called in the threads of agents' links -------------------------------

    def refusal(self, hello: AgentHello) -> Refusal | None:
        machine, own = hello.machine, self.roster.machine
        agent = f"{machine.host} ({hello.entry.name})"
        if problem := unfit(own.versions, machine.versions):
            return Refusal(f"{agent} can't take part: {problem}", "Install the same on both.")
        other_host = machine.identity != own.identity
        if self.gathered and self._shares_memory and not self.spans_hosts and other_host:
            return Refusal(
                f"{machine.host} joins too late: all members are on {own.host} and share its memory",
                "Begin with several hosts, or with transport=tcp in the strategy.",
            )
        return None

    def on_refused(self, host: str, refusal: Refusal) -> None:
        if self.gathered:
            self.context.notify(str(refusal))
        else:
            self._refused = self._refused or str(refusal)

    def on_ready(self, node: AgentNode) -> None:
        own_host = node.link.own_host
        if own_host and not is_loopback(own_host) and not self.gathered:
            self.roster.own.reach = reach(own_host)  # other hosts reach this one there, too
        self._on_joined(node)

    def _on_joined(self, node: AgentNode) -> None:
        if self.gathered:
            self.context.notify(f"{node.host} has joined, with {node.machine}")

    def on_lost(self, node: AgentNode, why: str) -> None:
        self.context.notify(f"{node.host} is lost: its agent {why}")

    # Members ----------------------------------------------------------------------------------

    def slots(self, role: str) -> int:
        return sum(node.free for node in self._fitting(role))

    def has_room(self, workers: int, servers: int) -> bool:
        shared = 0 if self.spec.servers else servers  # else they have slots of their own
        if self.slots(WORKER) >= workers + shared and self.slots(SERVER) >= servers:
            return True
        if time.monotonic() - self._asked > self.ask_every_s:
            self._asked = time.monotonic()
            self.context.notify(f"waiting for free slots: {workers + servers} are needed")
        return False

    def start(self, request: StartRequest) -> Handle:
        """Start a member on the host with the fewest of its role; of several, the first by rank."""
        tried: set[int] = set()
        trouble = f"{request.name} can't be started: no host has a free slot"
        while True:
            nodes = self._fitting(request.role)
            free = [node for node in nodes if node.free > 0 and id(node) not in tried]
            if not free:
                raise ManyhandsError(trouble)
            node = min(free, key=lambda node: self._num_on(node.host, request.role))
            tried.add(id(node))
            num_slots = sum(n.entry.slots for n in self.roster.nodes if n.host == node.host)
            try:
                return node.place(request, threads=max(1, node.machine.cores // max(1, num_slots)))
            except ManyhandsError as error:
                trouble = str(error)

    def _fitting(self, role: str) -> list[Node]:
        any_role = not self.spec.servers
        return [node for node in self.roster.nodes if node.takes(role, any_role=any_role)]

    def _num_on(self, host: str, role: str) -> int:
        return sum(
            node.members[name][2] == role
            for node in self.roster.nodes
            if node.host == host
            for name in node.running
        )

    def close(self) -> None:
        if self._roster is None:
            return
        self._roster.own.launcher.close()
        for node in self.roster.agents:
            for name in node.running:
                node.send(KillMember(name))
        deadline = time.monotonic() + self.context.timeouts.host_s
        for node in self.roster.agents:
            while node.running and not node.lost and time.monotonic() < deadline:
                time.sleep(0.01)
        self.roster.remove_marker()

    def end(self, code: int) -> None:
        """End the agents with the run's exit code."""
        if self._roster is not None:
            self._roster.end(code)


def _own_endpoint(address: str) -> Endpoint:
    """Return where other hosts reach this one, derived from the coordinator's address."""
    where = parse_address(address)
    host = "127.0.0.1" if where.path else where.host
    return reach(way_out() if is_any(host) else host)
