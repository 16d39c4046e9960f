"""Members on many hosts: each host has an agent, which starts and ends members for the coordinator.

A *post* (posts.py) is a place where members can be started: the coordinator's own host, or that of an agent
(hosts/agent.py), known by its link. What is said on that link, as the `kind` of each message:

    agent:        agent, settled, started, unstarted, exited, log (its payload), leaving, beat
    coordinator:  engaged or refused or taken; then start, terminate, kill, beat, end

A post whose link is lost or silent is given up, and its members count as dead; its agent kills them when it
misses the coordinator, so that none goes on alone. When it dials again it is a new post.

Cost: one thread and one small message a second for each agent; a start is a round trip.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from manyhands.errors import LinkError, ManyhandsError, ProtocolError, UsageError
from manyhands.hosts.interfaces import Endpoint, is_any, is_loopback, reach, way_out
from manyhands.hosts.launchers.base import Handle, Launcher, LauncherContext, StartRequest
from manyhands.hosts.launchers.posts import AgentNode, LocalNode, Node
from manyhands.hosts.log_stream import LogFiles
from manyhands.hosts.machine import Machine, unfit
from manyhands.hosts.messages import AgentHello
from manyhands.hosts.rendezvous import publish
from manyhands.hosts.spec import EVALUATOR, ClusterSpec, Entry
from manyhands.hosts.view import SERVER, WORKER
from manyhands.threads import describe, start_thread
from manyhands.transport import Link, parse_address
from manyhands.transport.fields import read

logger = logging.getLogger("manyhands.hosts")

END_S = 3.0
"""Agents that were told of the end have hung up."""


class AgentLauncher(Launcher):
    """Members where a ClusterSpec says: on this host, and by agents on the others."""

    kind = "env"
    again = "--on env"
    ask_every_s = 10.0
    """How often it is said who is waited for."""

    def __init__(
        self, spec: ClusterSpec, *, least: int | None = None, shares_memory: bool = False
    ) -> None:
        """`least`: so many workers are enough to begin with, after a while. `shares_memory`: members of a
        run that begins inside one host can't be joined by others."""
        self.spec = spec
        self._least = least
        self._shares_memory = shares_memory
        self._machine = Machine.here()
        self._own = LocalNode(spec.me, self._machine)
        self._posts: list[Node] = [self._own]
        self._hosts = {self._machine.identity: self._machine.host}
        """The name of each machine."""
        self._refused = ""
        self._lock = threading.Lock()
        self._ground: LauncherContext | None = None
        self._logs: LogFiles | None = None
        self._began = time.monotonic()
        self._asked = self._began
        self._complete = False
        self._over = threading.Event()
        self._token = secrets.token_hex(8)

    @property
    def ground(self) -> LauncherContext:
        assert self._ground is not None, "attached to a coordinator"
        return self._ground

    # Who is there -----------------------------------------------------------------------------

    def attach(self, ground: LauncherContext) -> None:
        self._ground = ground
        self._began = self._asked = time.monotonic()
        self._logs = LogFiles(ground.logs, ground.tell)
        (ground.logs / f".{self._token}").touch()
        self._own.reach = self._reach(ground.address)
        if self.spec.store is not None:
            publish(self.spec.store, ground.address, ground.tell)
        start_thread(self._beat, name="beat", on_error=ground.on_error)

    def complete(self) -> bool:
        """All that were announced are there; or enough, after a while. A run that began goes on without."""
        if self._complete:
            return True
        if self._refused:
            raise UsageError(self._refused)
        waited = time.monotonic() - self._began
        missing = self._missing
        if not missing or (self._enough(missing) and waited > self._grace_s):
            self._complete = True
            self.spans_hosts = len({post.host for post in self._all}) > 1
            if self.spans_hosts:
                self.ground.tell(self._introduction())
            return True
        if waited > self.ground.timeouts.gather_s:
            raise UsageError(self._too_late(missing))
        if time.monotonic() - self._asked > self.ask_every_s:
            self._asked = time.monotonic()
            self.ground.tell(self._waiting(missing))
        return False

    def _enough(self, missing: Sequence[Entry]) -> bool:
        """Whether training may begin without these."""
        if self._least is None or any(entry.role == SERVER for entry in missing):
            return False
        return self.slots(WORKER) >= self._least

    @property
    def _grace_s(self) -> float:
        """How long to wait for the rest when there are enough."""
        return self.ground.timeouts.grace_s

    def _too_late(self, missing: Sequence[Entry]) -> str:
        return (
            f"Not all came within {self.ground.timeouts.gather_s:.0f} s: {_names(missing)} of "
            f"{self.spec.size} processes did not connect to {self.ground.address}. Were they started, with "
            "the same command? Can they reach that address? Give another with  --control tcp://HOST:PORT."
        )

    def _waiting(self, missing: Sequence[Entry]) -> str:
        return f"waiting at {self.ground.address} for {_names(missing)}"

    @property
    def _missing(self) -> list[Entry]:
        there = {post.entry.rank for post in self._all if post.settled and not post.lost}
        wanted = (entry for entry in self.spec.entries if entry.role != EVALUATOR)
        return [entry for entry in wanted if entry.rank not in there]

    def _introduction(self) -> str:
        """Who takes part, and over which interface, said once."""
        told = []
        everywhere = self._all
        for host in dict.fromkeys(post.host for post in everywhere):
            posts = [post for post in everywhere if post.host == host]
            num_slots = sum(post.entry.slots for post in posts)
            told.append(f"{host} ({posts[0].machine}, {num_slots} slot{'s' * (num_slots != 1)})")
        return f"hosts: {', '.join(told)}; reached over {self._own.reach}"

    def welcome(self, link: Link, hello: Mapping[str, Any]) -> None:
        try:
            post = self._engage(link, hello)
        except ProtocolError as error:
            link.close()
            self.ground.tell(f"an agent of {link.peer} was refused: {error}")
            return
        except LinkError:
            link.close()  # it is gone
            return
        if post is None:
            return
        try:
            why = post.listen(self._on_settled)
        except Exception as error:  # whatever it is, its members count as dead, and not as silent
            logger.error("%s can't be listened to any more", post.host, exc_info=error)
            why = f"can't be listened to any more ({describe(error)})"
        with self._lock:
            there = post in self._posts
            if there:
                self._posts.remove(post)
        post.give_up()
        if there and not self._over.is_set():
            self._on_lost(post, why)

    def _on_lost(self, post: AgentNode, why: str) -> None:
        self.ground.tell(f"{post.host} is lost: its agent {why}")

    def _on_settled(self, post: AgentNode) -> None:
        """It can start members now."""
        if not is_loopback(post.link.own_host or "127.0.0.1") and not self._complete:
            self._own.reach = reach(post.link.own_host)  # where it has found us, others will
        self._on_come(post)

    def _on_come(self, post: AgentNode) -> None:
        if self._complete:
            self.ground.tell(f"{post.host} has come, with {post.machine}")

    def _engage(self, link: Link, hello: Mapping[str, Any]) -> AgentNode | None:
        """Let an agent in, or tell it why not."""
        agent = read(AgentHello, hello)
        machine, entry = agent.machine, agent.entry
        if problem := unfit(self._machine.versions, machine.versions):
            text = f"{machine.host} ({entry.name}) can't take part: {problem}. Install the same on both."
            self._turn_away(link, text)
            return None
        same = machine.identity == self._machine.identity
        if self._complete and self._shares_memory and not self.spans_hosts and not same:
            text = (
                f"{machine.host} comes too late: all members are on {self._machine.host} and share its "
                "memory. Begin with several hosts, or with transport=tcp in the strategy."
            )
            self._turn_away(link, text)
            return None
        with self._lock:
            if self._ground is None or self._logs is None or self._over.is_set():
                link.close()
                return None
            host = self._name_of(machine)
            post = AgentNode(
                *(entry, machine, host, link, self._ground),
                process=agent.process,
                logs=self._logs,
            )
            old = next((p for p in self._posts if p.entry.rank == entry.rank), None)
            if isinstance(old, AgentNode) and old.process == post.process:
                self._posts.remove(old)  # it has given up that link itself
                old.give_up()
                old = None
            if old is None:
                self._posts.append(post)
                self._posts.sort(key=lambda post: post.entry.rank)
        if old is not None:
            self._turn_down(post, old)
            return None
        link.send(
            {
                "kind": "engaged",
                "host": host,
                "coordinator": self._machine.host,
                "scratch": str(self._ground.scratch) if same else None,
                "token": self._token,
                "marker": str((self._ground.logs / f".{self._token}").resolve()),
                "beat_s": self._ground.timeouts.beat_s,
                "host_s": self._ground.timeouts.host_s,
            }
        )
        return post

    def _turn_down(self, post: AgentNode, old: Node) -> None:
        """Its rank is another's. That may be one that died just now; not if it is heard again."""
        asked = time.monotonic()
        while not self._complete and not old.lost:
            if not isinstance(old, AgentNode) or old.heard > asked:
                text = (
                    f"{post.entry.name} is the process on {old.host} already, and one on {post.host}, too. "
                    "Give each process a rank of its own: RANK=0, 1, 2, ..."
                )
                self._turn_away(post.link, text)
                return
            time.sleep(0.05)
        post.say("taken", by=old.host)
        post.link.close()

    def _turn_away(self, link: Link, text: str) -> None:
        with suppress(LinkError):
            link.send({"kind": "refused", "reason": text})
        if self._complete:
            self.ground.tell(text)
        else:
            self._refused = self._refused or text
        with suppress(LinkError):
            link.recv(timeout_s=END_S)  # it hangs up when it has read that
        link.close()

    def _name_of(self, machine: Machine) -> str:
        """The machine's name, with a number if another machine has the same."""
        taken = {name for identity, name in self._hosts.items() if identity != machine.identity}
        name, number = machine.host, 2
        while name in taken:
            name, number = f"{machine.host}~{number}", number + 1
        return self._hosts.setdefault(machine.identity, name)

    def _reach(self, address: str) -> Endpoint:
        where = parse_address(address)
        host = "127.0.0.1" if where.path else where.host
        return reach(way_out() if is_any(host) else host)

    def _beat(self) -> None:
        while not self._over.wait(self.ground.timeouts.beat_s):
            for post in self._remote:
                if post.settled:  # else it waits for another word
                    post.say("beat")
            self._on_beat()

    def _on_beat(self) -> None:
        """About once a second."""

    # Members ----------------------------------------------------------------------------------

    def slots(self, role: str) -> int:
        return sum(post.free for post in self._fitting(role))

    def room(self, workers: int, servers: int) -> bool:
        shared = 0 if self.spec.servers else servers  # else they have slots of their own
        if self.slots(WORKER) >= workers + shared and self.slots(SERVER) >= servers:
            return True
        if time.monotonic() - self._asked > self.ask_every_s:
            self._asked = time.monotonic()
            self.ground.tell(f"waiting for free slots: {workers + servers} are needed")
        return False

    def start(self, start: StartRequest) -> Handle:
        """On the host that has the fewest of its role; of several, the first by rank."""
        tried: set[int] = set()
        trouble = f"{start.name} can't be started: no host has a free slot"
        while True:
            posts = self._fitting(start.role)
            free = [post for post in posts if post.free > 0 and id(post) not in tried]
            if not free:
                raise ManyhandsError(trouble)
            post = min(free, key=lambda post: self._num_on(post.host, start.role))
            tried.add(id(post))
            num_slots = sum(p.entry.slots for p in self._all if p.host == post.host)
            try:
                return post.place(start, threads=max(1, post.machine.cores // max(1, num_slots)))
            except ManyhandsError as error:
                trouble = str(error)

    def _fitting(self, role: str) -> list[Node]:
        any_role = not self.spec.servers
        return [post for post in self._all if post.takes(role, any_role=any_role)]

    def _num_on(self, host: str, role: str) -> int:
        return sum(
            post.members[name][2] == role
            for post in self._all
            if post.host == host
            for name in post.here
        )

    def close(self) -> None:
        self._own.launcher.close()
        for post in self._remote:
            for name in post.here:
                post.say("kill", name=name)
        deadline = time.monotonic() + self.ground.timeouts.host_s if self._ground else 0.0
        for post in self._remote:
            while post.here and not post.lost and time.monotonic() < deadline:
                time.sleep(0.01)
        if self._ground is not None:
            (self._ground.logs / f".{self._token}").unlink(missing_ok=True)

    def end(self, code: int) -> None:
        """The run is over: agents end with the same exit code."""
        self._over.set()
        for post in self._remote:
            post.say("end", code=code)
        deadline = time.monotonic() + END_S
        for post in self._remote:
            while not post.lost and time.monotonic() < deadline:
                time.sleep(0.01)
            post.link.close()

    @property
    def _all(self) -> list[Node]:
        with self._lock:
            return list(self._posts)

    @property
    def _remote(self) -> list[AgentNode]:
        return [post for post in self._all if isinstance(post, AgentNode)]


def _names(entries: Sequence[Entry]) -> str:
    return ", ".join(entry.name + (f" ({entry.host})" if entry.host else "") for entry in entries)
