"""Find members that hang inside the job's code. Pure: the caller has the clock.

A member is stuck if it has been in one section of the job's code (hosts/activity.py) for `after_s`
without getting anything done. A member that waits for others is never stuck. Where long sections are
usual, the limit is twice the usual: the second longest that ended by itself, so that one hang that
resolved does not hide the next.
"""

from __future__ import annotations

from dataclasses import dataclass

from manyhands.hosts.activity import SAVING

STUCK_AFTER_S = 60.0
GIVE_UP_FACTOR = 10
"""A stuck member is given up after so many times the time after which it is named."""
ENDING_S = 20.0
"""When the run is being stopped, a stuck member is given up after this long."""


@dataclass
class Watched:
    step: int
    doing: str
    ticks: int
    since: float
    named: bool = False
    given_up: bool = False

    def words(self, now: float) -> str:
        seconds = f"{now - self.since:.0f} s"
        if self.step:
            return f"has been in step {self.step} for {seconds} ({self.doing})"
        return f"has been {self.doing} for {seconds}"


class StuckWatch:
    def __init__(self, after_s: float = STUCK_AFTER_S) -> None:
        """`after_s`: 0 for never."""
        self._after_s = after_s
        self._members: dict[str, Watched] = {}
        self._longest = (0.0, 0.0)
        """The two longest sections that ended by themselves, the shorter one first."""

    def hear(
        self, member: str, *, step: int, doing: str, ticks: int, now: float, busy: bool = False
    ) -> str | None:
        """A beat. If the member had been named and goes on, what to say of it.

        `busy`: it has used a core since the last one. In its first step that is progress: it may compile.
        """
        known = self._members.get(member)
        if known and (known.step, known.doing, known.ticks) == (step, doing, ticks):
            if busy and not ticks:
                known.since = now
            return None
        self._members[member] = Watched(step, doing, ticks, now)
        if known is None or not known.doing:
            return None
        took_s = now - known.since
        self._longest = tuple(sorted((*self._longest, took_s))[1:])  # type: ignore[assignment]
        return f"goes on after {took_s:.0f} s ({known.doing})" if known.named else None

    def forget(self, member: str) -> None:
        """It has ended."""
        self._members.pop(member, None)

    def newly_stuck(self, now: float) -> dict[str, str]:
        """Members that are to be named now, each once, and what to say of them."""
        if not self._after_s:
            return {}
        found = self._over(self._after_s, now)
        new = {name: each.words(now) for name, each in found.items() if not each.named}
        for name in new:
            found[name].named = True
        return new

    def hopeless(self, now: float, *, ending: bool = False) -> dict[str, str]:
        """Members to give up now, each once, and why. Never one that saves: a disk may be slow."""
        limit_s = self._after_s * GIVE_UP_FACTOR
        if ending:
            limit_s = min(self._after_s or ENDING_S, ENDING_S)
        if not limit_s:
            return {}
        found = {n: each for n, each in self._over(limit_s, now).items() if each.doing != SAVING}
        new = {name: each.words(now) for name, each in found.items() if not each.given_up}
        for name in new:
            found[name].given_up = True
        return new

    def _over(self, limit_s: float, now: float) -> dict[str, Watched]:
        limit_s = max(limit_s, 2 * self._longest[0])
        return {
            name: each
            for name, each in self._members.items()
            if each.doing and now - each.since >= limit_s
        }
