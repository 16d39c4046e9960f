"""A post: a place where members can be started, as the coordinator sees it.

It is the coordinator's own host, or that of an agent (hosts/agent.py), known by its link. A post whose
link is lost or silent is given up, and its members count as dead.
"""

from __future__ import annotations

import json
import signal
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

from manyhands.errors import LinkError, LinkTimeout, ManyhandsError, ProtocolError
from manyhands.hosts.interfaces import Endpoint
from manyhands.hosts.launchers.base import Handle, LauncherContext, StartRequest
from manyhands.hosts.launchers.local import LocalLauncher
from manyhands.hosts.log_stream import LogFiles
from manyhands.hosts.machine import Machine
from manyhands.hosts.messages import (
    OF_AGENTS,
    Leaving,
    MemberEnded,
    MemberOutput,
    RunFolderSeen,
    Started,
    StartFailed,
    read_kind,
)
from manyhands.hosts.spec import Entry
from manyhands.hosts.view import SERVER
from manyhands.transport import Link

START_S = 20.0
"""An agent has answered that it has started a member."""


class Node(ABC):
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

    def place(self, start: StartRequest, *, threads: int) -> Handle:
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
    def start(self, start: StartRequest) -> Handle: ...


class LocalNode(Node):
    """The coordinator's own host."""

    def __init__(self, entry: Entry, machine: Machine) -> None:
        super().__init__(entry, machine, machine.host)
        self.launcher = LocalLauncher()
        self.reach = Endpoint("lo", "127.0.0.1")

    def start(self, start: StartRequest) -> Handle:
        self.launcher.interface = self.reach.interface
        told = {**start.invitation, "reach": self.reach.address}
        return self.launcher.start(replace(start, invitation=told))


class RemoteHandle(Handle):
    """A member that an agent has started."""

    def __init__(self, name: str, post: AgentNode) -> None:
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


class AgentNode(Node):
    """An agent, at the other end of its link."""

    def __init__(
        self,
        entry: Entry,
        machine: Machine,
        host: str,
        link: Link,
        ground: LauncherContext,
        *,
        process: str,
        logs: LogFiles,
    ) -> None:
        super().__init__(entry, machine, host)
        self._logs = logs
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

    def start(self, start: StartRequest) -> Handle:
        self._logs.add(start.name, b"")  # also one who says nothing has a log
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

    def listen(self, on_settled: Callable[[AgentNode], None]) -> str:
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
            try:
                self._hear(read_kind(OF_AGENTS, message.head), message.payload, on_settled)
            except ProtocolError as error:
                return f"sent a message that makes no sense: {error}"

    def _hear(
        self, said: Any, payload: memoryview | None, on_settled: Callable[[AgentNode], None]
    ) -> None:
        match said:
            case RunFolderSeen(sees_run):
                self.sees_run, self.settled = sees_run, True
                on_settled(self)
            case Started(name, pid):
                handle = self._handle(name)
                handle.pid = pid
                handle.answered.set()
            case StartFailed(name, reason):
                handle = self._handle(name)
                handle.refusal = reason
                handle.answered.set()
            case MemberEnded(name, code):
                self._handle(name).ended(code)
            case MemberOutput(name):
                if payload is None:
                    raise ProtocolError(f"a log of {name[:80]!r} without a payload")
                self._logs.add(self._handle(name).name, payload)
            case Leaving(name):
                if not self.leaving:
                    self.leaving = True
                    self._ground.tell(f"{self.host} was asked to end ({name[:80]})")

    def _handle(self, name: str) -> RemoteHandle:
        handle = self._handles.get(name)
        if handle is None:
            raise ProtocolError(f"it speaks of {name[:80]!r}, who was never started there")
        return handle

    def give_up(self) -> None:
        """It is gone, or nobody can tell; either way its members count as dead."""
        self.lost = True
        self.link.close()
        for handle in self._handles.values():
            handle.answered.set()
            handle.ended(-signal.SIGKILL, f"was on {self.host}, which is lost")
