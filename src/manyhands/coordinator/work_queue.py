"""A queue of parts of steps for free workers. Pure.

Each worker has parts ahead for about AHEAD_S, by its own measured seconds per part, and always at least
one. So a fast worker takes more of them and a slow one fewer, and no worker waits for an order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from manyhands.coordinator.plan import StepPlan
from manyhands.coordinator.progress import PartKey
from manyhands.ranges import Range, shares, split

AHEAD_S = 0.4
"""Work dispatched ahead, in seconds: no worker ever waits for an order, and a stop takes this long."""
SHORT_AHEAD_S = 0.2
"""The same before a view change, which waits until it is done. Reports come twice in this time."""
MAX_AHEAD = 256
"""The most steps or parts that are dispatched ahead, however fast they are."""


@dataclass(frozen=True)
class QueuedPart:
    plan: StepPlan
    number: int
    ranges: tuple[Range, ...]

    @property
    def key(self) -> PartKey:
        return self.plan.step, self.number


def cut(plan: StepPlan, number: int) -> list[QueuedPart]:
    """Cut a step into parts of equal size, without those that would be empty."""
    portions = split(plan.ranges, shares(plan.samples, [1.0] * number))
    return [QueuedPart(plan, n, tuple(ranges)) for n, ranges in enumerate(portions) if ranges]


class WorkQueue:
    """The parts that wait, the parts that each worker has, and how fast each worker is."""

    def __init__(self) -> None:
        self.ahead_s = AHEAD_S
        self.waiting: deque[QueuedPart] = deque()
        self._assigned: dict[str, dict[PartKey, QueuedPart]] = {}
        self._part_s: dict[str, float] = {}

    def __len__(self) -> int:
        """Return the number of parts that wait."""
        return len(self.waiting)

    @property
    def num_assigned(self) -> int:
        return sum(map(len, self._assigned.values()))

    def set_workers(self, workers: Sequence[str]) -> None:
        assert not self.num_assigned, "take back what is assigned first"
        self._assigned = {name: {} for name in workers}
        self._part_s = {name: s for name, s in self._part_s.items() if name in self._assigned}

    def extend(self, parts: Iterable[QueuedPart]) -> None:
        self.waiting.extend(parts)

    def room(self) -> int:
        """Return how many more parts the workers should have."""
        return sum(
            max(0, self._target(name) - len(parts)) for name, parts in self._assigned.items()
        )

    def deal(self) -> list[tuple[str, QueuedPart]]:
        """Assign what waits, each part to the worker that will be free first, until no worker has room."""
        assigned = []
        while self.waiting:
            free = [
                name for name, parts in self._assigned.items() if len(parts) < self._target(name)
            ]
            if not free:
                break
            name = min(free, key=self._busy_s)
            part = self.waiting.popleft()
            self._assigned[name][part.key] = part
            assigned.append((name, part))
        return assigned

    def done(self, worker: str, key: PartKey, seconds: float, *, again: bool = False) -> bool:
        """A worker is done with a part; `again`: it goes back to the front of the queue.

        False if the worker has no such part: its report is late, and the part was assigned again.
        """
        part = self._assigned.get(worker, {}).pop(key, None)
        if part is None:
            return False
        before = self._part_s.get(worker)
        self._part_s[worker] = seconds if before is None else 0.8 * before + 0.2 * seconds
        if again:
            self.waiting.appendleft(part)
        return True

    def take_back(self, is_open: Callable[[PartKey], bool]) -> list[QueuedPart]:
        """Put all assigned parts back to the front, in order, and drop parts that are not open. Returns the
        open parts that came back."""
        parts = [part for each in self._assigned.values() for part in each.values()]
        parts.sort(key=lambda part: part.key)
        self.waiting = deque(part for part in [*parts, *self.waiting] if is_open(part.key))
        for each in self._assigned.values():
            each.clear()
        return [part for part in parts if is_open(part.key)]

    def _target(self, worker: str) -> int:
        part_s = self._part_s.get(worker)
        if part_s is None or part_s >= self.ahead_s:
            return 1
        return min(MAX_AHEAD, max(2, int(self.ahead_s / part_s))) if part_s > 0 else MAX_AHEAD

    def _busy_s(self, worker: str) -> float:
        return len(self._assigned[worker]) * self._part_s.get(worker, 0.0)
