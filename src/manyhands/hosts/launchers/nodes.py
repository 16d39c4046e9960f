"""Nodes: the places where members can be started, as the coordinator sees them.

A node is the coordinator's own host, or the host of an agent (hosts/agent.py), reached over the agent's link.
An agent whose link breaks or falls silent is dropped, and its members count as dead.
"""

from __future__ import annotations

import queue
import signal
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any, TypeVar

from manyhands.errors import LinkClosed, LinkError, LinkTimeout, ManyhandsError, ProtocolError
from manyhands.hosts.agent_messages import (
    FROM_AGENT,
    AgentHello,
    AgentReady,
    KillMember,
    Leaving,
    Measured,
    MemberEnded,
    MemberOutput,
    ProbeInfo,
    Started,
    StartFailed,
    StartMember,
    TerminateMember,
)
from manyhands.hosts.interfaces import Endpoint
from manyhands.hosts.launchers.base import Handle, LauncherContext, StartRequest
from manyhands.hosts.launchers.local import LocalLauncher
from manyhands.hosts.log_stream import LogFiles
from manyhands.hosts.machine import Machine
from manyhands.hosts.spec import Entry
from manyhands.hosts.view import SERVER
from manyhands.transport import Link

T = TypeVar("T")

START_S = 20.0
"""Time limit for an agent's answer that it has started a member."""


class Node(ABC):
    """A place for some members."""

    def __init__(self, entry: Entry, machine: Machine, host: str) -> None:
        self.entry = entry
        self.machine = machine
        self.host = host
        """The host's name in this run, which no other host has."""
        self.sees_run = True
        """If true, the run folder is visible there."""
        self.ready = True
        """If true, members can be started there."""
        self.lost = False
        self.leaving = False
        """If true, its process received a stop signal: no more members are started there."""
        self.members: dict[str, tuple[Handle, int, str]] = {}
        """Handle, slot and role of each member that was started here."""

    @property
    def running(self) -> list[str]:
        return [name for name, (handle, _, _) in self.members.items() if not handle.gone]

    @property
    def free(self) -> int:
        usable = self.ready and not self.lost and not self.leaving
        return self.entry.slots - len(self.running) if usable else 0

    def takes(self, role: str, *, any_role: bool) -> bool:
        """Return whether members of this role may run here. `any_role`: no entry is reserved for servers."""
        return any_role or (self.entry.role == SERVER) == (role == SERVER)

    def place(self, request: StartRequest, *, threads: int) -> Handle:
        """Start a member in the first free slot."""
        used = {self.members[name][1] for name in self.running}
        slot = min(set(range(self.entry.slots)) - used)
        local_rank = (self.entry.local_rank or 0) * self.entry.slots + slot
        invitation = replace(request.invitation, host=self.host, local_rank=local_rank)
        if self.entry.devices:
            device = self.entry.devices[slot % len(self.entry.devices)]
            invitation = replace(invitation, assignment={**invitation.assignment, "device": device})
        request = replace(request, invitation=invitation, threads=request.threads or threads)
        handle = self.start(request)
        handle.sees_run = self.sees_run
        self.members[request.name] = handle, slot, request.role
        return handle

    @abstractmethod
    def start(self, request: StartRequest) -> Handle: ...


class LocalNode(Node):
    """The coordinator's own host."""

    def __init__(self, entry: Entry, machine: Machine) -> None:
        super().__init__(entry, machine, machine.host)
        self.launcher = LocalLauncher()
        self.reach = Endpoint("lo", "127.0.0.1")

    def start(self, request: StartRequest) -> Handle:
        self.launcher.interface = self.reach.interface
        invitation = replace(request.invitation, reach=self.reach.address)
        return self.launcher.start(replace(request, invitation=invitation))


class RemoteHandle(Handle):
    """A member that an agent has started."""

    def __init__(self, name: str, node: AgentNode) -> None:
        self.name = name
        self.pid = 0
        self.host = node.host
        self.answered = threading.Event()
        """Set when the agent has answered the request to start it."""
        self.refusal = ""
        self._node = node
        self._ended = threading.Event()
        self._code = 0

    def wait(self) -> int:
        self._ended.wait()
        return self._code

    def terminate(self) -> None:
        self._node.send(TerminateMember(self.name))

    def kill(self) -> None:
        self._node.send(KillMember(self.name))

    def ended(self, code: int, why: str = "") -> None:
        if not self._ended.is_set():
            self._code, self.why, self.gone = code, why, True
            self._ended.set()
            self.answered.set()


class AgentNode(Node):
    """The host of an agent, reached over the agent's link."""

    def __init__(
        self, hello: AgentHello, host: str, link: Link, context: LauncherContext, logs: LogFiles
    ) -> None:
        super().__init__(hello.entry, hello.machine, host)
        self.process = hello.process
        """Stays the same when this agent connects again; unique among agents."""
        self.link = link
        self.ready = False
        self.last_message_at = time.monotonic()
        self.probe: ProbeInfo | None = None
        """Its probe, if the coordinator requested one."""
        self._logs = logs
        self._context = context
        self._handles: dict[str, RemoteHandle] = {}
        self._answers: queue.SimpleQueue[Any] | None = None
        """Present while a request waits for its answer."""

    def send(self, message: Any) -> None:
        with suppress(LinkError):  # the thread that reads this link sees the same error
            self.link.send(message)

    def start(self, request: StartRequest) -> Handle:
        self._logs.add(request.name, b"")  # a member that prints nothing has a log, too
        handle = self._handles[request.name] = RemoteHandle(request.name, self)
        self.send(StartMember(request.name, request.entry, request.threads, request.invitation))
        if not handle.answered.wait(START_S):
            self.link.close()
            handle.refusal = f"{self.host} did not answer within {START_S:.0f} s"
        if self.lost or handle.refusal:
            reason = handle.refusal or f"{self.host} was lost"
            handle.ended(-signal.SIGKILL, reason)
            raise ManyhandsError(f"{request.name} can't be started: {reason}")
        return handle

    def ask(self, request: Any, kind: type[T], *, timeout_s: float) -> T:
        """Send a request to the agent's probe and wait for its answer, from one thread at a time."""
        self._answers = queue.SimpleQueue()
        if self.lost:
            self._answers.put(None)
        self.send(request)
        try:
            answer = self._answers.get(timeout=timeout_s)
        except queue.Empty:
            raise LinkTimeout(f"{self.host} did not answer within {timeout_s:.0f} s.") from None
        finally:
            self._answers = None
        if not isinstance(answer, kind):
            raise LinkClosed(f"{self.host} is gone.")
        return answer

    def read_messages(self, on_ready: Callable[[AgentNode], None]) -> str:
        """Handle the agent's messages until they end; return why they ended."""
        limit_s = self._context.timeouts.host_s
        while True:
            try:
                received = self.link.recv(FROM_AGENT, timeout_s=limit_s)
                self.last_message_at = time.monotonic()
                self._handle(received.message, received.payload, on_ready)
            except LinkTimeout:
                return f"sent nothing for {limit_s:.0f} s"
            except LinkError:
                return "closed its link"
            except ProtocolError as error:
                return f"sent an invalid message: {error}"

    def _handle(
        self, message: Any, payload: memoryview | None, on_ready: Callable[[AgentNode], None]
    ) -> None:
        match message:
            case AgentReady(sees_run, probe):
                self.sees_run, self.probe, self.ready = sees_run, probe, True
                on_ready(self)
            case Started(name, pid):
                handle = self._handle_of(name)
                handle.pid = pid
                handle.answered.set()
            case StartFailed(name, reason):
                handle = self._handle_of(name)
                handle.refusal = reason
                handle.answered.set()
            case MemberEnded(name, code):
                self._handle_of(name).ended(code)
            case MemberOutput(name):
                if payload is None:
                    raise ProtocolError(f"a log of {name[:80]!r} without a payload")
                self._logs.add(self._handle_of(name).name, payload)
            case Leaving(name):
                if not self.leaving:
                    self.leaving = True
                    self._context.notify(f"{self.host} was asked to end ({name[:80]})")
            case Measured():
                if (answers := self._answers) is None:
                    raise ProtocolError("an answer without a request")
                answers.put(message)

    def _handle_of(self, name: str) -> RemoteHandle:
        handle = self._handles.get(name)
        if handle is None:
            raise ProtocolError(f"it names {name[:80]!r}, which was never started there")
        return handle

    def drop(self) -> None:
        """Close the link; the members there count as dead."""
        self.lost = True
        self.link.close()
        for handle in self._handles.values():
            handle.answered.set()
            handle.ended(-signal.SIGKILL, f"was on {self.host}, which is lost")
        if (answers := self._answers) is not None:
            answers.put(None)
