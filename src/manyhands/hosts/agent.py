"""An agent: a process on a host that starts and ends members there for the coordinator.

    connect     to the coordinator; retry until it listens
    join        send AgentHello; be admitted or refused
    serve       start, terminate and kill members; report their exits, forward their output; answer probes
    reconnect   if the link is lost or silent: kill all members and connect again, with free slots
    exit        when the coordinator says so, with its exit code

Members are children of the agent, and the kernel kills them if the agent dies. The main thread handles the
coordinator's orders one by one, and starts the members itself: the kernel's parent-death signal is bound to
the thread that started a process.
"""

from __future__ import annotations

import os
import secrets
import signal
import threading
import time
from contextlib import suppress
from dataclasses import replace
from typing import Any

from manyhands.errors import LinkError, LinkTimeout, ManyhandsError, ProtocolError, UsageError
from manyhands.hosts.agent_messages import (
    TO_AGENT,
    AgentAdmitted,
    AgentHello,
    AgentReady,
    AgentRefused,
    EndAgent,
    KillMember,
    Leaving,
    LinkBeat,
    Measured,
    MeasureHost,
    MemberEnded,
    MemberOutput,
    ProbeInfo,
    RankTaken,
    Started,
    StartFailed,
    StartMember,
    TerminateMember,
)
from manyhands.hosts.connect import Connector
from manyhands.hosts.host_facts import HostFacts
from manyhands.hosts.interfaces import reach
from manyhands.hosts.launchers.base import AGENT, StartRequest
from manyhands.hosts.launchers.local import LocalHandle, LocalLauncher
from manyhands.hosts.log_stream import LogStream
from manyhands.hosts.machine import Machine
from manyhands.hosts.probe import Probe
from manyhands.hosts.scratch import Scratch
from manyhands.hosts.spec import ClusterSpec
from manyhands.hosts.stop_signals import on_stop_signals
from manyhands.hosts.timeouts import Timeouts
from manyhands.threads import describe, start_thread
from manyhands.transport import Authority, Link

OUTPUT_S = 2.0
"""Time limit for reading and sending the rest of a member's output after its exit."""
FINAL_SIGNALS = (signal.SIGINT.name, signal.SIGTERM.name)


class Agent:
    def __init__(
        self,
        spec: ClusterSpec,
        address: str | None,
        *,
        authority: Authority | None,
        timeouts: Timeouts | None = None,
        doctor: bool = False,
    ) -> None:
        """`address` is the coordinator's; None: read it from the spec's store. If `doctor` is true, the agent
        only answers probes."""
        self.entry = spec.me
        self.machine = Machine.here()
        self.timeouts = timeouts or Timeouts()
        host, credentials = self.machine.host, None
        if authority is not None:
            credentials = authority.issue(f"{AGENT}{host}"[:64])
        self._connector = Connector(spec, address, host=host, credentials=credentials)
        self._print = self._connector.print_line
        self._doctor = doctor
        self._process = secrets.token_hex(8)
        self._joined = False
        self._coordinator = ""
        self._signals: list[str] = []
        self._session: AgentSession | None = None

    def run(self) -> int:
        """Serve until the coordinator ends; return its exit code."""
        on_stop_signals(self._on_signal)
        while True:
            limit_s = self.timeouts.rejoin_s if self._joined else self.timeouts.gather_s
            address, link = self._connector.connect(limit_s, again=self._joined)
            with link:
                code = self._serve(link, address)
            if code is not None:
                if code and not self._signals:
                    self._print(f"exits with code {code}; see the output of {self._coordinator}")
                return code

    def _serve(self, link: Link, address: str) -> int | None:
        """Serve the coordinator. Returns its exit code, or None if it is lost."""
        try:
            admitted = self._join(link)
        except (LinkError, ProtocolError) as error:
            reason = str(error).rstrip(".")
            self._print(f"lost the coordinator before being admitted ({reason}); reconnecting")
            admitted = None
        if admitted is None:
            time.sleep(1)
            return None
        session = AgentSession(link, address, admitted, self.machine, self._signals)
        self._session = session
        if not self._joined:
            self._introduce(session, admitted.coordinator)
        self._joined, self._coordinator = True, admitted.coordinator
        try:
            code = session.serve()
        finally:
            self._session = None
            session.close()
        if code is None:
            self._print(f"{session.trouble}; killed its members, reconnecting")
        return code

    def _introduce(self, session: AgentSession, coordinator: str) -> None:
        slots = self.entry.slots
        work = "is probed by" if self._doctor else "serves"
        capacity = "" if self._doctor else f", {slots} slot{'s' * (slots != 1)}"
        self._print(f"{work} {coordinator}: {self.entry.name}{capacity}, over {session.reach}")

    def _join(self, link: Link) -> AgentAdmitted | None:
        """Send the hello. Returns None if another agent has this rank."""
        hello = AgentHello(self.machine, self.entry, self._process, self._doctor)
        link.send(hello)
        match link.recv(TO_AGENT, timeout_s=self.timeouts.host_s).message:
            case AgentAdmitted() as admitted:
                return admitted
            case AgentRefused(reason):
                raise UsageError(reason)
            case RankTaken(by):
                self._print(f"waits: {by} is already {self.entry.name}")
                return None
        raise ManyhandsError(f"{link.peer} is not a coordinator of this version.")

    def _on_signal(self, number: int, _frame: object) -> None:
        """Forward the first signal to the coordinator, which acts on it. Exit at once on the second."""
        name = signal.Signals(number).name
        again = name in FINAL_SIGNALS and any(s in FINAL_SIGNALS for s in self._signals)
        if self._session is None or self._doctor or again:
            # In a signal handler: must not wait for a lock.
            if self._session is not None:
                self._session.kill_all()
            os._exit(128 + number)
        if not self._signals:
            self._print(f"{name}: exits with the run; a second one exits now")
        self._signals.append(name)


class AgentSession:
    """One link to the coordinator, from admission to its exit or its loss."""

    def __init__(
        self,
        link: Link,
        address: str,
        admitted: AgentAdmitted,
        machine: Machine,
        signals: list[str],
    ) -> None:
        self.trouble = ""
        """Why the session ended without EndAgent."""
        self.reach = reach(link.own_host or "127.0.0.1")
        self._link = link
        self._address = address
        self._admitted = admitted
        self._signals = signals
        self._launcher = LocalLauncher(self.reach.interface)
        self._handles: dict[str, LocalHandle] = {}
        self._scratch: Scratch | None = None
        if admitted.scratch is None:
            # All agents of this run on this host share one folder.
            self._scratch = Scratch(f"{admitted.token}-{machine.identity[:8]}")
        self._logs = LogStream(
            lambda name, data: self._send(MemberOutput(name), data), on_error=self._fail
        )
        self._ended = threading.Event()
        start_thread(self._beat, name="beat", on_error=self._fail)
        self._probe: Probe | None = None
        probe_info = None
        if admitted.probe_secret:
            self._probe = Probe(admitted.host, self.reach.address, admitted.probe_secret)
            facts = HostFacts.here(admitted.host, self.reach)
            probe_info = ProbeInfo(facts, self._probe.address)
        self._send(AgentReady(os.path.exists(admitted.marker), probe_info))

    def serve(self) -> int | None:
        """Handle orders. Returns the coordinator's exit code, or None if it is lost."""
        limit_s = self._admitted.host_s
        while True:
            try:
                order = self._link.recv(TO_AGENT, timeout_s=limit_s).message
            except LinkTimeout:
                self.trouble = f"got no message from the coordinator for {limit_s:.0f} s"
                return None
            except (LinkError, ProtocolError) as error:
                lost = f"lost the coordinator ({str(error).rstrip('.')})"
                self.trouble = self.trouble or lost
                return None
            match order:
                case StartMember():
                    self._start(order)
                case TerminateMember(name) if name in self._handles:
                    self._handles[name].terminate()
                case KillMember(name) if name in self._handles:
                    self._handles[name].kill()
                case MeasureHost(other, address, seconds) if self._probe is not None:
                    self._send(Measured(self._probe.measure(other, address, seconds)))
                case EndAgent(code):
                    return code

    def close(self) -> None:
        """End all members that were started here."""
        self._ended.set()
        self._launcher.close()
        self._logs.close()
        if self._probe is not None:
            self._probe.close()
        if self._scratch is not None:
            self._scratch.close()

    def kill_all(self) -> None:
        for handle in self._handles.values():
            handle.kill()

    def _start(self, order: StartMember) -> None:
        scratch = self._admitted.scratch if self._scratch is None else str(self._scratch.path)
        assert scratch is not None
        invitation = replace(
            order.invitation,
            scratch=scratch,
            reach=self.reach.address,
            address=self._address,  # the one at which this agent reached the coordinator
        )
        request = StartRequest(order.name, order.entry, invitation, None, order.threads)
        try:
            handle = self._launcher.start(request)
        except OSError as error:
            self._send(StartFailed(order.name, str(error)))
            return
        self._handles[order.name] = handle
        assert handle.output is not None
        reader = self._logs.follow(order.name, handle.output)
        self._send(Started(order.name, handle.pid))
        start_thread(self._reap, handle, reader, name=f"reap-{order.name}", on_error=self._fail)

    def _fail(self, error: BaseException) -> None:
        """Close the link because a thread has failed: the coordinator would miss messages. It then drops
        this agent, which reconnects."""
        self.trouble = f"failed ({describe(error)})"
        self._link.close()

    def _reap(self, handle: LocalHandle, reader: threading.Thread) -> None:
        code = handle.wait()
        # Output is sent before the exit is reported.
        reader.join(OUTPUT_S)
        self._logs.flush(OUTPUT_S)
        self._send(MemberEnded(handle.name, code))

    def _beat(self) -> None:
        leaving_sent = False
        while not self._ended.wait(self._admitted.beat_s):
            self._send(LinkBeat())
            if self._signals and not leaving_sent:
                leaving_sent = True
                self._send(Leaving(self._signals[0]))

    def _send(self, message: Any, payload: bytes | None = None) -> None:
        with suppress(LinkError):  # the main thread sees the same error
            self._link.send(message, payload)
