"""Messages between the coordinator and agents.

An invalid message closes the link. The coordinator then drops the agent; an agent kills its members
and connects again.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated

from manyhands.hosts.host_facts import HostFacts, PairFacts
from manyhands.hosts.invitation import Invitation
from manyhands.hosts.machine import Machine
from manyhands.hosts.spec import ROLES, Entry
from manyhands.transport.fields import Count, MessageSet, Seconds, at_least, at_most, check

MAX_SLOTS = 1 << 12


Name = Annotated[
    str, check(lambda value: bool(re.fullmatch(r"[\w.-]{1,100}", value)), "is no name")
]
Interval = Annotated[float, at_least(0.01), at_most(1e7)]
ExitCode = Annotated[int, check(lambda code: -255 <= code <= 255, "is no exit code")]


# From an agent ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class AgentHello:
    machine: Machine
    entry: Entry
    process: str
    """Stays the same when this agent connects again; unique among agents."""
    doctor: bool = False
    """If true, the agent answers probes and starts no members (`manyhands doctor --cluster`)."""

    def __post_init__(self) -> None:
        entry = self.entry
        if entry.role not in ROLES or entry.rank < 0 or not 0 <= entry.slots <= MAX_SLOTS:
            raise ValueError(f"it is {entry.role!r} of rank {entry.rank}, {entry.slots} slots")


@dataclass(frozen=True)
class ProbeInfo:
    """Facts of a probe about its host, and its address."""

    facts: HostFacts
    address: str


@dataclass(frozen=True)
class AgentReady:
    """The agent can start members."""

    sees_run: bool
    """If true, the run folder is visible on its host."""
    probe: ProbeInfo | None = None
    """Present if the coordinator asked for a probe."""


@dataclass(frozen=True)
class Started:
    name: str
    pid: Count


@dataclass(frozen=True)
class StartFailed:
    name: str
    reason: str


@dataclass(frozen=True)
class MemberEnded:
    name: str
    code: ExitCode


@dataclass(frozen=True)
class MemberOutput:
    """Its payload is what a member has printed."""

    name: str


@dataclass(frozen=True)
class Leaving:
    """The agent's process got a signal to end."""

    signal: str


@dataclass(frozen=True)
class LinkBeat:
    """Heartbeat, sent by both sides every second: a link without any for long enough is lost."""


@dataclass(frozen=True)
class Measured:
    """Answers MeasureHost."""

    pair: PairFacts


FROM_AGENT = MessageSet(
    AgentHello,
    AgentReady,
    Started,
    StartFailed,
    MemberEnded,
    MemberOutput,
    Leaving,
    LinkBeat,
    Measured,
)


# To an agent --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class AgentAdmitted:
    host: str
    """The host's name in this run, which no other host has."""
    coordinator: str
    """The name of the coordinator's host."""
    scratch: str | None
    """The coordinator's scratch folder, if the agent is on the same host."""
    token: Name
    """Names the run's scratch folder on other hosts."""
    marker: str
    """A file in the run folder: if the agent sees it, it sees the run folder."""
    beat_s: Interval
    host_s: Interval
    probe_secret: str = ""
    """If not empty, start a probe with this secret."""


@dataclass(frozen=True)
class AgentRefused:
    reason: str


@dataclass(frozen=True)
class RankTaken:
    """Refusal because another agent has this rank; the agent may try again."""

    by: str


@dataclass(frozen=True)
class StartMember:
    name: str
    entry: Name
    """The Python module of the member's program."""
    threads: Count
    invitation: Invitation


@dataclass(frozen=True)
class TerminateMember:
    name: str


@dataclass(frozen=True)
class KillMember:
    name: str


@dataclass(frozen=True)
class EndAgent:
    """The run has ended."""

    code: ExitCode


@dataclass(frozen=True)
class MeasureHost:
    """Measure the connection to another host's probe, sending for `seconds` in each direction. With 0, only
    see whether it can be reached."""

    other: str
    address: str
    seconds: Annotated[Seconds, at_most(5.0)]


TO_AGENT = MessageSet(
    AgentAdmitted,
    AgentRefused,
    RankTaken,
    StartMember,
    TerminateMember,
    KillMember,
    LinkBeat,
    EndAgent,
    MeasureHost,
)
