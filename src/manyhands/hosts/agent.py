"""An agent: a process that stands on a host, and starts and ends members there for the coordinator.

    dial        the coordinator, until it is there
    engage      say who it is; be let in, or be told why not
    serve       start, terminate and kill members, tell how they end, send what they print
    lose        the link is lost or silent: kill every member, and dial again, with free slots
    end         when the coordinator says so, with its exit code

Members are children of the agent: the kernel kills them when it dies. The coordinator's word comes in order,
in the main thread, which also starts the members, for the kernel means the thread that has started them.
"""

from __future__ import annotations

import dataclasses
import os
import secrets
import signal
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from manyhands.errors import LinkError, LinkTimeout, ManyhandsError, UsageError
from manyhands.hosts.connect import Connector
from manyhands.hosts.interfaces import reach
from manyhands.hosts.launchers.base import AGENT, StartRequest
from manyhands.hosts.launchers.local import LocalHandle, LocalLauncher
from manyhands.hosts.log_stream import LogStream
from manyhands.hosts.machine import Machine
from manyhands.hosts.scratch import Scratch
from manyhands.hosts.spec import ClusterSpec
from manyhands.hosts.stop_signals import on_stop_signals
from manyhands.hosts.timeouts import Timeouts
from manyhands.threads import describe, start_thread
from manyhands.transport import Authority, Link

LAST_WORDS_S = 2.0
"""What a member has printed before its end has been read and sent."""


class Agent:
    def __init__(
        self,
        spec: ClusterSpec,
        address: str | None,
        *,
        authority: Authority | None,
        timeouts: Timeouts | None = None,
    ) -> None:
        """`address`: of the coordinator; None: the spec's store knows it."""
        self.spec = spec
        self.entry = spec.me
        self.machine = Machine.here()
        self.timeouts = timeouts or Timeouts()
        host, credentials = self.machine.host, None
        if authority is not None:
            credentials = authority.issue(f"{AGENT}{host}"[:64])
        self._dialler = Connector(spec, address, host=host, credentials=credentials)
        self._say = self._dialler.say
        self._process = secrets.token_hex(8)
        self._engaged = False
        self._coordinator = ""
        self._signals: list[str] = []
        self._engagement: AgentSession | None = None

    def run(self) -> int:
        """Serve until the coordinator ends; its exit code."""
        on_stop_signals(self._on_signal)
        while True:
            limit_s = self.timeouts.rejoin_s if self._engaged else self.timeouts.gather_s
            address, link = self._dialler.dial(limit_s, again=self._engaged)
            with link:
                code = self._serve(link, address)
            if code is not None:
                if code and not self._signals:
                    self._say(
                        f"ends with the run, exit code {code}; {self._coordinator} has said why"
                    )
                return code

    # The coordinator --------------------------------------------------------------------------

    def _serve(self, link: Link, address: str) -> int | None:
        """What the coordinator asks for, until it ends (its exit code) or is lost (None)."""
        try:
            engagement = self._engage(link, address)
        except LinkError as error:
            self._say(
                f"lost the coordinator before it was let in ({str(error).rstrip('.')}); dials again"
            )
            time.sleep(1)
            return None
        if engagement is None:
            time.sleep(1)
            return None
        self._engagement = engagement
        try:
            code = engagement.serve()
        finally:
            self._engagement = None
            engagement.close()
        if code is None:
            self._say(f"{engagement.trouble}; its members are ended, and it dials again")
        return code

    def _engage(self, link: Link, address: str) -> AgentSession | None:
        link.send(
            {
                "kind": "agent",
                "machine": dataclasses.asdict(self.machine),
                "entry": dataclasses.asdict(self.entry),
                "process": self._process,
            }
        )
        answer = link.recv(timeout_s=self.timeouts.host_s).head
        match answer:
            case {"kind": "engaged"}:
                terms = {**answer, "identity": self.machine.identity}
                engagement = AgentSession(link, address, terms, self._signals)
                if not self._engaged:
                    slots = self.entry.slots
                    self._say(
                        f"serves {answer['coordinator']}: {self.entry.name}, "
                        f"{slots} slot{'s' * (slots != 1)}, over {engagement.reach}"
                    )
                self._engaged, self._coordinator = True, answer["coordinator"]
                return engagement
            case {"kind": "refused", "reason": str(reason)}:
                raise UsageError(reason)
            case {"kind": "taken", "by": str(other)}:
                self._say(f"waits: {other} is {self.entry.name} already")
                return None
        raise ManyhandsError(f"{link.peer} is no coordinator of this version.")

    def _on_signal(self, number: int, _frame: object) -> None:
        """The first one is the coordinator's to act on, too; a second one ends this process at once."""
        name = signal.Signals(number).name
        final = [signal.SIGINT.name, signal.SIGTERM.name]
        if self._engagement is None or (name in final and any(s in final for s in self._signals)):
            os._exit(self._end(128 + number))
        if not self._signals:
            self._say(f"{name}: ends with the run; a second one ends it now")
        self._signals.append(name)

    def _end(self, code: int) -> int:
        """In a signal's handler: no lock may be waited for."""
        if self._engagement is not None:
            self._engagement.kill_all()
        return code


class AgentSession:
    """From being let in by the coordinator to its end, or to the loss of the link."""

    def __init__(
        self, link: Link, address: str, terms: Mapping[str, Any], signals: list[str]
    ) -> None:
        self.trouble = ""
        self.reach = reach(link.own_host or "127.0.0.1")
        self._link = link
        self._address = address
        self._terms = terms
        self._signals = signals
        self._told = 0
        self._launcher = LocalLauncher(self.reach.interface)
        self._handles: dict[str, LocalHandle] = {}
        self._scratch: Scratch | None = None
        self._scratch_path = terms["scratch"]  # the coordinator's, if it is on this host
        if self._scratch_path is None:
            # The same for all agents of this run here.
            self._scratch = Scratch(f"{terms['token']}-{terms['identity'][:8]}")
            self._scratch_path = str(self._scratch.path)
        self._logs = LogStream(
            lambda name, data: self._tell("log", data, name=name), on_error=self._fail
        )
        self._over = threading.Event()
        start_thread(self._beat, name="beat", on_error=self._fail)
        link.send({"kind": "settled", "sees_run": Path(terms["marker"]).exists()})

    def serve(self) -> int | None:
        silence_s = float(self._terms["host_s"])
        while True:
            try:
                head = self._link.recv(timeout_s=silence_s).head
            except LinkTimeout:
                self.trouble = f"has heard nothing of the coordinator for {silence_s:.0f} s"
                return None
            except LinkError as error:
                lost = f"has lost the coordinator ({str(error).rstrip('.')})"
                self.trouble = self.trouble or lost
                return None
            match head:
                case {"kind": "start"}:
                    self._start(head)
                case {"kind": "terminate", "name": str(name)} if name in self._handles:
                    self._handles[name].terminate()
                case {"kind": "kill", "name": str(name)} if name in self._handles:
                    self._handles[name].kill()
                case {"kind": "end", "code": int(code)}:
                    return code

    def close(self) -> None:
        """Nobody is left of those that were started here."""
        self._over.set()
        self._launcher.close()
        self._logs.close()
        if self._scratch is not None:
            self._scratch.close()

    def kill_all(self) -> None:
        for handle in self._handles.values():
            handle.kill()

    def _start(self, head: Mapping[str, Any]) -> None:
        name = head["name"]
        invitation = {
            **head["invitation"],
            "scratch": self._scratch_path,
            "reach": self.reach.address,
            "address": self._address,  # where this agent has found it, members will, too
        }
        try:
            handle = self._launcher.start(
                StartRequest(name, head["entry"], invitation, None, head["threads"])
            )
        except OSError as error:
            self._tell("unstarted", name=name, reason=str(error))
            return
        self._handles[name] = handle
        assert handle.output is not None
        reader = self._logs.follow(name, handle.output)
        self._tell("started", name=name, pid=handle.pid)
        start_thread(self._reap, handle, reader, name=f"reap-{name}", on_error=self._fail)

    def _fail(self, error: BaseException) -> None:
        """A thread has: the coordinator would not hear of something. It gives this agent up, which then
        dials again."""
        self.trouble = f"failed ({describe(error)})"
        self._link.close()

    def _reap(self, handle: LocalHandle, reader: threading.Thread) -> None:
        code = handle.wait()
        # What it has printed is there before its end is known.
        reader.join(LAST_WORDS_S)
        self._logs.flush(LAST_WORDS_S)
        self._tell("exited", name=handle.name, code=code)

    def _beat(self) -> None:
        while not self._over.wait(float(self._terms["beat_s"])):
            self._tell("beat")
            if self._signals and not self._told:
                self._told = 1
                self._tell("leaving", signal=self._signals[0])

    def _tell(self, kind: str, payload: bytes | None = None, **fields: Any) -> None:
        with suppress(LinkError):  # the main thread sees the same
            self._link.send({"kind": kind, **fields}, payload)
