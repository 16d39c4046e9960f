"""Messages between members and the coordinator that are not about training (see control/messages.py).

One dataclass a message, by its `kind`. What does not fit is a ProtocolError, and closes that link.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from manyhands.errors import ProtocolError
from manyhands.hosts.view import View
from manyhands.transport.fields import Count, MessageSet, Seconds, read

MOST_POSTED_BYTES = 1 << 18
"""Of one fact on the board."""


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


def _short(value: str) -> str:
    if len(value) > MOST_POSTED_BYTES:
        raise ValueError(f"has {len(value)} characters, over the limit of {MOST_POSTED_BYTES}")
    return value


@dataclass(frozen=True)
class BoardPost:
    """A small fact for the board."""

    key: Annotated[str, _short]
    value: Annotated[str, _short]


@dataclass(frozen=True)
class Bye:
    """All done."""


@dataclass(frozen=True)
class Failed:
    """Why a member ends."""

    reason: str
    traceback: str
    usage: bool
    consequence: bool
    weights_lost: bool
    exit_code: int


OF_MEMBERS: Mapping[str, type[Any]] = {
    "hello": Hello,
    "beat": Beat,
    "post": BoardPost,
    "bye": Bye,
    "failed": Failed,
}


@dataclass(frozen=True)
class ViewFormed:
    """The coordinator has formed a view that this member is in."""

    view: View


@dataclass(frozen=True)
class Posted:
    """A fact that a member has posted on the board."""

    key: str
    value: str


@dataclass(frozen=True)
class WriteStacks:
    """Write the stacks of all threads to the log."""


FROM_COORDINATOR = MessageSet({"view": ViewFormed, "posted": Posted, "stacks": WriteStacks})
"""What the coordinator sends to members, besides orders (control/messages.py)."""


def read_kind(kinds: Mapping[str, type[Any]], head: Mapping[str, Any]) -> Any:
    """The message, as the dataclass of its kind."""
    kind = head.get("kind")
    if not isinstance(kind, str) or kind not in kinds:
        raise ProtocolError(f"its kind is {str(kind)[:80]!r}, which nobody knows")
    return read(kinds[kind], head)
