"""What all policies of the parameter server share: who is live, the vector clock, exactly-once. Pure.

A *push* is (worker, seq): a worker's gradient of its step number seq. A policy decides WHEN a push is
applied and WHEN a pull may be answered; `manyhands.ps.policies` has the four. `version` counts the
updates applied. The life of a step, as a server drives it:

    if policy.may_start(worker, seq): answer the pull; policy.started(worker, seq)
    verdict = policy.push(worker, seq)                   after leave() and join() likewise:
    while update := policy.take(): apply it; answer the pulls that may start now
    for push in policy.dropped(): its samples go back to the leases

A push counts exactly once. A worker's steps are numbered upwards and a clock holds the last one that
it pushed, so whatever is not above it was resolved before: a DUPLICATE. The clock outlives the worker,
so one that comes back never repeats a number, and what its first life left on the wire does no harm.

No threads, no time, no bytes: a server and a simulator use the same classes. Each call costs
O(workers), and memory is one small record a worker.
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

Push = tuple[str, int]
"""(worker, seq)."""


class Verdict(enum.Enum):
    ACCEPTED = "accepted"
    """It waits to be applied."""
    DUPLICATE = "duplicate"
    """Resolved before (applied, waiting, dropped, or skipped): throw it away."""
    LATE = "late"
    """Its update was made without it: dropped, and listed in `dropped()`."""
    UNKNOWN = "unknown"
    """The worker is not in the view."""


@dataclass(frozen=True, slots=True)
class Contribution:
    worker: str
    seq: int
    staleness: int = 0
    """Updates applied since the worker got the weights of this step."""
    scale: float = 1.0
    """What the policy wants the gradient multiplied by."""


@dataclass(frozen=True, slots=True)
class PolicyUpdate:
    version: int
    """The version that it makes."""
    contributions: tuple[Contribution, ...]
    """In rank order; a worker's own in the order of its steps."""


class Policy(ABC):
    """What all policies share: who is live, the vector clock, what waits and what was dropped."""

    name: ClassVar[str]

    def __init__(self, workers: Iterable[str] = (), *, clock: int = 0) -> None:
        """`workers` are live, in rank order; all have finished step `clock`."""
        self.version = clock
        self._clock = clock  # the slowest worker's, kept for when nobody is live
        self._live = list(workers)
        self._last = dict.fromkeys(self._live, clock)  # of the dead too: numbers never repeat
        # The version each worker's unresolved steps began with, and the oldest that it can be where
        # that is not known: a replica that takes over has not seen the pulls.
        self._began: dict[str, dict[int, int]] = {worker: {} for worker in self._live}
        self._oldest = dict.fromkeys(self._live, clock)
        self._waiting: list[Push] = []  # in order of arrival
        self._dropped: list[Push] = []
        assert len(self._began) == len(self._live), f"a name twice in {self._live}"

    @property
    def workers(self) -> tuple[str, ...]:
        """The live ones, in rank order."""
        return tuple(self._live)

    @abstractmethod
    def take(self) -> PolicyUpdate | None:
        """The next update to apply now, or None. Taking it counts it as applied."""

    @abstractmethod
    def may_start(self, worker: str, seq: int) -> bool:
        """May the worker's pull of the weights for step `seq` be answered? Once yes, always yes."""

    @abstractmethod
    def furthest(self, worker: str) -> int | None:
        """The last step for which the worker's pull may be answered now; None: any."""

    @abstractmethod
    def waiting_for(self, worker: str, seq: int) -> tuple[str, ...]:
        """Whose pushes are missing until the worker may start step `seq`, in rank order."""

    def flush(self) -> PolicyUpdate | None:
        """As `take`, for the end of the data: nobody has a push to come that could be waited for."""
        return self.take()

    def started(self, worker: str, seq: int, *, version: int | None = None) -> None:
        """The worker got the weights for step `seq`: those of now, or of the `version` it names."""
        if worker in self._began and seq > self._last[worker]:
            self._began[worker][seq] = self.version if version is None else version

    def push(self, worker: str, seq: int) -> Verdict:
        if worker not in self._began:
            return Verdict.UNKNOWN
        if seq <= self._last[worker]:
            return Verdict.DUPLICATE
        due = self.resume_at(worker)
        assert seq <= due, f"{worker} pushed step {seq} where step {due} is due"
        self._last[worker] = seq
        if self._too_late(seq):
            self._drop((worker, seq))
            return Verdict.LATE
        self._waiting.append((worker, seq))
        return Verdict.ACCEPTED

    def resume_at(self, worker: str) -> int:
        """The worker's next step; of one that is not live: its first, if it joined now."""
        last = self._last.get(worker, self._clock)
        return 1 + (last if worker in self._began else max(last, self._slowest()))

    def join(self, worker: str, *, rank: int | None = None, at: int | None = None) -> int:
        """Take the worker in, as number `rank` of the live ones or last; returns its first step.

        `at` is a later first step, where several policies have to agree on one: the largest of
        what their `resume_at` say.
        """
        assert worker not in self._began, f"{worker} is in already"
        earliest = self.resume_at(worker)
        first = earliest if at is None else at
        assert first >= earliest, f"{worker} can't join at step {first}, only from {earliest} on"
        self._clock = self._slowest()
        self._live.insert(len(self._live) if rank is None else rank, worker)
        self._last[worker] = first - 1
        self._began[worker] = {}
        self._oldest[worker] = self.version
        return first

    def leave(self, worker: str) -> tuple[Push, ...]:
        """The worker died: drops and returns what it gave and was not applied. Twice is harmless."""
        if worker not in self._began:
            return ()
        self._clock = self._slowest()
        self._live.remove(worker)
        del self._began[worker], self._oldest[worker]
        lost = tuple(push for push in self._waiting if push[0] == worker)
        self._waiting = [push for push in self._waiting if push[0] != worker]
        return lost

    def dropped(self) -> tuple[Push, ...]:
        """Drains what was left out; each push is told once."""
        drained, self._dropped = tuple(self._dropped), []
        return drained

    def state(self) -> dict[str, Any]:
        """All of it, fit for JSON."""
        return {
            "policy": self.name,
            "options": self._options(),
            "version": self.version,
            "clock": self._clock,
            "workers": list(self._live),
            "last": dict(self._last),
            "began": {
                worker: [list(b) for b in began.items()] for worker, began in self._began.items()
            },
            "oldest": dict(self._oldest),
            "waiting": [list(push) for push in self._waiting],
            "dropped": [list(push) for push in self._dropped],
        }

    @classmethod
    def restore(cls, state: Mapping[str, Any]) -> Self:
        """The policy that `state` was taken of, which must have been of this class."""
        assert state["policy"] == cls.name, (
            f"the state of {state['policy']!r} is none of {cls.name!r}"
        )
        policy = cls(state["workers"], clock=state["clock"], **state["options"])
        policy._load(state)
        return policy

    def _load(self, state: Mapping[str, Any]) -> None:
        self.version = state["version"]
        self._last = dict(state["last"])
        self._began = {w: dict(began) for w, began in state["began"].items()}
        self._oldest = dict(state["oldest"])
        self._waiting = [(worker, seq) for worker, seq in state["waiting"]]
        self._dropped = [(worker, seq) for worker, seq in state["dropped"]]

    def _options(self) -> dict[str, Any]:
        return {}

    def _too_late(self, seq: int) -> bool:
        return False

    def _scale(self, seq: int, staleness: int) -> float:
        return 1.0

    def _slowest(self) -> int:
        return min((self._last[worker] for worker in self._live), default=self._clock)

    def _apply(self, pushes: Iterable[Push]) -> PolicyUpdate:
        chosen = set(pushes)
        rank = {worker: i for i, worker in enumerate(self._live)}
        contributions = []
        for worker, seq in sorted(chosen, key=lambda push: (rank[push[0]], push[1])):
            began = self._began[worker].get(seq, self._oldest[worker])
            staleness = max(0, self.version - began)
            scale = self._scale(seq, staleness)
            contributions.append(Contribution(worker, seq, staleness=staleness, scale=scale))
        self.version += 1
        self._waiting = [push for push in self._waiting if push not in chosen]
        for push in chosen:
            self._resolve(push)
        return PolicyUpdate(self.version, tuple(contributions))

    def _drop(self, push: Push) -> None:
        self._dropped.append(push)
        self._resolve(push)

    def _resolve(self, push: Push) -> None:
        worker, seq = push
        self._oldest[worker] = self.version
        self._began[worker] = {s: v for s, v in self._began[worker].items() if s > seq}
