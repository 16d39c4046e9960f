"""The processes of a cluster meet as for training, and the first one has the hosts measured, pair by pair.

What is said on their links, as the `kind` of each message:

    attendant:  doctor (who it is), listens, measured, reached
    lead:       refused, or go; then measure, reach; end, with the exit code of all

One pair at a time, so that none disturbs another; with many hosts each gets less time.
"""

from __future__ import annotations

import dataclasses
import itertools
import queue
import secrets
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from manyhands.doctor.finding import Finding
from manyhands.doctor.hosts.facts import HostFacts, PairFacts
from manyhands.doctor.hosts.probe import REACH_S, STUCK_S, Probe
from manyhands.errors import CoordinatorLost, LinkError, ManyhandsError, UsageError
from manyhands.hosts.connect import LIMITS, Connector
from manyhands.hosts.interfaces import Endpoint, reach
from manyhands.hosts.launchers import AGENT
from manyhands.hosts.machine import Machine
from manyhands.hosts.refused_peers import RefusedPeers
from manyhands.hosts.rendezvous import publish
from manyhands.hosts.spec import EVALUATOR, ClusterSpec, Entry
from manyhands.transport import Authority, Link, Listener

HELLO_S = 5.0
LATER_S = 10.0
"""Attendants wait longer than the lead: it is the one that tells what is missing."""
PAIR_S = 0.4
"""Of sending, in each direction, between two hosts; less where all would take longer than ALL_S."""
ALL_S = 60.0
END_S = 3.0
SAY_AFTER_S = 4.0


@dataclass
class ProbeGuest:
    """A process that has come."""

    entry: Entry
    machine: Machine
    link: Link
    facts: HostFacts
    host: str = ""
    address: str = ""
    """Of its probe; empty: another process of its host has one."""

    def ask(self, within_s: float, kind: str, **fields: Any) -> dict[str, Any]:
        self.link.send({"kind": kind, **fields})
        return self.link.recv(timeout_s=within_s).head


class ProbeLead:
    """The first process. Use as a context manager; call `end` with the exit code of all."""

    def __init__(
        self,
        spec: ClusterSpec,
        address: str,
        *,
        authority: Authority | None,
        wait_s: float,
        tell: Callable[[str], None],
    ) -> None:
        self.findings: list[Finding] = []
        """Of those that did not come, or were not let in."""
        self._spec = spec
        self._wait_s = wait_s
        self._tell = tell
        self._machine = Machine.here()
        self._names = {self._machine.identity: self._machine.host}
        self._secret = secrets.token_hex(32)
        self._guests: list[ProbeGuest] = []
        self._came: queue.SimpleQueue[ProbeGuest | str | BaseException] = queue.SimpleQueue()
        """A process, or what is to be said of one that was refused, or why nobody else can come."""
        try:
            self._listener = Listener(
                address,
                credentials=authority.issue("coordinator") if authority else None,
                limits=LIMITS,
                on_refused=RefusedPeers(self._came.put),
            )
        except LinkError as error:
            raise UsageError(
                f"{error} If another process of this cluster is rank 0, too, give each its own rank; else "
                "give all processes another address:  --control tcp://HOST:PORT"
            ) from error
        if spec.store is not None:
            publish(spec.store, self._listener.address, tell)
        self._facts = HostFacts.here(self._machine.host)
        self._probe: Probe | None = None
        self._reach = Endpoint("lo", "127.0.0.1")
        self._listener.hand_over(self._read, name="read", on_error=self._came.put)

    # Who is there -----------------------------------------------------------------------------

    def gather(self) -> None:
        """Wait for all, as long as may be; who is missing is a finding."""
        began, said = time.monotonic(), False
        num_refused = 0
        while len(self._guests) + num_refused + 1 < self._spec.size:
            now = time.monotonic()
            if now - began > self._wait_s:
                break
            if now - began > SAY_AFTER_S and not said:
                said = True
                names = ", ".join(_known(entry) for entry in self._missing)
                self._tell(f"waiting at {self._listener.address} for {names}")
            with suppress(queue.Empty):
                came = self._came.get(timeout=0.2)
                if isinstance(came, BaseException):
                    raise came
                if isinstance(came, str):
                    num_refused += 1
                    self.findings.append(_refused(came))
                else:
                    num_refused += not self._take(came)
        waited_s = time.monotonic() - began
        in_time = f" within {waited_s:.0f} s" if waited_s > self._wait_s else ""
        instead = "; somebody came who was refused" if num_refused and not in_time else ""
        for entry in self._missing:
            self.findings.append(
                Finding(
                    _known(entry),
                    False,
                    f"did not come to {self._listener.address}{in_time}{instead}",
                    "Was this command started there, with the same key? Does that host reach this address? "
                    f"Look at what it printed. More time:  --wait {max(60, round(2 * self._wait_s))}",
                )
            )

    @property
    def _missing(self) -> list[Entry]:
        there = {0, *(guest.entry.rank for guest in self._guests)}
        wanted = (entry for entry in self._spec.entries if entry.role != EVALUATOR)
        return [entry for entry in wanted if entry.rank not in there]

    def _read(self, link: Link) -> None:
        try:
            hello = link.recv(timeout_s=HELLO_S).head
            if hello.get("kind") != "doctor":
                text = (
                    f"{self._machine.host} runs  manyhands doctor --cluster  and trains nothing. Start the "
                    "same command on every host."
                )
                link.send({"kind": "refused", "reason": text})
                return
            entry = Entry(**{**hello["entry"], "devices": tuple(hello["entry"]["devices"])})
            machine, facts = Machine(**hello["machine"]), HostFacts.from_dict(hello["facts"])
            self._came.put(ProbeGuest(entry, machine, link, facts))
        except (LinkError, KeyError, TypeError, ValueError, AttributeError):
            link.close()  # it is gone, or not one of ours

    def _take(self, guest: ProbeGuest) -> bool:
        """Whether it has a rank of its own."""
        guest.host = self._name_of(guest.machine)
        there = {0: self._machine.host, **{g.entry.rank: g.host for g in self._guests}}
        taken = there.get(guest.entry.rank)
        if taken is None:
            self._guests.append(guest)
            self._guests.sort(key=lambda guest: guest.entry.rank)
            return True
        text = f"{guest.entry.name} is the process on {taken} already, and one on {guest.host}, too"
        remedy = "Give each process a rank of its own: RANK=0, 1, 2, ..."
        self.findings.append(Finding(guest.host, False, text, remedy))
        with suppress(LinkError):
            guest.link.send({"kind": "refused", "reason": f"{text}. {remedy}"})
        return False

    def _name_of(self, machine: Machine) -> str:
        """The machine's name, with a number if another machine has the same."""
        taken = {name for identity, name in self._names.items() if identity != machine.identity}
        name, number = machine.host, 2
        while name in taken:
            name, number = f"{machine.host}~{number}", number + 1
        return self._names.setdefault(machine.identity, name)

    # Between hosts ----------------------------------------------------------------------------

    @property
    def hosts(self) -> list[HostFacts]:
        """The coordinator's own first."""
        own = replace(self._facts, address=self._reach.address, interface=self._reach.interface)
        found = {self._machine.host: replace(own, ranks=(0,))}
        for guest in self._guests:
            known = found.get(guest.host, replace(guest.facts, host=guest.host, ranks=()))
            found[guest.host] = replace(known, ranks=(*known.ranks, guest.entry.rank))
        return list(found.values())

    def measure(self) -> list[PairFacts]:
        """Every pair of hosts, one after the other."""
        self._settle()
        there = [guest for guest in self._guests if guest.address]
        num_pairs = len(there) * (len(there) + 1) // 2
        if not num_pairs:
            return []
        seconds = min(PAIR_S, ALL_S / num_pairs / 2)
        pairs = [self._measure_from_here(guest, seconds) for guest in there]
        for both in itertools.combinations(there, 2):
            if (pair := self._measure(*both, seconds)) is not None:
                pairs.append(pair)
        return pairs

    def _settle(self) -> None:
        """Each host gets a listener, which all others can find."""
        found = next((guest.link.own_host for guest in self._guests if guest.link.own_host), "")
        self._reach = reach(found or "127.0.0.1")  # where one has found us, others will
        self._probe = Probe(self._machine.host, self._reach.address, self._secret)
        hosts = {self._machine.host}
        for guest in list(self._guests):
            if guest.host not in hosts:
                hosts.add(guest.host)
                answer = self._ask(guest, HELLO_S, "go", secret=self._secret, host=guest.host)
                if answer is not None:
                    guest.address = str(answer["address"])
                    guest.facts = replace(
                        guest.facts, address=answer["own"], interface=answer["interface"]
                    )

    def _measure_from_here(self, guest: ProbeGuest, seconds: float) -> PairFacts:
        assert self._probe is not None
        pair = self._probe.measure(guest.host, guest.address, seconds)
        return self._with_way_back(pair, guest, self._probe.address)

    def _measure(self, one: ProbeGuest, other: ProbeGuest, seconds: float) -> PairFacts | None:
        within_s = 2 * seconds + REACH_S + 2 * STUCK_S
        told = {"other": other.host, "address": other.address, "seconds": seconds}
        answer = self._ask(one, within_s, "measure", **told)
        if answer is None:
            return None
        pair = PairFacts(**answer["pair"])
        return self._with_way_back(pair, other, one.address)

    def _with_way_back(self, pair: PairFacts, other: ProbeGuest, address: str) -> PairFacts:
        told = {"other": pair.one, "address": address}
        answer = self._ask(other, REACH_S + 2 * STUCK_S, "reach", **told)
        return pair if answer is None else replace(pair, trouble_back=str(answer["trouble"]))

    def _ask(
        self, guest: ProbeGuest, within_s: float, kind: str, **fields: Any
    ) -> Mapping[str, Any] | None:
        """Its answer; None: it is gone, which is a finding."""
        try:
            return guest.ask(within_s, kind, **fields)
        except LinkError as error:
            if guest in self._guests:
                self._guests.remove(guest)
                guest.link.close()
                self.findings.append(
                    Finding(
                        guest.host,
                        False,
                        f"was there, and is lost: {error}",
                        "Look at what it printed, and whether that host still runs.",
                    )
                )
            return None

    # The end ----------------------------------------------------------------------------------

    def end(self, code: int) -> None:
        for guest in self._guests:
            with suppress(LinkError):
                guest.link.send({"kind": "end", "code": code})
        deadline = time.monotonic() + END_S
        for guest in self._guests:
            with suppress(LinkError):  # it hangs up when it has read that
                guest.link.recv(timeout_s=max(0.0, deadline - time.monotonic()))
            guest.link.close()

    def __enter__(self) -> ProbeLead:
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.close()
        if self._probe is not None:
            self._probe.close()
        for guest in self._guests:
            guest.link.close()


class Attendant:
    """Any other process: says what its host has, and measures when it is asked to."""

    def __init__(
        self, spec: ClusterSpec, address: str | None, *, authority: Authority | None, wait_s: float
    ) -> None:
        self._entry = spec.me
        self._machine = Machine.here()
        self._wait_s = wait_s
        host, credentials = self._machine.host, None
        if authority is not None:
            credentials = authority.issue(f"{AGENT}{host}"[:64])
        self._dialler = Connector(spec, address, host=host, credentials=credentials)

    def run(self) -> int:
        """The lead's exit code."""
        facts = HostFacts.here(self._machine.host)
        _, link = self._dialler.dial(self._wait_s + LATER_S)
        with link:
            link.send(
                {
                    "kind": "doctor",
                    "machine": dataclasses.asdict(self._machine),
                    "entry": dataclasses.asdict(self._entry),
                    "facts": facts.to_dict(),
                }
            )
            try:
                return self._attend(link)
            except LinkError as error:
                raise CoordinatorLost(f"{self._machine.host} has lost rank 0: {error}") from None

    def _attend(self, link: Link) -> int:
        # It says nothing while it waits for others, and while others are measured.
        head = link.recv(timeout_s=self._wait_s + LATER_S + 2 * ALL_S).head
        match head:
            case {"kind": "refused", "reason": str(reason)}:
                raise UsageError(reason)
            case {"kind": "end", "code": int(code)}:
                return code
            case {"kind": "go", "secret": str(secret), "host": str(host)}:
                own = reach(link.own_host or "127.0.0.1")
                with Probe(host, own.address, secret) as probe:
                    told = {"own": own.address, "interface": own.interface}
                    link.send({"kind": "listens", "address": probe.address, **told})
                    return _serve(link, probe)
        raise ManyhandsError(f"{link.peer} is no  manyhands doctor  of this version.")


def _serve(link: Link, probe: Probe) -> int:
    while True:
        match link.recv(timeout_s=10 * ALL_S).head:
            case {"kind": "measure", "other": other, "address": where, "seconds": float(seconds)}:
                pair = probe.measure(other, where, seconds)
                link.send({"kind": "measured", "pair": pair.to_dict()})
            case {"kind": "reach", "other": other, "address": where}:
                link.send({"kind": "reached", "trouble": probe.reach(other, where)})
            case {"kind": "end", "code": int(code)}:
                return code


def _known(entry: Entry) -> str:
    return entry.name + (f" ({entry.host})" if entry.host else "")


def _refused(text: str) -> Finding:
    """Of somebody who did not pass the handshake."""
    return Finding(
        "key", False, text, "Give the same MANYHANDS_KEY, or the same --key-file, to all processes."
    )
