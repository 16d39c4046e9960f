"""The four policies of the parameter server: sync, backup, async, ssp.

They share a vector clock (`manyhands.ps.policy`, which also tells how a server drives them) and
differ in what they wait for:

    Sync     update t is everybody's push t, added in rank order: two runs are bit-equal
    Backup   update t is the first n-k pushes t of n workers; late ones are dropped or decayed and
             always accounted for (Chen et al. 2016, "Revisiting Distributed Synchronous SGD")
    Async    each push is an update of its own, on arrival (Dean et al. 2012, "Large Scale
             Distributed Deep Networks")
    Ssp      as Async, but nobody begins a step more than s ahead of the slowest (Ho et al. 2013,
             "More Effective Distributed ML via a Stale Synchronous Parallel Parameter Server")

Sync and Backup count *rounds*: round t takes the pushes t. A round makes one update, except one for
which nobody is left that could be waited for (they died, and who joined since begins later): that
round is skipped. So versions have no gaps, and the number of a round may run ahead of the version.

No message is sent for any of this: who may start follows from the pushes that the server gets anyway.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal

from manyhands.errors import SpecError, closest
from manyhands.ps.policy import Contribution, Policy, PolicyUpdate, Push, Verdict

__all__ = [
    "POLICIES",
    "AsyncPolicy",
    "BackupPolicy",
    "Contribution",
    "Policy",
    "PolicyUpdate",
    "Push",
    "SspPolicy",
    "SyncPolicy",
    "Verdict",
    "restore",
]


class AsyncPolicy(Policy):
    """Each push is an update of its own, in order of arrival; nobody waits."""

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
    """As Async, but nobody begins a step more than `staleness` ahead of the slowest; 0 is lock-step.

    A worker joins beside the slowest: it never holds the others up more than they were held before.
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

    def _options(self) -> dict[str, Any]:
        return {"staleness": self.staleness}


class SyncPolicy(Policy):
    """Round t takes everybody's push t; step t+1 begins when it is applied.

    A worker joins at the next round that nobody has begun: the batch of a begun one is shared out.
    """

    name = "sync"
    spares = 0
    """How many of those live a round does not wait for."""

    def __init__(self, workers: Iterable[str] = (), *, clock: int = 0) -> None:
        super().__init__(workers, clock=clock)
        self.round = clock + 1

    def take(self) -> PolicyUpdate | None:
        given = self._given()
        enough = max(1, len(given) + len(self._missing()) - self.spares)
        return self._close(given[:enough]) if len(given) >= enough else None

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

    def leave(self, worker: str) -> tuple[Push, ...]:
        lost = super().leave(worker)
        self._skip_empty()
        return lost

    def state(self) -> dict[str, Any]:
        return {**super().state(), "round": self.round}

    def _load(self, state: Mapping[str, Any]) -> None:
        super()._load(state)
        self.round = state["round"]

    def _given(self) -> list[Push]:
        return [push for push in self._waiting if push[1] == self.round]

    def _missing(self) -> list[str]:
        """Who could still give to this round; a worker that joins later has its clock set past it."""
        return [worker for worker in self._live if self._last[worker] < self.round]

    def _open_to_joiners(self) -> int:
        begun = self._given() or any(self.round in began for began in self._began.values())
        return self.round + 1 if begun else self.round

    def _close(self, given: list[Push]) -> PolicyUpdate:
        update = self._apply(given)
        self.round += 1
        self._skip_empty()
        return update

    def _skip_empty(self) -> None:
        # A round that has nothing and may do without all who could give would never end, while those
        # who begin later wait for its end.
        while not self._given() and len(self._missing()) <= self.spares and self._bystanders():
            self.round += 1

    def _bystanders(self) -> bool:
        return any(self._last[worker] >= self.round for worker in self._live)


class BackupPolicy(SyncPolicy):
    """Round t closes with the first n-`spares` pushes t of the n live workers, and with one at least.

    The pushes t that come later are dropped (`late="drop"`: their samples go back to the leases), or
    go into the next update times `decay` to the power of their staleness (`late="decay"`). A worker
    that was late goes on at `resume_at`, in the round of the others; one that joins gives to the open
    round at once. A decayed push may meet a timely one of the same worker in one update.
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
        """All that waits as one update, whoever is missing: at the end of the data nobody else comes.

        Without it the last samples would wait for pushes that have no samples to be made of.
        """
        due = any(seq <= self.round for _, seq in self._waiting)
        return self._close(self._given()) if due else None

    def _too_late(self, seq: int) -> bool:
        return self.late == "drop" and seq < self.round

    def _open_to_joiners(self) -> int:
        return self.round

    def _scale(self, seq: int, staleness: int) -> float:
        return self.decay**staleness if seq < self.round else 1.0

    def _close(self, given: list[Push]) -> PolicyUpdate:
        left_over = [push for push in self._given() if push not in given]
        late = [push for push in self._waiting if push[1] < self.round]
        update = super()._close([*late, *given])
        if self.late == "drop":
            self._waiting = [push for push in self._waiting if push not in left_over]
            for push in left_over:
                self._drop(push)
        return update

    def _options(self) -> dict[str, Any]:
        return {"spares": self.spares, "late": self.late, "decay": self.decay}


POLICIES: dict[str, type[Policy]] = {
    kind.name: kind for kind in (SyncPolicy, AsyncPolicy, SspPolicy, BackupPolicy)
}
"""By the name that a spec has after `ps:`."""


def restore(state: Mapping[str, Any]) -> Policy:
    """The policy that `state` was taken of, whichever it is."""
    return POLICIES[state["policy"]].restore(state)


def _check_count(spec: str, option: str, value: object, *, example: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise SpecError(
            f"{spec}({option}={value}): {option} is a whole number, 0 or more. "
            f"Write {spec}({option}={example})."
        )
