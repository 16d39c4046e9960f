"""Chooses the member to leave out if two living members do not reach each other. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

MAX_FAILED_VIEWS = 2
"""Consecutive views in which two members fail to reach each other before one of them is left out."""


class UnreachedPeers:
    def __init__(self) -> None:
        self.left_out: set[str] = set()
        """Members that were left out. They are not replaced."""
        self._pairs: list[tuple[str, str]] = []
        """Members that did not reach each other, one pair per view."""

    def add(self, member: str, peer: str) -> None:
        self._pairs.append((member, peer))

    def clear(self) -> None:
        """Start over, after a successful view or a death."""
        self._pairs.clear()

    @property
    def too_often(self) -> bool:
        return len(self._pairs) >= MAX_FAILED_VIEWS

    def leave_out(
        self, names: Sequence[str], is_worker: Callable[[str], bool]
    ) -> tuple[str, list[str]]:
        """Choose the member that is in most pairs, a worker if possible. Returns it and its peers in them."""
        counts = Counter(name for pair in self._pairs for name in pair if name in names)
        chosen = max(counts, key=lambda name: (counts[name], is_worker(name), names.index(name)))
        pairs = [pair for pair in self._pairs if chosen in pair]
        self.left_out.add(chosen)
        return chosen, sorted({name for pair in pairs for name in pair} - {chosen})
