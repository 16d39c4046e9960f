"""Parts of steps for whoever is free: a queue, and who gets the next part. Pure.

Each worker has parts ahead for about AHEAD_S by its own measured seconds a part, and always at least
one, so that a fast worker takes more of them and a slow one fewer, and nobody waits for an order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from manyhands.coordinator.plan import StepPlan
from manyhands.coordinator.progress import PartKey
from manyhands.ranges import Range, shares, split

AHEAD_S = 0.4
"""How much work is handed out ahead: no worker ever waits for an order, and a stop takes this long."""
BRIEF_S = 0.2
"""The same where the members change soon, who wait until it is done. Reports come twice in this time."""
MAX_LEASE = 256
"""The most steps, or parts, that are handed out ahead however fast they are."""


@dataclass(frozen=True)
class QueuedPart:
    plan: StepPlan
    number: int
    ranges: tuple[Range, ...]

    @property
    def key(self) -> PartKey:
        return self.plan.step, self.number


def cut(plan: StepPlan, number: int) -> list[QueuedPart]:
    """A step in so many parts of equal size, without those that would be empty."""
    pieces = split(plan.ranges, shares(plan.samples, [1.0] * number))
    return [QueuedPart(plan, n, tuple(ranges)) for n, ranges in enumerate(pieces) if ranges]


class WorkQueue:
    """What waits to be given out, what each worker has in hand, and how fast each is."""

    def __init__(self) -> None:
        self.ahead_s = AHEAD_S
        self._waiting: deque[QueuedPart] = deque()
        self._hands: dict[str, dict[PartKey, QueuedPart]] = {}
        self._part_s: dict[str, float] = {}

    def __len__(self) -> int:
        """Parts that wait."""
        return len(self._waiting)

    @property
    def in_hand(self) -> int:
        return sum(len(hand) for hand in self._hands.values())

    def seat(self, workers: Sequence[str]) -> None:
        """These take part from now on."""
        assert not self.in_hand, "take back what is in hand first"
        self._hands = {name: {} for name in workers}
        self._part_s = {name: s for name, s in self._part_s.items() if name in self._hands}

    def extend(self, parts: Iterable[QueuedPart]) -> None:
        self._waiting.extend(parts)

    def room(self) -> int:
        """How many more parts the workers should have."""
        return sum(max(0, self._target(name) - len(hand)) for name, hand in self._hands.items())

    def deal(self) -> list[tuple[str, QueuedPart]]:
        """Give out what waits, each part to whoever will be free first, until nobody has room."""
        given = []
        while self._waiting:
            free = [name for name, hand in self._hands.items() if len(hand) < self._target(name)]
            if not free:
                break
            name = min(free, key=self._busy_s)
            part = self._waiting.popleft()
            self._hands[name][part.key] = part
            given.append((name, part))
        return given

    def done(self, worker: str, key: PartKey, seconds: float, *, again: bool = False) -> bool:
        """A worker is through with a part in its hand; `again`: it goes back, to the front.

        False if it has no such part: it is late, and the part is another's or nobody's.
        """
        part = self._hands.get(worker, {}).pop(key, None)
        if part is None:
            return False
        before = self._part_s.get(worker)
        self._part_s[worker] = seconds if before is None else 0.8 * before + 0.2 * seconds
        if again:
            self._waiting.appendleft(part)
        return True

    def take_back(self) -> list[QueuedPart]:
        """All that is in hand goes to the front again, in order; what it was."""
        parts = [part for hand in self._hands.values() for part in hand.values()]
        parts.sort(key=lambda part: part.key)
        self._waiting.extendleft(reversed(parts))
        for hand in self._hands.values():
            hand.clear()
        return parts

    def remove(self, keys: Iterable[PartKey]) -> None:
        """These need nobody any more."""
        void = set(keys)
        self._waiting = deque(part for part in self._waiting if part.key not in void)

    @property
    def waiting(self) -> Sequence[QueuedPart]:
        return tuple(self._waiting)

    def _target(self, worker: str) -> int:
        part_s = self._part_s.get(worker)
        if part_s is None or part_s >= self.ahead_s:
            return 1
        return min(MAX_LEASE, max(2, int(self.ahead_s / part_s))) if part_s > 0 else MAX_LEASE

    def _busy_s(self, worker: str) -> float:
        return len(self._hands[worker]) * self._part_s.get(worker, 0.0)
