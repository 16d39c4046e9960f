"""The coordinator's links and processes: starts members, numbers views, detects deaths. The decisions are in
driver.py.

Everything that happens arrives in one inbox, in order: a member's message, a closed link, the end of a
process, a signal. One thread (the caller's) takes from it and decides; the threads behind it only wait:
one on the listening socket, one per member on its link, one per member on its exit.

Training is not handled here: orders and reports pass through. The link of a member that sends an invalid
message is closed.
"""

from __future__ import annotations

import queue
import signal
import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from manyhands.control.messages import FROM_MEMBER
from manyhands.coordinator import inbox
from manyhands.coordinator.fact_board import FactBoard
from manyhands.coordinator.outgoing import Outgoing
from manyhands.coordinator.run_credentials import RunCredentials
from manyhands.errors import LinkError, ManyhandsError, ProtocolError, UsageError
from manyhands.hosts.agent_messages import AgentHello
from manyhands.hosts.interfaces import is_any
from manyhands.hosts.invitation import Invitation
from manyhands.hosts.launchers.base import AGENT, Handle, Launcher, LauncherContext, StartRequest
from manyhands.hosts.log_stream import CHUNK_BYTES
from manyhands.hosts.messages import Beat, BoardPost, Bye, Hello, Posted, ViewFormed
from manyhands.hosts.refused_peers import RefusedPeers
from manyhands.hosts.scratch import Scratch
from manyhands.hosts.timeouts import Timeouts
from manyhands.hosts.view import WORKER, Seat, View
from manyhands.threads import describe, start_thread
from manyhands.transport import Authority, Limits, Link, Listener
from manyhands.transport.address import parse_address
from manyhands.transport.fields import MessageSet

FIRST = MessageSet(Hello, AgentHello)
LIMITS = Limits(head_bytes=16 << 20, payload_bytes=CHUNK_BYTES)
HELLO_READ_S = 0.5
"""Time until the hello of a member is read that has ended: it may have sent one."""
HELLO_LIMITS = Limits(head_bytes=64 << 10, payload_bytes=0)
"""Limits on the first message of a connection."""


@dataclass
class MemberRecord:
    """State of one member in the coordinator."""

    name: str
    handle: Handle
    log: Path
    role: str
    place: int
    """Its local rank."""
    started: float = field(default_factory=time.monotonic)
    link: Link | None = None
    seat: Seat | None = None
    heard: float = field(default_factory=time.monotonic)
    phase: str = "starting"
    phase_since_s: float = 0.0
    ticks: int = 0
    """Its own count of progress."""
    ticked: float = 0.0
    """Time of the last change of `ticks`."""
    left: bool = False
    """If true, it sent its goodbye or was dismissed."""
    ignored: bool = False
    """If true, its messages do not count any more."""
    linked: threading.Event = field(default_factory=threading.Event)
    """Its hello was read."""
    all_read: threading.Event = field(default_factory=threading.Event)
    """Set once all of its messages are in the inbox."""
    exit_code: int | None = None
    quota: inbox.InboxQuota = field(default_factory=inbox.InboxQuota)
    outgoing: Outgoing | None = None

    @property
    def alive(self) -> bool:
        return self.exit_code is None


class Coordinator:
    """Links and processes of the members; the decisions are in driver.py. Starts members and keeps the view.
    Use as a context manager: no process outlives it."""

    def __init__(
        self,
        launcher: Launcher,
        *,
        logs: Path,
        timeouts: Timeouts | None = None,
        control: str = "unix",
        keys: bool = False,
        authority: Authority | None = None,
    ) -> None:
        """`keys`: give each member credentials, even if the control link is a unix socket and needs none.
        `authority`: that of the run's key, if it has one."""
        self.launcher = launcher
        self.logs = logs
        self.timeouts = timeouts or Timeouts()
        self.members: dict[str, MemberRecord] = {}
        self.view: View | None = None
        # Not in the run folder: its path may be too long for a unix socket, or on a network disk.
        self._scratch = Scratch()
        self._inbox: queue.SimpleQueue[inbox.InboxEvent] = queue.SimpleQueue()
        # A member may connect before its launcher has returned.
        self._starting = threading.Lock()
        address = {"unix": f"unix:{self._scratch.path}/control", "tcp": "tcp://127.0.0.1:0"}.get(
            control, control
        )
        self._over_network = address.startswith("tcp:")
        self._credentials = RunCredentials(
            certificates=self._over_network or keys, key_authority=authority
        )
        self._board = FactBoard()
        try:
            self._listener = Listener(
                address,
                credentials=self._credentials.for_coordinator() if self._over_network else None,
                limits=LIMITS,
                on_refused=RefusedPeers(self._notify, self._notify),
            )
        except (ManyhandsError, OSError) as error:
            self._scratch.close()
            remedy = (
                "Use  --control tcp  for any free port, or  --control unix  inside one machine."
                if launcher.kind == "local"
                else "Give all processes another one:  --control tcp://HOST:PORT"
            )
            raise UsageError(
                f"The coordinator can't listen on {address}: {error} {remedy}"
            ) from error
        launcher.attach(
            LauncherContext(
                self._listener.address,
                self._scratch.path,
                logs,
                self.timeouts,
                self._notify,
                self.thread_failed,
                self.interrupt,
            )
        )
        self._listener.hand_over(self._read, name="read", on_error=self.thread_failed)

    @property
    def port(self) -> int:
        """The port that it listens on; 0 for a unix socket."""
        return parse_address(self._listener.address).port

    def __enter__(self) -> Coordinator:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def _address(self) -> str:
        """Where members on this host connect to."""
        where = parse_address(self._listener.address)
        return str(replace(where, host="127.0.0.1") if is_any(where.host) else where)

    def start(
        self,
        name: str,
        *,
        entry: str,
        local_rank: int,
        threads: int,
        assignment: Mapping[str, Any],
        role: str = WORKER,
    ) -> MemberRecord:
        credentials = self._credentials.for_member(name)
        log = self.logs / f"{name}.log"
        invitation = Invitation(
            member=name,
            address=self._address,
            scratch=str(self._scratch.path),
            assignment=dict(assignment),
            timeouts=self.timeouts,
            credentials=credentials,
            secured=self._over_network,
            secret=self._credentials.secret,
            local_rank=local_rank,
        )
        with self._starting:
            try:
                handle = self.launcher.start(
                    StartRequest(name, entry, invitation, log, threads, role)
                )
            except OSError as error:
                raise ManyhandsError(f"{name} can't be started: {error}") from error
            member = MemberRecord(name, handle, log, role, local_rank)
            self.members[name] = member
        start_thread(self._reap, member, name=f"reap-{name}", on_error=self.thread_failed)
        return member

    def next(self, timeout_s: float) -> inbox.InboxEvent | None:
        """Return the next event, or None if there is none in time."""
        try:
            event = self._inbox.get(timeout=max(0.0, timeout_s))
        except queue.Empty:
            return None
        if isinstance(event, inbox.MemberMessage):
            self.members[event.member].quota.give_back(event.num_bytes)
        match event:
            case inbox.MemberMessage(member) | inbox.LinkLost(member) | inbox.Garbage(member) if (
                self.members[member].ignored
            ):
                return None
        self._note(event)
        return event

    def interrupt(self, number: int) -> None:
        """Put a signal into the inbox. Safe in a signal handler."""
        self._inbox.put(inbox.Signalled(number))

    def thread_failed(self, error: BaseException) -> None:
        """Put a failure into the inbox: the `on_error` of the threads behind it."""
        self._inbox.put(inbox.ThreadFailed(error))

    def send(self, name: str, message: object) -> None:
        """Send a message to one member. A link that just broke arrives as LinkLost."""
        outgoing = self.members[name].outgoing
        if outgoing is not None and not outgoing.put(message):
            self._notify(f"{name} does not read its messages; its link is closed")

    def hang_up(self, name: str) -> None:
        """Close the link of a member, and ignore what it has sent."""
        member = self.members[name]
        member.ignored = True
        if member.link is not None:
            member.link.close()

    def form_view(
        self, seats: Iterable[Seat], *, replica_size: int = 1, standby: Iterable[str] = ()
    ) -> View:
        """Form the next view and send it to its members. `standby`: workers that are not in it any more, and
        are told, too."""
        number = self.view.number + 1 if self.view else 1
        self.view = View(number, tuple(seats), replica_size)
        for name in (*self.view.names, *standby):
            self.send(name, ViewFormed(self.view))
        return self.view

    def overdue(self) -> tuple[MemberRecord, str] | None:
        """Find a member that has been silent for too long, and describe it."""
        now = time.monotonic()
        for member in self.members.values():
            if not member.alive or member.left:
                continue
            if member.link is None:
                if now - member.started > self.timeouts.hello_s:
                    return member, f"did not connect within {self.timeouts.hello_s:.0f} s"
            elif now - member.heard > self.timeouts.silence_s:
                silent = now - member.heard
                return member, f"sent nothing for {silent:.0f} s (last phase: {member.phase})"
        return None

    def end_members(self) -> None:
        """End all members: terminate them, and kill them a moment later. Others may be started afterwards."""
        kept: list[inbox.InboxEvent] = []
        for end in (lambda handle: handle.terminate(), lambda handle: handle.kill()):
            running = [member for member in self.members.values() if member.alive]
            for member in running:
                member.left = member.ignored = True
                end(member.handle)
            deadline = time.monotonic() + self.timeouts.kill_s
            while any(m.alive for m in running) and time.monotonic() < deadline:
                event = self.next(deadline - time.monotonic())
                if isinstance(event, inbox.Signalled | inbox.HostNotice | inbox.ThreadFailed):
                    kept.append(event)
        for event in kept:
            self._inbox.put(event)  # still to be handled

    def stop(self) -> None:
        """End the run and its members."""
        self.end_members()
        self.launcher.close()

    def close(self) -> None:
        self.launcher.close()
        self._listener.close()
        for member in self.members.values():
            if member.link is not None:
                member.link.close()
        self._scratch.close()

    def _note(self, event: inbox.InboxEvent) -> None:
        """Update the records before the caller sees the event."""
        if isinstance(event, (inbox.Signalled, inbox.HostNotice, inbox.ThreadFailed)):
            return
        member = self.members[event.member]
        if isinstance(event, inbox.Exited):
            member.exit_code = event.exit_code
        elif isinstance(event, inbox.MemberMessage):
            member.heard = time.monotonic()
            match event.message:
                case Beat(phase, since_s, ticks):
                    if ticks != member.ticks:
                        member.ticks, member.ticked = ticks, member.heard
                    member.phase, member.phase_since_s = phase, since_s
                case Bye():
                    member.left = True
                case Hello():
                    # It may be late, and need what was posted before.
                    for key, value in self._board.facts.items():
                        self.send(member.name, Posted(key, value))
                case BoardPost(key, value):
                    self._board.post(key, value)
                    for other in self.members:
                        self.send(other, Posted(key, value))

    def _notify(self, message: str) -> None:
        self._inbox.put(inbox.HostNotice(message))

    def _read(self, link: Link) -> None:
        """Receive from one connection, from its hello to its end."""
        try:
            link.expect(HELLO_LIMITS)
            hello = link.recv(FIRST, timeout_s=self.timeouts.hello_s).message
            link.expect(LIMITS)
            if isinstance(hello, AgentHello):
                if self._over_network and not link.peer.startswith(AGENT):
                    link.close()  # a member's certificate does not make an agent
                else:
                    self.launcher.accept_agent(link, hello)
                return
            with self._starting:
                member = self.members.get(hello.member)
            if member is None or member.link is not None:
                link.close()
                return
            if self._over_network and link.peer != member.name:
                link.close()  # a certificate is valid for its own member only
                return
            member.link = link
            member.linked.set()
            name = f"tell-{member.name}"
            member.outgoing = Outgoing(link, name=name, on_error=self.thread_failed)
        except LinkError:
            link.close()
            return
        except Exception as error:  # the coordinator survives any message of an unknown peer
            link.close()
            self._notify(f"a connection from {link.peer} was dropped: {describe(error)}")
            return
        try:
            self._receive(member, link, hello)
        except ProtocolError as error:
            self._inbox.put(inbox.Garbage(member.name, str(error)))
        except Exception as error:  # of any kind: nothing more comes from this member
            known = isinstance(error, LinkError)
            self._inbox.put(inbox.LinkLost(member.name, str(error) if known else describe(error)))
        finally:
            link.close()
            member.outgoing.close()
            member.all_read.set()

    def _receive(self, member: MemberRecord, link: Link, hello: Hello) -> None:
        message, before = hello, 0
        while True:
            num_bytes = link.bytes_received - before
            before += num_bytes
            member.quota.take(num_bytes)
            self._inbox.put(inbox.MemberMessage(member.name, message, num_bytes))
            message = link.recv(FROM_MEMBER).message

    def _reap(self, member: MemberRecord) -> None:
        code = member.handle.wait()
        # Its last messages should be read before its end is announced, even if it ended soon after its hello.
        member.linked.wait(HELLO_READ_S)
        if member.link is not None:
            member.all_read.wait(self.timeouts.settle_s)
            member.link.close()  # on a host that counts as lost it may live, and must stop
        self._inbox.put(inbox.Exited(member.name, code))


def signal_name(exit_code: int) -> str:
    """Describe how a process ended: "killed by SIGKILL", "ended with exit code 3"."""
    if exit_code < 0:
        try:
            return f"killed by {signal.Signals(-exit_code).name}"
        except ValueError:
            return f"killed by signal {-exit_code}"
    return f"ended with exit code {exit_code}"


def exit_status(exit_code: int) -> int:
    """Return a child's exit code as a shell would report it."""
    return 128 - exit_code if exit_code < 0 else exit_code
