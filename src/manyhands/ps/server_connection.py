"""A server as a worker sees it: its connections, and which of its parameters have arrived."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from manyhands.ps.block_store import Span
from manyhands.ps.protocol import PushMessage
from manyhands.transport import Link
from manyhands.transport.event_loop import PriorityChannel


@dataclass
class ServerConnection:
    """A server as a worker sees it."""

    name: str
    link: Link
    channel: PriorityChannel | None = None
    lane_links: list[Link] = field(default_factory=list)
    runs: list[Span] = field(default_factory=list)
    arrived: list[int] = field(default_factory=list)
    """The version in which each run has arrived."""
    kept: frozenset[int] = frozenset()
    """The runs whose replica is in this process: the worker computes with the replica itself."""
    replica: Callable[[], int] = lambda: -1
    """The version of that replica."""
    version: int = -1
    done: int = 0
    """The last push of this worker that is in the weights there."""
    travels: bool = False
    began: bool = False
    returning: bool = False
    """If true, its connections broke, and it is reconnecting."""
    lost: str = ""
    ahead: list[tuple[int, int, int]] = field(default_factory=list)
    """(run, seq, slot) of the runs already sent of an incomplete push."""
    requests: dict[object, tuple[Any, memoryview | None]] = field(default_factory=dict)
    """Messages without an answer yet, by their class or tag: sent again over the next connection."""
    sent_before: int = 0
    """Bytes sent over the links that were lost."""

    @property
    def here(self) -> int:
        """The version in which all of its parameters have arrived."""
        if not self.travels:
            return self.version
        return min([self.version, *map(self.version_of, range(len(self.runs)))])

    def version_of(self, i: int) -> int:
        """The version in which a run has arrived."""
        return self.replica() if i in self.kept else self.arrived[i]

    @property
    def bytes_sent(self) -> int:
        """Bytes sent over all links so far. It never falls, also while a lost link is replaced."""
        if self.returning:
            return self.sent_before
        channel = self.channel.bytes_sent if self.channel else 0
        return self.sent_before + self.link.bytes_sent + channel


@dataclass(frozen=True)
class PushOutcome:
    """What became of a push."""

    left_out: bool = False
    staleness: int = 0
    lr: float | None = None
    """The learning rate that it was applied with, scaled to a whole step; None: not reported."""


@dataclass(frozen=True)
class Push:
    """A push whose outcome is not known yet."""

    seq: int
    slot: int
    message: PushMessage
    baskets: Mapping[str, memoryview]
    """By server: gradients of table rows."""
