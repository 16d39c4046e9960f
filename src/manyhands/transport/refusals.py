"""Refused connections, counted instead of logged one by one: who knocks a million times must not fill a disk.

Of each reason the first is logged, then the tenth, the hundredth and so on, with the number so far; when the
listener closes, how many there were in all, if some were not logged. Reasons that differ in numbers or quoted
text only are one, and so are those that begin with the same two clauses: what a decoder says of noise differs
each time. Beyond MAX_REASONS all others are one, so the lines are some dozens, whatever comes.
"""

from __future__ import annotations

import logging
import re
import threading
from collections import Counter

EVERY = 10
"""Each line after the first comes when there are so many times more."""
MAX_REASONS = 40
OTHERS = ""
_DETAILS = re.compile(r"""b?'[^']*'|b?"[^"]*"|0x[0-9a-f]+|[\d.:]+""")
"""Of a reason: what was quoted, numbers and addresses."""
CLAUSES = 2
"""Of a reason, between colons, that tell its kind."""


class Refusals:
    """Any thread adds to it."""

    def __init__(self, logger: logging.Logger, where: str) -> None:
        """`where`: who refuses, as a line begins."""
        self.count = 0
        self._logger = logger
        self._where = where
        self._by_reason: Counter[str] = Counter()
        self._next: dict[str, int] = {}
        self._num_logged = 0
        self._lock = threading.Lock()

    def add(self, who: str, why: object) -> None:
        clauses = str(why)[:1000].split(": ")[:CLAUSES]
        reason = _DETAILS.sub("#", ": ".join(clauses))[:100]
        with self._lock:
            self.count += 1
            if reason not in self._by_reason and len(self._by_reason) >= MAX_REASONS:
                reason = OTHERS
            self._by_reason[reason] += 1
            count = self._by_reason[reason]
            if count < self._next.get(reason, 1):
                return
            self._next[reason] = count * EVERY
            self._num_logged += 1
        so_far = f"a connection from {who}" if count == 1 else f"{count:,} connections, now {who}"
        self._logger.warning("%s refused %s: %s", self._where, so_far, why)

    def close(self) -> None:
        """No more come."""
        with self._lock:
            count, hidden = self.count, self.count - self._num_logged
            self._num_logged = self.count
        if hidden:
            self._logger.warning("%s refused %s connections in all", self._where, f"{count:,}")
