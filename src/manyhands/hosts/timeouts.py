"""Every timeout of the system, named, in one place.

Timeouts are the second line of defence: a closed socket or a reaped child shows a death long before any of
these. They catch what neither shows: a frozen process, a host that is gone, a deadlock.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

ENDLESS_S = 7 * 24 * 3600.0
"""In milliseconds it still fits what poll() takes."""


@dataclass(frozen=True)
class Timeouts:
    hello_s: float = 60.0
    """A started member has sent its hello."""
    ready_s: float = 900.0
    """A member has loaded its job, its data and its model (a first download included)."""
    view_s: float = 120.0
    """All members of a new view have connected to each other."""
    silence_s: float = 120.0
    """A member has sent nothing, not even a beat: its process or its host is frozen."""
    step_s: float = 900.0
    """No member has made progress: no step, no batch of an evaluation, no checkpoint."""
    collective_s: float = 1800.0
    """One collective operation, inside torch."""
    settle_s: float = 0.4
    """Time to wait for the cause after a first failure is reported."""
    stop_s: float = 300.0
    """Members that were asked to finish and save have done so."""
    gather_s: float = 300.0
    """All announced processes have joined, or enough of them to begin."""
    grace_s: float = 30.0
    """Not a failure: if fewer are enough, how long to wait for the rest before training begins."""
    host_s: float = 15.0
    """An agent, or from its side the coordinator, has sent nothing: that host counts as lost."""
    rejoin_s: float = 600.0
    """An agent that lost the coordinator has connected again, while nothing shows that it has ended."""
    kill_s: float = 1.0
    """A member asked to end has ended, before it is killed."""
    beat_s: float = 1.0
    """Not a limit: the interval of beats."""

    @classmethod
    def endless(cls) -> Timeouts:
        """Return timeouts for debugging: nothing times out."""
        short = ("settle_s", "kill_s", "beat_s")
        names = (field.name for field in dataclasses.fields(cls) if field.name not in short)
        return cls(**dict.fromkeys(names, ENDLESS_S))
