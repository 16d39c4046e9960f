"""The four policies of the parameter server: sync, backup, async, ssp. Pure.

A policy decides when a push is applied and when a pull may be answered. A *push* is (worker, seq): a
worker's gradient of its step number seq. `version` counts the updates applied. The policies share a vector
clock and differ in what they wait for:

    Sync     update t is everybody's push t, added in rank order: two runs are bit-equal
    Backup   update t is the first n-k pushes t of n workers; late ones are dropped or decayed and
             always accounted for (Chen et al. 2016, "Revisiting Distributed Synchronous SGD")
    Async    each push is an update of its own, on arrival (Dean et al. 2012, "Large Scale
             Distributed Deep Networks")
    Ssp      like Async, but no worker begins a step more than s ahead of the slowest (Ho et al. 2013,
             "More Effective Distributed ML via a Stale Synchronous Parallel Parameter Server")

How a server drives one (see decider.py):

    if policy.may_start(worker, seq): answer the pull; policy.started(worker, seq)
    verdict = policy.push(contribution)                  after leave() and join() likewise:
    while update := policy.take(): apply it; answer the pulls that may start now
    for contribution in policy.dropped(): return its samples to the leases

A push counts exactly once. A worker's steps are numbered upwards and a clock holds the last one that
it pushed, so a number not above the clock was resolved before: a DUPLICATE. The clock outlives the worker,
so a worker that rejoins never repeats a number, and messages of its first life do no harm.

Sync and Backup count *rounds*: round t takes the pushes t. A round makes one update, unless all workers
that could contribute have died and those that joined since begin later: then the round is skipped. So
versions have no gaps, and the number of a round may run ahead of the version.

No messages, threads or clocks: who may start follows from the pushes that the server receives anyway, and
a simulator can use the same classes. Each call costs O(workers); memory is one small record per worker.
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from manyhands.errors import SpecError, closest
from manyhands.ps.ledger import Contribution


class Verdict(enum.Enum):
    ACCEPTED = "accepted"
    """It waits to be applied."""
    DUPLICATE = "duplicate"
    """Resolved before (applied, waiting, dropped, or skipped): discard it."""
    LATE = "late"
    """Its update was made without it: dropped, and listed in `dropped()`."""
    UNKNOWN = "unknown"
    """The worker is not in the view."""


@dataclass(frozen=True, slots=True)
class PolicyUpdate:
    version: int
    """The version that it makes."""
    contributions: tuple[Contribution, ...]
    """In rank order; a worker's own in the order of its steps."""


class Policy(ABC):
    """Shared by all policies: the live workers, the vector clock, waiting and dropped pushes."""

    name: ClassVar[str]

    def __init__(self, workers: Iterable[str] = (), *, clock: int = 0) -> None:
        """`workers` are live, in rank order; all have finished step `clock`."""
        self.version = clock
        self._clock = clock  # the slowest worker's, kept for when nobody is live
        self._live = list(workers)
        self._last = dict.fromkeys(self._live, clock)  # of the dead too: numbers never repeat
        # The version each worker's unresolved steps began with, and a lower bound where it is unknown:
        # a server that takes over has not seen the pulls.
        self._began: dict[str, dict[int, int]] = {worker: {} for worker in self._live}
        self._oldest = dict.fromkeys(self._live, clock)
        self._waiting: list[Contribution] = []  # in order of arrival
        self._dropped: list[Contribution] = []
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
        """Like `take`, at the end of the data: no further push will come."""
        return self.take()

    def started(self, worker: str, seq: int, *, version: int | None = None) -> None:
        """Note that the worker got the weights for step `seq`: the current ones, or those of `version`."""
        if worker in self._began and seq > self._last[worker]:
            self._began[worker][seq] = self.version if version is None else version

    def push(self, contribution: Contribution) -> Verdict:
        worker, seq = contribution.push
        if worker not in self._began:
            return Verdict.UNKNOWN
        if seq <= self._last[worker]:
            return Verdict.DUPLICATE
        due = self.resume_at(worker)
        assert seq <= due, f"{worker} pushed step {seq} where step {due} is due"
        self._last[worker] = seq
        if self._too_late(seq):
            self._drop(contribution)
            return Verdict.LATE
        self._waiting.append(contribution)
        return Verdict.ACCEPTED

    def resume_at(self, worker: str) -> int:
        """The worker's next step; for a worker that is not live, its first step if it joined now."""
        last = self._last.get(worker, self._clock)
        return 1 + (last if worker in self._began else max(last, self._slowest()))

    def join(self, worker: str, *, rank: int | None = None, at: int | None = None) -> int:
        """Add a worker, as number `rank` of the live ones or last; returns its first step.

        `at` is a later first step, where several policies must agree on one: the largest of their
        `resume_at`.
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

    def leave(self, worker: str) -> tuple[Contribution, ...]:
        """Remove a worker that died; drops and returns its unapplied pushes. Twice is harmless."""
        if worker not in self._began:
            return ()
        self._clock = self._slowest()
        self._live.remove(worker)
        del self._began[worker], self._oldest[worker]
        lost = tuple(each for each in self._waiting if each.worker == worker)
        self._waiting = [each for each in self._waiting if each.worker != worker]
        return lost

    def dropped(self) -> tuple[Contribution, ...]:
        """Drain the pushes that were left out; each is returned once."""
        drained, self._dropped = tuple(self._dropped), []
        return drained

    def _too_late(self, seq: int) -> bool:
        return False

    def _scale(self, seq: int, staleness: int) -> float:
        return 1.0

    def _slowest(self) -> int:
        return min((self._last[worker] for worker in self._live), default=self._clock)

    def _apply(self, chosen: Iterable[Contribution]) -> PolicyUpdate:
        """The update of these; each gets its staleness, and its scale times the policy's."""
        rank = {worker: i for i, worker in enumerate(self._live)}
        ordered = sorted(chosen, key=lambda each: (rank[each.worker], each.seq))
        contributions = []
        for each in ordered:
            began = self._began[each.worker].get(each.seq, self._oldest[each.worker])
            staleness = max(0, self.version - began)
            scale = each.scale * self._scale(each.seq, staleness)
            contributions.append(replace(each, staleness=staleness, scale=scale))
        self.version += 1
        self._waiting = [each for each in self._waiting if each not in ordered]
        for each in ordered:
            self._resolve(each)
        return PolicyUpdate(self.version, tuple(contributions))

    def _drop(self, contribution: Contribution) -> None:
        self._dropped.append(contribution)
        self._resolve(contribution)

    def _resolve(self, contribution: Contribution) -> None:
        worker, seq = contribution.push
        self._oldest[worker] = self.version
        self._began[worker] = {s: v for s, v in self._began[worker].items() if s > seq}


class AsyncPolicy(Policy):
    """Each push is an update of its own, in order of arrival; no worker waits."""

    name = "async"

    def take(self) -> PolicyUpdate | None:
        return self._apply(self._waiting[:1]) if self._waiting else None

    def may_start(self, worker: str, seq: int) -> bool:
        return worker in self._began

    def furthest(self, worker: str) -> int | None:
        return None

    def waiting_for(self, worker: str, seq: int) -> tuple[str, ...]:
        return ()


class SspPolicy(AsyncPolicy):
    """Like Async, but no worker begins a step more than `staleness` ahead of the slowest; 0 is lockstep.

    A worker joins beside the slowest, so it never delays the others more than they were delayed before.
    """

    name = "ssp"

    def __init__(self, workers: Iterable[str] = (), *, clock: int = 0, staleness: int = 4) -> None:
        _check_count("ps:ssp", "staleness", staleness, example=4)
        super().__init__(workers, clock=clock)
        self.staleness = staleness

    def may_start(self, worker: str, seq: int) -> bool:
        return worker in self._began and seq - 1 - self._slowest() <= self.staleness

    def furthest(self, worker: str) -> int | None:
        return self._slowest() + 1 + self.staleness

    def waiting_for(self, worker: str, seq: int) -> tuple[str, ...]:
        if worker not in self._began:
            return ()
        return tuple(w for w in self._live if seq - 1 - self._last[w] > self.staleness)


class SyncPolicy(Policy):
    """Round t takes everybody's push t; step t+1 begins when it is applied.

    A worker joins at the next round that no worker has begun: the batch of a begun round is dealt out.
    """

    name = "sync"
    spares = 0
    """How many live workers a round does not wait for."""

    def __init__(self, workers: Iterable[str] = (), *, clock: int = 0) -> None:
        super().__init__(workers, clock=clock)
        self.round = clock + 1

    def take(self) -> PolicyUpdate | None:
        here = self._of_round()
        enough = max(1, len(here) + len(self._missing()) - self.spares)
        return self._close(here[:enough]) if len(here) >= enough else None

    def may_start(self, worker: str, seq: int) -> bool:
        return worker in self._began and seq <= self.round

    def furthest(self, worker: str) -> int | None:
        return self.round

    def waiting_for(self, worker: str, seq: int) -> tuple[str, ...]:
        if worker not in self._began or self.may_start(worker, seq):
            return ()
        return tuple(self._missing())

    def resume_at(self, worker: str) -> int:
        earliest = self.round if worker in self._began else self._open_to_joiners()
        return max(self._last.get(worker, self._clock) + 1, earliest)

    def join(self, worker: str, *, rank: int | None = None, at: int | None = None) -> int:
        first = super().join(worker, rank=rank, at=at)
        self._skip_empty()
        return first

    def leave(self, worker: str) -> tuple[Contribution, ...]:
        lost = super().leave(worker)
        self._skip_empty()
        return lost

    def _of_round(self) -> list[Contribution]:
        return [each for each in self._waiting if each.seq == self.round]

    def _missing(self) -> list[str]:
        """Workers that can still push to this round; the clock of a later joiner is set past it."""
        return [worker for worker in self._live if self._last[worker] < self.round]

    def _open_to_joiners(self) -> int:
        begun = self._of_round() or any(self.round in began for began in self._began.values())
        return self.round + 1 if begun else self.round

    def _close(self, chosen: list[Contribution]) -> PolicyUpdate:
        update = self._apply(chosen)
        self.round += 1
        self._skip_empty()
        return update

    def _skip_empty(self) -> None:
        # A round without pushes that may do without all workers that could push would never end, while
        # workers that begin later wait for its end.
        while not self._of_round() and len(self._missing()) <= self.spares and self._bystanders():
            self.round += 1

    def _bystanders(self) -> bool:
        return any(self._last[worker] >= self.round for worker in self._live)


class BackupPolicy(SyncPolicy):
    """Round t closes with the first n-`spares` pushes t of the n live workers, and with one at least.

    Later pushes t are dropped (`late="drop"`: their samples go back to the leases), or go into the next
    update times `decay` to the power of their staleness (`late="decay"`). A late worker resumes at
    `resume_at`, in the round of the others; a joining worker pushes to the open round at once. A decayed
    push and a timely one of the same worker may meet in one update.
    """

    name = "backup"

    def __init__(
        self,
        workers: Iterable[str] = (),
        *,
        clock: int = 0,
        spares: int = 1,
        late: Literal["drop", "decay"] = "drop",
        decay: float = 0.5,
    ) -> None:
        _check_count("ps:backup", "spares", spares, example=1)
        if late not in ("drop", "decay"):
            raise SpecError(
                f"ps:backup(late={late}): late is drop or decay{closest(str(late), ('drop', 'decay'))} "
                "Write ps:backup(late=drop)."
            )
        if not 0 < decay <= 1:
            raise SpecError(
                f"ps:backup(decay={decay}): decay is a number above 0 and at most 1. "
                "Write ps:backup(late=decay, decay=0.5)."
            )
        super().__init__(workers, clock=clock)
        self.spares = spares
        self.late = late
        self.decay = decay

    def flush(self) -> PolicyUpdate | None:
        """Make one update of all waiting pushes, whichever workers are missing.

        Otherwise the last samples would wait for pushes for which no samples are left.
        """
        due = any(each.seq <= self.round for each in self._waiting)
        return self._close(self._of_round()) if due else None

    def _too_late(self, seq: int) -> bool:
        return self.late == "drop" and seq < self.round

    def _open_to_joiners(self) -> int:
        return self.round

    def _scale(self, seq: int, staleness: int) -> float:
        return self.decay**staleness if seq < self.round else 1.0

    def _close(self, chosen: list[Contribution]) -> PolicyUpdate:
        left_over = [each for each in self._of_round() if each not in chosen]
        late = [each for each in self._waiting if each.seq < self.round]
        update = super()._close([*late, *chosen])
        if self.late == "drop":
            self._waiting = [each for each in self._waiting if each not in left_over]
            for each in left_over:
                self._drop(each)
        return update


POLICIES: dict[str, type[Policy]] = {
    kind.name: kind for kind in (SyncPolicy, AsyncPolicy, SspPolicy, BackupPolicy)
}
"""By the name after `ps:` in a spec."""


def _check_count(spec: str, option: str, value: object, *, example: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise SpecError(
            f"{spec}({option}={value}): {option} is a whole number, 0 or more. "
            f"Write {spec}({option}={example})."
        )
