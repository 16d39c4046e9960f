"""A member's copy of the board, which the coordinator keeps up to date."""

from __future__ import annotations

import threading

from manyhands.errors import LinkTimeout, ViewChanging


class BoardCopy:
    """Facts that members have posted, and the number of the newest view. Written by the control thread."""

    def __init__(self, name: str) -> None:
        self.newest_view = 0
        """The number of the newest view that has arrived, whether or not the member has taken it."""
        self.taken_view = 0
        """The number of the newest view that the member has taken from its queue."""
        self._name = name
        self._facts: dict[str, str] = {}
        self._changed = threading.Condition()

    def add(self, key: str, value: str) -> None:
        with self._changed:
            self._facts[key] = value
            self._changed.notify_all()

    def on_view(self, number: int) -> None:
        with self._changed:
            self.newest_view = number
            self._changed.notify_all()

    def fetch(self, key: str, *, timeout_s: float) -> str:
        """Wait for a fact. ViewChanging if a view arrives that the member has not taken yet: the member that
        would post the fact may be gone."""
        with self._changed:
            if not self._changed.wait_for(
                lambda: key in self._facts or self.newest_view > self.taken_view, timeout_s
            ):
                raise LinkTimeout(
                    f"{self._name} waited {timeout_s:.0f} s for {key!r} of its peers."
                )
            if key not in self._facts:
                raise ViewChanging(f"{self._name} waited for {key!r} when the members changed.")
            return self._facts[key]
