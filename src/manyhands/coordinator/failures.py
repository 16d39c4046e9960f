"""Finds the failure that came first. Pure.

When a member dies, its peers fail too, a moment later and with louder messages. So failures have
grades: a cause is reported at once; a consequence (a broken collective) only if no cause shows up for a
while; a suspicion (a closed link) only if nothing better does.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum


class Grade(IntEnum):
    CAUSE = 0
    CONSEQUENCE = 1
    SUSPICION = 2


@dataclass(frozen=True)
class MemberFailure:
    member: str
    reason: str
    traceback: str = ""
    grade: Grade = Grade.CAUSE
    usage: bool = False
    """If true, it is a user error: shown without a traceback."""
    exit_code: int = 1
    transient: bool = False
    """If true, a new start may not fail again: a process was killed, or a host is gone."""


class FirstFailure:
    def __init__(self, settle_s: float) -> None:
        self._settle_s = settle_s
        self._failures: dict[str, MemberFailure] = {}
        self._newest = 0.0

    def add(self, failure: MemberFailure, now: float) -> None:
        known = self._failures.get(failure.member)
        if known is not None and known.grade is not Grade.SUSPICION:
            return  # the first reason that a member gave counts
        if known is not None:
            del self._failures[failure.member]  # it counts from now on
        self._failures[failure.member] = failure
        self._newest = now

    def verdict(self, now: float) -> MemberFailure | None:
        """Return the failure to report, once it is certain or nothing new has come for a while."""
        first = min(self._failures.values(), key=lambda failure: failure.grade, default=None)
        if first is None or first.grade is Grade.CAUSE or now - self._newest >= self._settle_s:
            return first
        return None
