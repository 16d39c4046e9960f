"""The board: small facts that members post for all others, kept for members that come later."""

from __future__ import annotations

from collections.abc import Iterable

MAX_FACTS = 10_000
MAX_CHARS = 64 << 20
"""Limits on the board. Beyond them the oldest fact is forgotten."""


class FactBoard:
    def __init__(self) -> None:
        self._facts: dict[str, str] = {}
        self._num_chars = 0

    def post(self, key: str, value: str) -> None:
        self._num_chars += len(key) + len(value)
        if (old := self._facts.pop(key, None)) is not None:
            self._num_chars -= len(key) + len(old)
        self._facts[key] = value
        while len(self._facts) > MAX_FACTS or self._num_chars > MAX_CHARS:
            oldest = next(iter(self._facts))
            self._num_chars -= len(oldest) + len(self._facts.pop(oldest))

    def items(self) -> Iterable[tuple[str, str]]:
        return self._facts.items()
