"""Find members that hang inside the job's code. Pure: the caller has the clock.

A member is stuck if it has been in one section of the job's code (hosts/activity.py) for `after_s`
without any progress. A member that waits for others is never stuck. If long sections are normal for a
job, the limit is twice the second longest one that ended by itself, so that one hang that resolved does
not hide the next.
"""

from __future__ import annotations

from dataclasses import dataclass

from manyhands.hosts.activity import SAVING
from manyhands.hosts.messages import Beat

STUCK_AFTER_S = 60.0
GIVE_UP_FACTOR = 10
"""A stuck member is ended after this many times the time after which it is reported."""
ENDING_S = 20.0
"""Time after which a stuck member is ended while the run is being stopped."""


@dataclass
class Watched:
    beat: Beat
    since: float
    reported: bool = False
    ended: bool = False

    def describe(self, now: float) -> str:
        seconds = f"{now - self.since:.0f} s"
        if self.beat.step:
            return f"has been in step {self.beat.step} for {seconds} ({self.beat.doing})"
        return f"has been {self.beat.doing} for {seconds}"


class StuckWatch:
    def __init__(self, after_s: float = STUCK_AFTER_S) -> None:
        """`after_s`: 0 for never."""
        self._after_s = after_s
        self._members: dict[str, Watched] = {}
        self._longest = (0.0, 0.0)
        """The two longest sections that ended by themselves, the shorter one first."""

    def on_beat(self, member: str, beat: Beat, now: float) -> str | None:
        """Take in a beat. If the member was reported as stuck and continues, returns the message to show."""
        known = self._members.get(member)
        if known and _section(known.beat) == _section(beat):
            if beat.busy and not beat.ticks:
                known.since = now  # in the first step, using a core is progress: it may compile
            return None
        self._members[member] = Watched(beat, now)
        if known is None or not known.beat.doing:
            return None
        took_s = now - known.since
        self._longest = tuple(sorted((*self._longest, took_s))[1:])  # type: ignore[assignment]
        return f"continues after {took_s:.0f} s ({known.beat.doing})" if known.reported else None

    def forget(self, member: str) -> None:
        """Forget a member that has ended."""
        self._members.pop(member, None)

    def newly_stuck(self, now: float) -> dict[str, str]:
        """Return the members to report as stuck now, each once, with the message to show."""
        if not self._after_s:
            return {}
        found = self._over(self._after_s, now)
        new = {name: each.describe(now) for name, each in found.items() if not each.reported}
        for name in new:
            found[name].reported = True
        return new

    def hopeless(self, now: float, *, ending: bool = False) -> dict[str, str]:
        """Return the members to end now, each once, with the reason. Never one that saves: a disk may be
        slow."""
        limit_s = self._after_s * GIVE_UP_FACTOR
        if ending:
            limit_s = min(self._after_s or ENDING_S, ENDING_S)
        if not limit_s:
            return {}
        found = {
            n: each for n, each in self._over(limit_s, now).items() if each.beat.doing != SAVING
        }
        new = {name: each.describe(now) for name, each in found.items() if not each.ended}
        for name in new:
            found[name].ended = True
        return new

    def _over(self, limit_s: float, now: float) -> dict[str, Watched]:
        limit_s = max(limit_s, 2 * self._longest[0])
        return {
            name: each
            for name, each in self._members.items()
            if each.beat.doing and now - each.since >= limit_s
        }


def _section(beat: Beat) -> tuple[int, str, int]:
    return beat.step, beat.doing, beat.ticks
