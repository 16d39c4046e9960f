"""The coordinator's side of membership: starts members, numbers views, notices deaths.

Everything that happens arrives in one inbox, in order: what members say, that a link closed, that a
process ended, that a signal came. One thread (the caller's) takes from it and decides; the threads
behind it only wait: one on the listening socket, one a member on its link, one a member on its exit.

It knows nothing of training: orders are dicts that pass through, and reports are read by `parse`. A member
whose message makes no sense is hung up on.
"""

from __future__ import annotations

import queue
import secrets
import signal
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from manyhands.coordinator.outgoing import Outgoing
from manyhands.errors import LinkError, ManyhandsError, ProtocolError, UsageError
from manyhands.hosts.interfaces import is_any
from manyhands.hosts.launchers import AGENT, Handle, Launcher, LauncherContext, StartRequest
from manyhands.hosts.log_stream import CHUNK_BYTES
from manyhands.hosts.messages import OF_MEMBERS, Beat, BoardPost, Bye, Hello, read_kind
from manyhands.hosts.refused_peers import RefusedPeers
from manyhands.hosts.scratch import Scratch
from manyhands.hosts.stop_signals import on_stop_signals
from manyhands.hosts.timeouts import Timeouts
from manyhands.hosts.view import WORKER, Seat, View
from manyhands.threads import describe, start_thread
from manyhands.transport import Authority, Credentials, Limits, Link, Listener
from manyhands.transport.address import parse_address

OWN_KINDS = ("hello", "beat", "post", "bye")
"""What is a matter of membership; the rest is for `parse`."""
MAX_POSTED = 10_000
MOST_POSTED = 64 << 20
"""Facts on the board, and their characters; the oldest is forgotten for the next."""
LIMITS = Limits(head_bytes=16 << 20, payload_bytes=CHUNK_BYTES)
HELLO_LIMITS = Limits(head_bytes=64 << 10, payload_bytes=0)
"""Of the first message of a connection."""
MOST_UNHEARD_BYTES = 32 << 20
"""Of what one member has said."""
MEMBERS = "manyhands members"
"""The authority of the certificates of members."""


@dataclass(frozen=True)
class MemberMessage:
    member: str
    message: Any
    """A dataclass of messages.py, or what `Coordinator.parse` made of it."""
    num_bytes: int = 0


@dataclass(frozen=True)
class LinkLost:
    member: str
    reason: str


@dataclass(frozen=True)
class Garbage:
    """A member has said something that makes no sense. Its link is closed."""

    member: str
    reason: str


@dataclass(frozen=True)
class Exited:
    member: str
    exit_code: int


@dataclass(frozen=True)
class Signalled:
    number: int


@dataclass(frozen=True)
class HostNotice:
    """Something about the hosts that whoever watches should know."""

    message: str


@dataclass(frozen=True)
class ThreadFailed:
    """A thread of the coordinator has failed: something would not be noticed any more."""

    error: BaseException


Happening = MemberMessage | LinkLost | Garbage | Exited | Signalled | HostNotice | ThreadFailed


class InboxQuota:
    """For what one member has said and nobody has heard yet: more is not read before there is room."""

    def __init__(self) -> None:
        self._used = 0
        self._changed = threading.Condition()

    def take(self, num_bytes: int) -> None:
        with self._changed:
            self._changed.wait_for(
                lambda: not self._used or self._used + num_bytes <= MOST_UNHEARD_BYTES
            )
            self._used += num_bytes

    def give_back(self, num_bytes: int) -> None:
        with self._changed:
            self._used -= num_bytes
            self._changed.notify_all()


@dataclass
class MemberRecord:
    """What the coordinator knows of one member."""

    name: str
    handle: Handle
    log: Path
    started: float = field(default_factory=time.monotonic)
    link: Link | None = None
    seat: Seat | None = None
    heard: float = field(default_factory=time.monotonic)
    phase: str = "starting"
    phase_since_s: float = 0.0
    ticks: int = 0
    """What it has got done, as it counts itself."""
    left: bool = False
    """It said goodbye, or was told to go."""
    unheard: bool = False
    """What it still says is not listened to any more."""
    read_out: threading.Event = field(default_factory=threading.Event)
    """All that it ever said is in the inbox."""
    exit_code: int | None = None
    room: InboxQuota = field(default_factory=InboxQuota)
    outgoing: Outgoing | None = None

    @property
    def alive(self) -> bool:
        return self.exit_code is None


class Coordinator:
    """Starts members and keeps the view. Use as a context manager: leaving it leaves no process."""

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
        """`keys`: give each member credentials also where control is a unix socket and needs none.
        `authority`: that of the run's key, if it has one that others know, too."""
        self.launcher = launcher
        self.logs = logs
        self.timeouts = timeouts or Timeouts()
        self.members: dict[str, MemberRecord] = {}
        self.view: View | None = None
        self.parse: Callable[[Mapping[str, Any]], Any] = lambda head: head
        """What members say beyond membership, in the thread that hears it; raises ProtocolError."""
        # Not in the run folder: its path may be too long for a unix socket, or on a network disk.
        self._scratch = Scratch()
        self.scratch = self._scratch.path
        self._inbox: queue.SimpleQueue[Happening] = queue.SimpleQueue()
        # A member may say hello before its launcher has returned.
        self._starting = threading.Lock()
        address = {"unix": f"unix:{self.scratch}/control", "tcp": "tcp://127.0.0.1:0"}.get(
            control, control
        )
        self._over_network = address.startswith("tcp:")
        wanted = self._over_network or keys
        # That of the key knows who may be an agent. Members have certificates of this run alone: another
        # run may have the same key.
        self._authority = Authority.create(MEMBERS) if wanted else None
        self._key_authority = authority
        self._secret = secrets.token_hex(32)
        self._board: dict[str, str] = {}
        self._board_size = 0
        try:
            self._listener = Listener(
                address,
                credentials=self._own_credentials() if self._over_network else None,
                limits=LIMITS,
                on_refused=RefusedPeers(self._tell, self._tell),
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
                self._listener.address, self.scratch, logs, self.timeouts, self._tell, self.broke
            )
        )
        self._listener.hand_over(self._read, name="read", on_error=self.broke)

    @property
    def port(self) -> int:
        """Where it listens; 0 for a unix socket."""
        return parse_address(self._listener.address).port

    def __enter__(self) -> Coordinator:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def _address(self) -> str:
        """Where members of this host find it."""
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
        credentials: Credentials | None = None
        if self._authority:
            trusted = [self._key_authority] if self._key_authority else []
            credentials = self._authority.issue(name, trusts=trusted)
        log = self.logs / f"{name}.log"
        invitation = {
            "member": name,
            "address": self._address,
            "scratch": str(self.scratch),
            "local_rank": local_rank,
            "timeouts": self.timeouts.to_dict(),
            "assignment": dict(assignment),
            "credentials": credentials.to_dict() if credentials else None,
            "secured": self._over_network,
            "secret": self._secret,
        }
        with self._starting:
            try:
                handle = self.launcher.start(
                    StartRequest(name, entry, invitation, log, threads, role)
                )
            except OSError as error:
                raise ManyhandsError(f"{name} can't be started: {error}") from error
            member = MemberRecord(name, handle, log)
            self.members[name] = member
        start_thread(self._reap, member, name=f"reap-{name}", on_error=self.broke)
        return member

    def _own_credentials(self) -> Credentials:
        """Which agents trust, where there is a key, and members; it trusts both."""
        assert self._authority is not None
        if self._key_authority is None:
            return self._authority.issue("coordinator")
        return self._key_authority.issue("coordinator", trusts=[self._authority])

    def next(self, timeout_s: float) -> Happening | None:
        """What happened next, or None when nothing did in time."""
        try:
            happening = self._inbox.get(timeout=max(0.0, timeout_s))
        except queue.Empty:
            return None
        if isinstance(happening, MemberMessage):
            self.members[happening.member].room.give_back(happening.num_bytes)
        match happening:
            case MemberMessage(member) | LinkLost(member) | Garbage(member) if self.members[
                member
            ].unheard:
                return None
        self._note(happening)
        return happening

    def interrupt(self, number: int) -> None:
        """For signal handlers: a signal has come."""
        self._inbox.put(Signalled(number))

    def broke(self, error: BaseException) -> None:
        """An `on_error` for the threads behind the inbox."""
        self._inbox.put(ThreadFailed(error))

    def say(self, name: str, kind: str, **fields: Any) -> None:
        """Say something to one member. A link that just broke is news of its own: it arrives as LinkLost."""
        outgoing = self.members[name].outgoing
        if outgoing is not None and not outgoing.put({"kind": kind, **fields}):
            self._tell(f"{name} does not read what it is told; its link is closed")

    def hang_up(self, name: str) -> None:
        """Nothing that it says counts any more."""
        member = self.members[name]
        member.unheard = True
        if member.link is not None:
            member.link.close()

    def form_view(self, seats: Iterable[Seat]) -> View:
        """The next view, told to all of its members."""
        number = self.view.number + 1 if self.view else 1
        self.view = View(number, tuple(seats))
        for name in self.view.names:
            self.say(name, "view", view=self.view.to_dict())
        return self.view

    def overdue(self) -> tuple[MemberRecord, str] | None:
        """A member that has been silent for too long, and what to say of it."""
        now = time.monotonic()
        for member in self.members.values():
            if not member.alive or member.left:
                continue
            if member.link is None:
                if now - member.started > self.timeouts.hello_s:
                    return member, f"did not say hello within {self.timeouts.hello_s:.0f} s"
            elif now - member.heard > self.timeouts.silence_s:
                silent = now - member.heard
                return member, f"said nothing for {silent:.0f} s (last phase: {member.phase})"
        return None

    def end_members(self) -> None:
        """End what still runs: ask, and a moment later insist. Others may be started afterwards."""
        kept: list[Happening] = []
        for end in (lambda handle: handle.terminate(), lambda handle: handle.kill()):
            running = [member for member in self.members.values() if member.alive]
            for member in running:
                member.left = member.unheard = True
                end(member.handle)
            deadline = time.monotonic() + self.timeouts.kill_s
            while any(m.alive for m in running) and time.monotonic() < deadline:
                happening = self.next(deadline - time.monotonic())
                if isinstance(happening, Signalled | HostNotice | ThreadFailed):
                    kept.append(happening)
        for happening in kept:
            self._inbox.put(happening)  # whoever decides next shall hear of it

    def stop(self) -> None:
        """The end of the run, and of what still runs."""
        self.end_members()
        self.launcher.close()

    def close(self) -> None:
        self.launcher.close()
        self._listener.close()
        for member in self.members.values():
            if member.link is not None:
                member.link.close()
        self._scratch.close()

    def _note(self, happening: Happening) -> None:
        """Keep the attendance list right, before the caller sees the happening."""
        if isinstance(happening, (Signalled, HostNotice, ThreadFailed)):
            return
        member = self.members[happening.member]
        if isinstance(happening, Exited):
            member.exit_code = happening.exit_code
        elif isinstance(happening, MemberMessage):
            member.heard = time.monotonic()
            match happening.message:
                case Beat(phase, since_s, ticks):
                    member.phase, member.phase_since_s, member.ticks = phase, since_s, ticks
                case Bye():
                    member.left = True
                case Hello():
                    # It may come late, and want to know what was posted before.
                    for key, value in self._board.items():
                        self.say(member.name, "posted", key=key, value=value)
                case BoardPost(key, value):
                    self._put_up(key, value)
                    for other in self.members:
                        self.say(other, "posted", key=key, value=value)

    def _put_up(self, key: str, value: str) -> None:
        self._board_size += len(key) + len(value)
        if (old := self._board.pop(key, None)) is not None:
            self._board_size -= len(key) + len(old)
        self._board[key] = value
        while len(self._board) > MAX_POSTED or self._board_size > MOST_POSTED:
            oldest = next(iter(self._board))
            self._board_size -= len(oldest) + len(self._board.pop(oldest))

    def _tell(self, message: str) -> None:
        self._inbox.put(HostNotice(message))

    def _read(self, link: Link) -> None:
        """One member's link, from its hello to its end."""
        try:
            link.expect(HELLO_LIMITS)
            hello = link.recv(timeout_s=self.timeouts.hello_s).head
            link.expect(LIMITS)
            if hello.get("kind") == "agent":
                if self._over_network and not link.peer.startswith(AGENT):
                    link.close()  # a member's certificate is none of an agent's
                else:
                    self.launcher.welcome(link, hello)
                return
            with self._starting:
                member = self.members.get(str(hello.get("member")))
            if hello.get("kind") != "hello" or member is None or member.link is not None:
                link.close()
                return
            if self._over_network and link.peer != member.name:
                link.close()  # a certificate speaks for its own member only
                return
            member.link = link
            name = f"tell-{member.name}"
            member.outgoing = Outgoing(link, name=name, on_error=self.broke)
        except LinkError:
            link.close()
            return
        except Exception as error:  # of whoever has said what nobody foresaw
            link.close()
            self._tell(f"a connection of {link.peer} was dropped: {describe(error)}")
            return
        try:
            self._hear(member, link, hello)
        except ProtocolError as error:
            self._inbox.put(Garbage(member.name, str(error)))
        except Exception as error:  # of any kind: nothing more is heard of this member
            known = isinstance(error, LinkError)
            self._inbox.put(LinkLost(member.name, str(error) if known else describe(error)))
        finally:
            link.close()
            member.outgoing.close()
            member.read_out.set()

    def _hear(self, member: MemberRecord, link: Link, hello: Mapping[str, Any]) -> None:
        head, before = hello, 0
        while True:
            message, num_bytes = self._parse(head), link.bytes_received - before
            before += num_bytes
            member.room.take(num_bytes)
            self._inbox.put(MemberMessage(member.name, message, num_bytes))
            head = link.recv().head

    def _parse(self, head: Mapping[str, Any]) -> Any:
        if head.get("kind") in OWN_KINDS:
            return read_kind(OF_MEMBERS, head)
        return self.parse(head)

    def _reap(self, member: MemberRecord) -> None:
        code = member.handle.wait()
        # What it said last should be heard before its end is announced.
        if member.link is not None:
            member.read_out.wait(self.timeouts.settle_s)
            member.link.close()  # one on a host that counts as lost may live, and must not go on
        self._inbox.put(Exited(member.name, code))


def on_signals(coordinator: Coordinator) -> None:
    """Ctrl-C, a scheduler's SIGTERM or SIGUSR1, and a terminal that hangs up arrive in the inbox, like
    everything else."""
    on_stop_signals(lambda got, _frame: coordinator.interrupt(got))


def signal_name(exit_code: int) -> str:
    """How a process ended, in words: "killed by SIGKILL", "ended with exit code 3"."""
    if exit_code < 0:
        try:
            return f"killed by {signal.Signals(-exit_code).name}"
        except ValueError:
            return f"killed by signal {-exit_code}"
    return f"ended with exit code {exit_code}"


def exit_status(exit_code: int) -> int:
    """A child's exit code as a shell would give it on."""
    return 128 - exit_code if exit_code < 0 else exit_code
