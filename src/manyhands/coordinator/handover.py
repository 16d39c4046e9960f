"""State that workers hold alone (`Traits.holds_state`), when they leave on purpose.

Before the view without them is formed, while nothing is open, all workers of the view are ordered to hand it
over: each that leaves sends its state to one that stays. That one keeps it apart until it enters a view
without the sender, and only then takes it over. So if a death or a request changes the view first, the state
is in one place still: with its worker, if that one is in the next view, otherwise with the receiver.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from manyhands.control.messages import HandOverOrder


class Handover:
    """Has the workers that leave hand over their state. Pure, except for `send`."""

    def __init__(self, send: Callable[[str, HandOverOrder], None], *, needed: bool) -> None:
        """`send`: to the worker of that name. `needed`: false, if no worker holds state that no other has."""
        self._send = send
        self._needed = needed
        self._number = 0
        """Counts the orders."""
        self._receivers: Mapping[str, str] = {}
        """Of the order that is being carried out; empty if none is."""
        self._missing: set[str] = set()
        """Workers that have not carried it out."""

    def done(self, leaving: Sequence[str], workers: Sequence[str]) -> bool:
        """Return whether these workers may leave: they have handed over their state. Orders it if it was not
        ordered yet."""
        if not (self._needed and leaving):
            return True
        if set(leaving) != self._receivers.keys():
            self._number += 1
            self._receivers = receivers(leaving, workers, first=self._number)
            self._missing = set(workers)
            for name in workers:
                self._send(name, HandOverOrder(self._number, self._receivers))
        return not self._missing

    def note(self, member: str, number: int) -> None:
        """Note that a worker has carried out the order with this number."""
        if number == self._number:
            self._missing.discard(member)

    def cancel(self) -> None:
        """Forget the order: the view has changed, or those that were to leave stay for now."""
        self._receivers, self._missing = {}, set()


def receivers(leaving: Sequence[str], workers: Sequence[str], *, first: int) -> dict[str, str]:
    """Return which worker that stays gets the state of each that leaves: they take turns, beginning with
    number `first`. Pure."""
    stay = [name for name in workers if name not in leaving]
    return {name: stay[(first + index) % len(stay)] for index, name in enumerate(leaving)}
