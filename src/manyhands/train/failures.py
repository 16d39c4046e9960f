"""Which failure came first. Pure.

When a member dies, its peers fail too, a moment later and with louder messages. A failure that is a
consequence (a broken collective) only counts if no cause shows up while things settle.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Failure:
    member: str
    reason: str
    traceback: str = ""
    consequence: bool = False
    usage: bool = False
    """The person's mistake: told without a traceback."""
    exit_code: int = 1


class FirstFailure:
    def __init__(self, settle_s: float) -> None:
        self._settle_s = settle_s
        self._failures: list[Failure] = []
        self._since: float | None = None

    def add(self, failure: Failure, now: float) -> None:
        if any(known.member == failure.member for known in self._failures):
            return  # what a member said first is why it ended
        self._failures.append(failure)
        self._since = now if self._since is None else self._since

    def suspect(self, now: float) -> None:
        """Something is wrong, and the cause should show up in a moment."""
        self._since = now if self._since is None else self._since

    def verdict(self, now: float) -> Failure | None:
        """The failure to name, once it is certain or the time to settle is over."""
        for failure in self._failures:
            if not failure.consequence:
                return failure
        if self._failures and self._since is not None and now - self._since >= self._settle_s:
            return self._failures[0]
        return None
