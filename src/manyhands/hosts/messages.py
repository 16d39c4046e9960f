"""Messages between members and the coordinator that are not about training (control/messages.py)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from manyhands.hosts.view import View
from manyhands.transport.fields import Count, Seconds, max_length

Fact = Annotated[str, max_length(1 << 18)]
"""A key or value on the board."""


@dataclass(frozen=True)
class Hello:
    member: str
    pid: Count = 0
    host: str = ""
    python: str = ""


@dataclass(frozen=True)
class Beat:
    phase: str
    since_s: Seconds
    ticks: Count
    step: Count = 0
    doing: str = ""
    """The section of the job's code that it is in; see activity.py."""
    busy: bool = False
    """If true, it has used a core since the last beat."""
    cpu_s: Seconds = 0.0
    """CPU time since the last beat."""
    updates: Count = 0
    """Updates that a dedicated server has applied."""


@dataclass(frozen=True)
class BoardPost:
    """A small fact for the board."""

    key: Fact
    value: Fact


@dataclass(frozen=True)
class Bye:
    """Last message of a member that is done."""


@dataclass(frozen=True)
class Failed:
    """Report of a member's failure."""

    reason: str
    traceback: str
    usage: bool
    consequence: bool
    weights_lost: bool
    exit_code: int


@dataclass(frozen=True)
class Report:
    view: Count
    """Number of the view that it belongs to."""


@dataclass(frozen=True)
class LinkBroken(Report):
    """The link to a peer that is alive is broken: all should connect again, in a new view."""

    peer: str


@dataclass(frozen=True)
class PeerRefused(Report):
    """A peer sent an invalid message, and its link was closed."""

    peer: str
    why: str


@dataclass(frozen=True)
class ViewFormed:
    """The coordinator has formed a view. A worker that was in the last one and is not in this one stands
    by."""

    view: View


@dataclass(frozen=True)
class Posted:
    """A fact that a member has posted on the board."""

    key: str
    value: str


@dataclass(frozen=True)
class WriteStacks:
    """Write the stacks of all threads to the log."""
