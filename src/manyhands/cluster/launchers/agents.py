"""Members on many hosts: each host has an agent, which starts and ends members for the coordinator.

A *post* is a place where members can be started: the coordinator's own host, or that of an agent
(cluster/agent.py), known by its link. What is said on that link, as the `kind` of each message:

    agent:        agent, settled, started, unstarted, exited, log (its payload), leaving, beat
    coordinator:  engaged or refused or taken; then start, terminate, kill, beat, end

A post whose link is lost or silent is given up, and its members count as dead; its agent kills them when it
misses the coordinator, so that none goes on alone. When it dials again it is a new post.

Cost: one thread and one small message a second for each agent; a start is a round trip.
"""

from __future__ import annotations

import json
import secrets
import signal
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

from manyhands.cluster.interfaces import Reach, is_any, is_loopback, reach, way_out
from manyhands.cluster.launchers.base import Ground, Handle, Launcher, Start
from manyhands.cluster.launchers.local import LocalLauncher
from manyhands.cluster.machine import Machine, unfit
from manyhands.cluster.rendezvous import publish
from manyhands.cluster.spec import EVALUATOR, ClusterSpec, Entry
from manyhands.cluster.view import SERVER, WORKER
from manyhands.errors import LinkError, LinkTimeout, ManyhandsError, UsageError
from manyhands.wire import Link, parse_address

START_S = 20.0
"""An agent has answered that it has started a member."""
END_S = 3.0
"""Agents that were told of the end have hung up."""


class Post(ABC):
    """A place for some members, as the coordinator sees it."""

    def __init__(self, entry: Entry, machine: Machine, host: str) -> None:
        self.entry = entry
        self.machine = machine
        self.host = host
        """The name that no other machine has here."""
        self.sees_run = True
        self.settled = True
        """It can start members."""
        self.lost = False
        self.leaving = False
        """Its process was asked to end: nobody else is started there."""
        self.members: dict[str, tuple[Handle, int, str]] = {}
        """Handle, slot and role of each that was started here."""

    @property
    def here(self) -> list[str]:
        return [name for name, (handle, _, _) in self.members.items() if not handle.gone]

    @property
    def free(self) -> int:
        usable = self.settled and not self.lost and not self.leaving
        return self.entry.slots - len(self.here) if usable else 0

    def takes(self, role: str, *, any_role: bool) -> bool:
        """`any_role`: nobody has said where servers go."""
        return any_role or (self.entry.role == SERVER) == (role == SERVER)

    def place(self, start: Start, *, threads: int) -> Handle:
        used = {self.members[name][1] for name in self.here}
        slot = min(set(range(self.entry.slots)) - used)
        local_rank = (self.entry.local_rank or 0) * self.entry.slots + slot
        told = {**start.invitation, "host": self.host, "local_rank": local_rank}
        if self.entry.devices:
            device = self.entry.devices[slot % len(self.entry.devices)]
            told["assignment"] = {**told["assignment"], "device": device}
        start = replace(start, invitation=told, threads=start.threads or threads)
        handle = self.start(start)
        handle.sees_run = self.sees_run
        self.members[start.name] = handle, slot, start.role
        return handle

    @abstractmethod
    def start(self, start: Start) -> Handle: ...


class OwnPost(Post):
    """The coordinator's own host."""

    def __init__(self, entry: Entry, machine: Machine) -> None:
        super().__init__(entry, machine, machine.host)
        self.launcher = LocalLauncher()
        self.reach = Reach("lo", "127.0.0.1")

    def start(self, start: Start) -> Handle:
        self.launcher.interface = self.reach.interface
        told = {**start.invitation, "reach": self.reach.address}
        return self.launcher.start(replace(start, invitation=told))


class RemoteHandle(Handle):
    """A member that an agent has started."""

    def __init__(self, name: str, post: AgentPost) -> None:
        self.name = name
        self.pid = 0
        self.host = post.host
        self.answered = threading.Event()
        self.refusal = ""
        self._post = post
        self._over = threading.Event()
        self._code = 0

    def wait(self) -> int:
        self._over.wait()
        return self._code

    def terminate(self) -> None:
        self._post.say("terminate", name=self.name)

    def kill(self) -> None:
        self._post.say("kill", name=self.name)

    def ended(self, code: int, why: str = "") -> None:
        if not self._over.is_set():
            self._code, self.why, self.gone = code, why, True
            self._over.set()
            self.answered.set()


class AgentPost(Post):
    """An agent, at the other end of its link."""

    def __init__(
        self, entry: Entry, machine: Machine, host: str, link: Link, ground: Ground, *, process: str
    ) -> None:
        super().__init__(entry, machine, host)
        self.process = process
        """The same when this agent dials again, and no other's."""
        self.link = link
        self.settled = False
        self.heard = time.monotonic()
        self._ground = ground
        self._handles: dict[str, RemoteHandle] = {}

    def say(self, kind: str, **fields: Any) -> None:
        with suppress(LinkError):  # its reader sees the same
            self.link.send({"kind": kind, **fields})

    def start(self, start: Start) -> Handle:
        assert start.log is not None
        start.log.touch()  # also one who says nothing has a log
        handle = self._handles[start.name] = RemoteHandle(start.name, self)
        self.say(
            "start",
            name=start.name,
            entry=start.entry,
            threads=start.threads,
            invitation=json.loads(json.dumps(dict(start.invitation))),
        )
        if not handle.answered.wait(START_S):
            self.link.close()
            handle.refusal = f"{self.host} did not answer within {START_S:.0f} s"
        if self.lost or handle.refusal:
            reason = handle.refusal or f"{self.host} was lost"
            handle.ended(-signal.SIGKILL, reason)
            raise ManyhandsError(f"{start.name} can't be started: {reason}")
        return handle

    def listen(self, on_settled: Callable[[AgentPost], None]) -> str:
        """Take what the agent says, until it says no more; why."""
        limit_s = self._ground.timeouts.host_s
        while True:
            try:
                message = self.link.recv(timeout_s=limit_s)
            except LinkTimeout:
                return f"said nothing for {limit_s:.0f} s"
            except LinkError:
                return "closed its link"
            self.heard = time.monotonic()
            handle = self._handles.get(str(message.head.get("name")))
            match message.head:
                case {"kind": "settled", "sees_run": bool(sees_run)}:
                    self.sees_run, self.settled = sees_run, True
                    on_settled(self)
                case {"kind": "started", "pid": int(pid)} if handle is not None:
                    handle.pid = pid
                    handle.answered.set()
                case {"kind": "unstarted", "reason": str(reason)} if handle is not None:
                    handle.refusal = reason
                    handle.answered.set()
                case {"kind": "exited", "code": int(code)} if handle is not None:
                    handle.ended(code)
                case {"kind": "log"} if handle is not None and message.payload is not None:
                    with open(self._ground.logs / f"{handle.name}.log", "ab") as log:
                        log.write(message.payload)
                case {"kind": "leaving", "signal": str(name)}:
                    if not self.leaving:
                        self.leaving = True
                        self._ground.tell(f"{self.host} was asked to end ({name})")

    def give_up(self) -> None:
        """It is gone, or nobody can tell; either way its members count as dead."""
        self.lost = True
        self.link.close()
        for handle in self._handles.values():
            handle.answered.set()
            handle.ended(-signal.SIGKILL, f"was on {self.host}, which is lost")


class AgentLauncher(Launcher):
    """Members where a ClusterSpec says: on this host, and by agents on the others."""

    kind = "env"

    def __init__(
        self, spec: ClusterSpec, *, least: int | None = None, shares_memory: bool = False
    ) -> None:
        """`least`: so many workers are enough to begin with, after a while. `shares_memory`: members of a
        run that begins inside one host can't be joined by others."""
        self.spec = spec
        self._least = least
        self._shares_memory = shares_memory
        self._machine = Machine.here()
        self._own = OwnPost(spec.me, self._machine)
        self._posts: list[Post] = [self._own]
        self._hosts = {self._machine.identity: self._machine.host}
        """The name of each machine."""
        self._refused = ""
        self._lock = threading.Lock()
        self._ground: Ground | None = None
        self._began = time.monotonic()
        self._asked = self._began
        self._complete = False
        self._over = threading.Event()
        self._token = secrets.token_hex(8)

    @property
    def ground(self) -> Ground:
        assert self._ground is not None, "attached to a coordinator"
        return self._ground

    # Who is there -----------------------------------------------------------------------------

    def attach(self, ground: Ground) -> None:
        self._ground = ground
        self._began = self._asked = time.monotonic()
        (ground.logs / f".{self._token}").touch()
        self._own.reach = self._reach(ground.address)
        if self.spec.store is not None:
            publish(self.spec.store, ground.address, ground.tell)
        threading.Thread(target=self._beat, name="beat", daemon=True).start()

    def complete(self) -> bool:
        """All that were announced are there; or enough, after a while. A run that began goes on without."""
        if self._complete:
            return True
        if self._refused:
            raise UsageError(self._refused)
        waited, timeouts = time.monotonic() - self._began, self.ground.timeouts
        missing = self._missing
        enough = self._least is not None and self.slots(WORKER) >= self._least
        if not missing or (enough and waited > timeouts.grace_s):
            self._complete = True
            self.spans_hosts = len({post.host for post in self._all}) > 1
            if self.spans_hosts:
                self.ground.tell(self._introduction())
            return True
        names = ", ".join(
            entry.name + (f" ({entry.host})" if entry.host else "") for entry in missing
        )
        if waited > timeouts.gather_s:
            raise UsageError(
                f"Not all came within {timeouts.gather_s:.0f} s: {names} of {self.spec.size} processes "
                f"did not connect to {self.ground.address}. Were they started, with the same command? Can "
                "they reach that address? Give another with  --control tcp://HOST:PORT."
            )
        if time.monotonic() - self._asked > 10:
            self._asked = time.monotonic()
            self.ground.tell(f"waiting at {self.ground.address} for {names}")
        return False

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
        except (LinkError, KeyError, TypeError, ValueError, AttributeError):
            link.close()  # it is gone, or not one of ours
            return
        if post is None:
            return
        why = post.listen(self._on_settled)
        with self._lock:
            there = post in self._posts
            if there:
                self._posts.remove(post)
        post.give_up()
        if there and not self._over.is_set():
            self.ground.tell(f"{post.host} is lost: its agent {why}")

    def _on_settled(self, post: AgentPost) -> None:
        """It can start members now."""
        if not is_loopback(post.link.own_host or "127.0.0.1") and not self._complete:
            self._own.reach = reach(post.link.own_host)  # where it has found us, others will
        if self._complete:
            self.ground.tell(f"{post.host} has come, with {post.machine}")

    def _engage(self, link: Link, hello: Mapping[str, Any]) -> AgentPost | None:
        """Let an agent in, or tell it why not."""
        machine = Machine(**hello["machine"])
        entry = Entry(**{**hello["entry"], "devices": tuple(hello["entry"]["devices"])})
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
            if self._ground is None or self._over.is_set():
                link.close()
                return None
            host = self._name_of(machine)
            post = AgentPost(entry, machine, host, link, self._ground, process=hello["process"])
            old = next((p for p in self._posts if p.entry.rank == entry.rank), None)
            if isinstance(old, AgentPost) and old.process == post.process:
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

    def _turn_down(self, post: AgentPost, old: Post) -> None:
        """Its rank is another's. That may be one that died just now; not if it is heard again."""
        asked = time.monotonic()
        while not self._complete and not old.lost:
            if not isinstance(old, AgentPost) or old.heard > asked:
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

    def _reach(self, address: str) -> Reach:
        where = parse_address(address)
        host = "127.0.0.1" if where.path else where.host
        return reach(way_out() if is_any(host) else host)

    def _beat(self) -> None:
        while not self._over.wait(self.ground.timeouts.beat_s):
            for post in self._remote:
                if post.settled:  # else it waits for another word
                    post.say("beat")

    # Members ----------------------------------------------------------------------------------

    def slots(self, role: str) -> int:
        return sum(post.free for post in self._fitting(role))

    def start(self, start: Start) -> Handle:
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

    def _fitting(self, role: str) -> list[Post]:
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
    def _all(self) -> list[Post]:
        with self._lock:
            return list(self._posts)

    @property
    def _remote(self) -> list[AgentPost]:
        return [post for post in self._all if isinstance(post, AgentPost)]
