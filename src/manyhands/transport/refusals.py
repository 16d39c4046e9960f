"""Refused connections: counted instead of logged one by one, so that a million attempts do not fill a disk.

For each reason the first is logged, then the tenth, the hundredth and so on, with the count so far; when the
listener closes, the total, if some were not logged. Reasons that differ only in numbers or quoted text are
the same, and so are those that begin with the same two clauses, because a decoder's errors about noise differ
each time. Beyond MAX_REASONS all others count as one reason, so there are some dozens of lines at most.
"""

from __future__ import annotations

import logging
import re
import threading
from collections import Counter

EVERY = 10
"""Factor of growth of the count after which the next line is logged."""
MAX_REASONS = 40
OTHERS = ""
_DETAILS = re.compile(r"""b?'[^']*'|b?"[^"]*"|0x[0-9a-f]+|[\d.:]+""")
"""Quoted text, numbers and addresses in a reason."""
CLAUSES = 2
"""Clauses of a reason, between colons, that tell its kind."""


class Refusals:
    """Counts refused connections. Thread-safe."""

    def __init__(self, logger: logging.Logger, where: str) -> None:
        """`where`: the name of the refusing side, which begins each line."""
        self.count = 0
        self._logger = logger
        self._where = where
        self._by_reason: Counter[str] = Counter()
        self._next: dict[str, int] = {}
        self._num_logged = 0
        self._lock = threading.Lock()

    def add(self, peer: str, reason: object) -> None:
        clauses = str(reason)[:1000].split(": ")[:CLAUSES]
        kind = _DETAILS.sub("#", ": ".join(clauses))[:100]
        with self._lock:
            self.count += 1
            if kind not in self._by_reason and len(self._by_reason) >= MAX_REASONS:
                kind = OTHERS
            self._by_reason[kind] += 1
            count = self._by_reason[kind]
            if count < self._next.get(kind, 1):
                return
            self._next[kind] = count * EVERY
            self._num_logged += 1
        so_far = f"a connection from {peer}" if count == 1 else f"{count:,} connections, now {peer}"
        self._logger.warning("%s refused %s: %s", self._where, so_far, reason)

    def close(self) -> None:
        """Log the total."""
        with self._lock:
            count, hidden = self.count, self.count - self._num_logged
            self._num_logged = self.count
        if hidden:
            self._logger.warning("%s refused %s connections in all", self._where, f"{count:,}")
