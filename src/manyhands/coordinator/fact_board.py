"""The board: small facts that members post for all others, kept for members that come later."""

from __future__ import annotations

MAX_FACTS = 10_000
MAX_CHARS = 64 << 20
"""Limits on the board. Beyond them the oldest fact is forgotten."""


class FactBoard:
    def __init__(self) -> None:
        self.facts: dict[str, str] = {}
        self._num_chars = 0

    def post(self, key: str, value: str) -> None:
        self._num_chars += len(key) + len(value)
        if (old := self.facts.pop(key, None)) is not None:
            self._num_chars -= len(key) + len(old)
        self.facts[key] = value
        while len(self.facts) > MAX_FACTS or self._num_chars > MAX_CHARS:
            oldest = next(iter(self.facts))
            self._num_chars -= len(oldest) + len(self.facts.pop(oldest))
