"""Decides which pushes make up the next update: decisions, the four policies, and the ledger. Pure.

A *push* is a worker's gradient of its step number `seq`, described by a Contribution. A *decision* names the
contributions of the next update. Every server applies all decisions in the same order, so a version means the
same everywhere, and a survivor can finish what a dead server has begun. The ledger records the decisions that
were applied.

A policy decides when a push is applied and which step a worker may begin. The policies share a vector clock
and differ in what they wait for:

    Sync     update t is everybody's push t, added in rank order: two runs are bit-equal
    Backup   update t is the first n-k pushes t of n workers; late ones are dropped or decayed and
             always accounted for (Chen et al. 2016, "Revisiting Distributed Synchronous SGD")
    Async    each push is an update of its own, on arrival (Dean et al. 2012, "Large Scale
             Distributed Deep Networks")
    Ssp      like Async, but no worker begins a step more than s ahead of the slowest (Ho et al. 2013,
             "More Effective Distributed ML via a Stale Synchronous Parallel Parameter Server")

All servers must put the same pushes into the same updates, even if slow workers are left behind or a worker
dies in the middle of a push. So a push counts once every server has it (between hosts; inside a host all
servers can read it), and one server, the leader, runs the Decider for all. If an update is everybody's
gradients, every server runs a Decider, and all reach the same decisions.

A push counts exactly once. A worker's steps are numbered upwards and a clock holds the last one that
it pushed, so a number not above the clock was resolved before: a DUPLICATE. The clock outlives the worker,
so a worker that rejoins never repeats a number, and messages of its first life do no harm.

Sync and Backup count *rounds*: round t takes the pushes t. A round makes one update, unless all workers
that could contribute have died and those that joined since begin later: then the round is skipped. So
versions have no gaps, and the number of a round may run ahead of the version.

No messages, threads or clocks: which worker may start follows from the pushes that the server receives
anyway, and a simulator can use the same classes. Each call costs O(workers); memory is one small record per
worker.
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Annotated, ClassVar, Literal

from manyhands.errors import SpecError, closest
from manyhands.ps.staleness import Rule, lr_scale
from manyhands.transport.fields import Finite, Weight, at_least, at_most

MAX_NUMBER = (1 << 53) - 1
MAX_TICKS = 1 << 16
"""Upper bound on the schedule steps of a batch."""
MAX_UNDER_WAY = 64
"""Limit of pushes of one worker that do not count yet; a correct worker has at most two."""
KEEP_PUSHES = 64
"""The ledger keeps decisions for this many pushes, and four more for each worker: a worker has at most two
under way, so servers are at most twice the workers apart, and replicas at most two updates behind those."""
KEEP_PARTS = 4096
"""Parts of steps that the ledger keeps. Workers report several times a second, after far fewer parts."""


def _check_share(value: tuple[int, int]) -> tuple[int, int]:
    if not (0 <= value[0] <= value[1] <= MAX_NUMBER and value[1] > 0):
        raise ValueError("is not a part of a batch")
    return value


def _check_progress(value: tuple[int, int]) -> tuple[int, int]:
    if value[0] < 0 or value[1] <= 0:
        raise ValueError("is not a number of steps")
    return value


def _check_positive(value: float) -> float:
    if not 0 < value <= MAX_NUMBER:
        raise ValueError("is not positive")
    return value


Index = Annotated[int, at_least(0), at_most(MAX_NUMBER)]
Number = Annotated[int, at_least(1), at_most(MAX_NUMBER)]
"""As Index, counted from 1."""


@dataclass(frozen=True, slots=True)
class Contribution:
    """A worker's gradient in an update: one push."""

    worker: str
    seq: Number
    slot: Index = 0
    """Index of the worker's gradient buffer that holds it."""
    step: Index = 0
    part: Index = 0
    samples: Weight = 1.0
    """Its weight: the number of samples, or the job's own weights."""
    total: Annotated[float, _check_positive] = 1.0
    """The gradient was already divided by this."""
    share: Annotated[tuple[int, int], _check_share] = (1, 1)
    """The part of a batch that it is, as a fraction."""
    staleness: Index = 0
    """Updates applied since the worker got the weights of this step."""
    scale: Weight = 1.0
    """Factor set by the policy, and by clipping on the worker."""
    lr_factor: Annotated[float, _check_positive] = 1.0
    """Factor on the learning rate of its step."""
    ticks: Annotated[Index, at_most(MAX_TICKS)] = 1
    """Schedule steps that its whole batch counts as."""
    loss: Finite = 0.0
    """Sum of its losses, each times its weight: the worker may die before it reports them."""

    @property
    def push(self) -> tuple[str, int]:
        """(worker, seq): the identity of the push."""
        return self.worker, self.seq


@dataclass(frozen=True, slots=True)
class Decision:
    version: Number
    """The version of the weights after it."""
    contributions: tuple[Contribution, ...]
    """In rank order, a worker's own in the order of its steps: the order in which they are added."""
    lr_scale: Finite = 1.0
    progress: Annotated[tuple[int, int], _check_progress] = (0, 1)
    """Schedule steps after it, since training began, as a fraction: mostly one per batch."""
    factor: Finite = 1.0
    """Factor from clipping; known once the sum is made."""

    @classmethod
    def of(
        cls, version: int, contributions: tuple[Contribution, ...], *, before: Fraction
    ) -> Decision:
        """Make a decision from its contributions. `before`: the progress of the decision before it."""
        progress = progress_after(before, contributions)
        return cls(
            version,
            contributions,
            lr_scale=lr_factor(contributions),
            progress=(progress.numerator, progress.denominator),
        )

    @property
    def ticks(self) -> int:
        """Whole schedule steps after it."""
        return self.progress[0] // self.progress[1]

    @property
    def part(self) -> float:
        """The part of a batch that its contributions are."""
        return sum(part / whole for part, whole in (each.share for each in self.contributions))

    @property
    def step(self) -> int:
        """The last step of its contributions: the clock of tables, which continues when a run is resumed."""
        return max(each.step for each in self.contributions)

    def coefficients(self) -> list[float]:
        """Return the factor for each gradient, so that every sample counts as in the mean over its own
        batch, also if parts of several batches meet in an update, or parts of one are missing.

        If only a part of a batch is here, the weight of the whole batch, by a job's own weights, is unknown:
        each sample is taken to weigh as much as in that part.
        """
        counts: dict[int, int] = defaultdict(int)
        weights: dict[int, float] = defaultdict(float)
        for g in self.contributions:
            counts[g.step] += g.share[0]
            weights[g.step] += g.samples
        return [
            g.scale * (g.total * counts[g.step]) / (g.share[1] * weights[g.step])
            if weights[g.step]
            else 0.0
            for g in self.contributions
        ]


def progress_after(before: Fraction, contributions: Iterable[Contribution]) -> Fraction:
    return before + sum((Fraction(*g.share) * g.ticks for g in contributions), Fraction())


def lr_factor(contributions: Sequence[Contribution]) -> float:
    """Return the factor on the learning rate of an update: that of its step, or the mean if it has
    several."""
    first = contributions[0].lr_factor
    if all(g.lr_factor == first for g in contributions):
        return first
    whole = sum(g.samples for g in contributions)
    return sum(g.lr_factor * g.samples for g in contributions) / whole if whole else first


@dataclass
class Ledger:
    """The decisions that were applied. Sent as it is when a view begins.

    It keeps the last decisions (a server may be a few behind another when the membership changes), the parts
    of steps that were applied lately (their worker may be dead), how many pushes of each worker were applied
    since the run began (for audits), and how much of the data they were: the learning rate's schedule goes by
    batches, not by updates.
    """

    version: Index = 0
    progress: Fraction = field(default_factory=Fraction)
    counts: dict[str, Index] = field(default_factory=dict)
    """Pushes applied, by worker, since the run began."""
    decisions: list[Decision] = field(default_factory=list)
    """The last ones, newest last."""
    parts: list[tuple[int, int, float, float]] = field(default_factory=list)
    """Step, part, weight and loss of the last contributions, newest last."""

    def __post_init__(self) -> None:
        self.counts = Counter(self.counts)
        first = self.version - len(self.decisions) + 1
        if any(each.version != first + i for i, each in enumerate(self.decisions)):
            raise ValueError(f"its decisions do not lead to version {self.version}")

    @property
    def ticks(self) -> int:
        return int(self.progress)

    def note(self, decision: Decision) -> None:
        """Record that a decision is applied."""
        assert decision.version == self.version + 1, f"{decision.version} after {self.version}"
        self.version = decision.version
        self.progress = Fraction(*decision.progress)
        self.decisions.append(decision)
        for each in decision.contributions:
            self.counts[each.worker] += 1
            self.parts.append((each.step, each.part, each.samples, each.loss))
        del self.parts[:-KEEP_PARTS]
        kept = sum(len(each.contributions) for each in self.decisions)
        most = KEEP_PUSHES + 4 * len(self.counts)
        while (kept := kept - len(self.decisions[0].contributions)) >= most:
            del self.decisions[0]

    def after(self, version: int) -> list[Decision]:
        """Return the decisions applied after `version`, oldest first."""
        missed = [d for d in self.decisions if d.version > version]
        assert len(missed) == self.version - version, f"{version} is too long ago to catch up from"
        return missed

    def between(self, version: int, last: int) -> list[Decision]:
        """Return the decisions applied after `version`, up to `last`."""
        return [d for d in self.after(version) if d.version <= last] if last > version else []

    def copy(self) -> Ledger:
        return replace(self, decisions=list(self.decisions), parts=list(self.parts))


# Policies -----------------------------------------------------------------------------------------


class Verdict(enum.Enum):
    ACCEPTED = "accepted"
    """Waiting to be applied."""
    DUPLICATE = "duplicate"
    """Resolved before (applied, waiting, dropped, or skipped): discard it."""
    LATE = "late"
    """Dropped, since its update was made without it; listed in `dropped()`."""
    UNKNOWN = "unknown"
    """The worker is not in the view."""


class Policy(ABC):
    """Shared by all policies: the live workers, the vector clock, waiting and dropped pushes.

    How a server drives one:

        if policy.may_start(worker, seq): answer the pull; policy.started(worker, seq)
        verdict = policy.push(contribution)                  after leave() and join() likewise:
        while update := policy.take(): apply it; answer the pulls that may start now
        for contribution in policy.dropped(): return its samples to the leases
    """

    name: ClassVar[str]

    def __init__(self, workers: Iterable[str] = (), *, clock: int = 0) -> None:
        """`workers` are live, in rank order; all have finished step `clock`."""
        self.version = clock
        self._clock = clock  # the slowest worker's, needed when nobody is live
        self._live = list(workers)
        self._last = dict.fromkeys(self._live, clock)  # of the dead too: numbers never repeat
        # The version each worker's unresolved steps began with, and a lower bound if it is unknown: a server
        # that takes over has not seen the pulls.
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
    def take(self) -> Decision | None:
        """Return the next update to apply now, or None. Taking it counts it as applied. The Decider adds its
        progress and learning rate."""

    @abstractmethod
    def furthest(self, worker: str) -> int | None:
        """Return the last step for which the worker's pull may be answered now; None: any."""

    @abstractmethod
    def waiting_for(self, worker: str, seq: int) -> tuple[str, ...]:
        """Return the workers whose pushes are missing before the worker may start step `seq`, in rank
        order."""

    def may_start(self, worker: str, seq: int) -> bool:
        """Return whether the worker's pull of the weights for step `seq` may be answered. Once true, always
        true."""
        furthest = self.furthest(worker)
        return worker in self._began and (furthest is None or seq <= furthest)

    def flush(self) -> Decision | None:
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
        """Return the worker's next step; for a worker that is not live, its first step if it joined now."""
        last = self._last.get(worker, self._clock)
        return 1 + (last if worker in self._began else max(last, self._slowest()))

    def join(self, worker: str, *, rank: int | None = None, at: int | None = None) -> int:
        """Add a worker, as number `rank` of the live ones or last; returns its first step.

        `at` is a later first step, if several policies must agree on one: the largest of their `resume_at`.
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

    def _apply(self, chosen: Iterable[Contribution]) -> Decision:
        """Return the update of these; each gets its staleness, and its scale times the policy's."""
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
        return Decision(self.version, tuple(contributions))

    def _drop(self, contribution: Contribution) -> None:
        self._dropped.append(contribution)
        self._resolve(contribution)

    def _resolve(self, contribution: Contribution) -> None:
        worker, seq = contribution.push
        self._oldest[worker] = self.version
        self._began[worker] = {s: v for s, v in self._began[worker].items() if s > seq}


class AsyncPolicy(Policy):
    """Policy in which each push is an update of its own, in order of arrival; no worker waits."""

    name = "async"

    def take(self) -> Decision | None:
        return self._apply(self._waiting[:1]) if self._waiting else None

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

    def furthest(self, worker: str) -> int | None:
        return self._slowest() + 1 + self.staleness

    def waiting_for(self, worker: str, seq: int) -> tuple[str, ...]:
        if worker not in self._began:
            return ()
        return tuple(w for w in self._live if seq - 1 - self._last[w] > self.staleness)


class SyncPolicy(Policy):
    """Round t takes everybody's push t; step t+1 begins when it is applied.

    A worker joins at the next round that no worker has begun: the batch of a begun round is distributed.
    """

    name = "sync"
    spares = 0
    """Live workers that a round does not wait for."""

    def __init__(self, workers: Iterable[str] = (), *, clock: int = 0) -> None:
        super().__init__(workers, clock=clock)
        self.round = clock + 1

    def take(self) -> Decision | None:
        here = self._of_round()
        enough = max(1, len(here) + len(self._missing()) - self.spares)
        return self._close(here[:enough]) if len(here) >= enough else None

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

    def _close(self, chosen: list[Contribution]) -> Decision:
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

    def flush(self) -> Decision | None:
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

    def _close(self, chosen: list[Contribution]) -> Decision:
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


# Decider ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StartPermit:
    """Step that a worker may begin."""

    at: int
    """Its number, if the policy counts rounds."""
    until: int | None
    """The last step that may begin now; None: any."""


class Decider:
    """Runs one policy for the whole model, over pushes that arrive at several servers."""

    def __init__(
        self,
        policy: Policy,
        ledger: Ledger,
        *,
        servers: Iterable[str],
        lr_rule: Rule = "none",
        by_part: bool = False,
    ) -> None:
        """`by_part`: if true, an update is one part of a batch, and moves the weights by that part."""
        self.policy = policy
        policy.version = ledger.version
        self._ranks = {worker: rank for rank, worker in enumerate(policy.workers)}
        self._progress = ledger.progress
        self._servers = set(servers)
        self._lr_rule = lr_rule
        self._by_part = by_part
        self._received: dict[tuple[str, int], set[str]] = {}
        """By push that does not count yet: the servers that have it."""
        self._complete: dict[str, dict[int, tuple[Contribution, int]]] = {}
        """By worker, and by the push before it: pushes that every server has, and the version they began
        with."""
        self._last: dict[str, int] = {}
        self._late: list[Contribution] = []
        self.resting: set[str] = set()
        self._stragglers: set[str] = set()
        self._ending: set[str] = set()

    def received(self, server: str, push: Contribution, *, began: int, after: int) -> None:
        """Note that a server has all of a push, which its worker made after the one numbered `after`.

        It counts when every server has it, and in its worker's order: two pushes may overtake each other
        on different connections. Raises ValueError if the worker should not have made it.
        """
        if push.seq <= self._last.get(push.worker, 0):
            return  # sent again after it has counted
        if sum(worker == push.worker for worker, _ in self._received) >= MAX_UNDER_WAY:
            raise ValueError(f"{MAX_UNDER_WAY} pushes of {push.worker} wait for one before them")
        received = self._received.setdefault(push.push, set())
        received.add(server)
        if received < self._servers:
            return
        complete = self._complete.setdefault(push.worker, {})
        complete[after] = (push, began)
        last = self._last.setdefault(push.worker, 0)
        while (ready := complete.pop(last, None)) is not None:
            push, began = ready
            self._received.pop(push.push, None)
            self._count(push, began)
            self._last[push.worker] = last = push.seq

    def _count(self, push: Contribution, began: int) -> None:
        due = self.policy.resume_at(push.worker)
        if push.seq > due and push.worker in self.policy.workers:
            raise ValueError(f"{push.worker} pushed step {push.seq} where step {due} is due")
        self._ending.discard(push.worker)
        self.policy.started(push.worker, push.seq, version=began)
        verdict = self.policy.push(push)
        if verdict is Verdict.LATE:
            self._late += self.policy.dropped()
        elif verdict is Verdict.ACCEPTED and not self._by_part:
            until = self.policy.furthest(push.worker)
            if until is not None and push.seq < until:
                self._stragglers.add(push.worker)

    def decisions(self) -> list[Decision]:
        """Take the decisions that can be made now, in order."""
        made = []
        while (update := self._take()) is not None:
            decision = Decision.of(update.version, update.contributions, before=self._progress)
            self._progress = Fraction(*decision.progress)
            made.append(self._scaled(decision) if self._by_part else decision)
        self._late += self.policy.dropped()
        return made

    def _take(self) -> Decision | None:
        update = self.policy.take()
        if update is None and self._ending.issuperset(self.policy.workers):
            return self.policy.flush()
        return update

    def _scaled(self, decision: Decision) -> Decision:
        """Take the mean over the part, and move the weights by that part of a step: an optimizer that depends
        on the size of a gradient sees that of a batch."""
        (only,) = decision.contributions
        part, whole = only.share
        mean = replace(only, scale=only.scale * whole / part if part else 0.0)
        share = part / whole
        rate = decision.lr_scale * (share * lr_scale(self._lr_rule, only.staleness * share))
        return replace(decision, contributions=(mean,), lr_scale=rate)

    def late(self) -> list[Contribution]:
        """Drain the pushes that were left out of the weights."""
        late, self._late = self._late, []
        return late

    def stragglers(self) -> list[str]:
        """Drain the workers whose push missed its round and waits for the next one: they may continue."""
        stragglers, self._stragglers = sorted(self._stragglers), set()
        return stragglers

    def end_pushes(self, worker: str) -> None:
        """Note that the worker pushes no more until its pushes are resolved."""
        self._ending.add(worker)

    def rest(self, worker: str) -> None:
        """Don't wait for this worker until it wakes. All its pushes are resolved."""
        if worker not in self.resting:
            self.resting.add(worker)
            self.policy.leave(worker)

    def wake(self, worker: str) -> None:
        if worker in self.resting:
            self.resting.discard(worker)
            mine = self._ranks[worker]
            rank = sum(self._ranks[other] < mine for other in self.policy.workers)
            self.policy.join(worker, rank=rank)

    def permit(self, worker: str) -> StartPermit:
        """Return which step a worker may begin, to be sent along with updates."""
        return StartPermit(self.policy.resume_at(worker), self.policy.furthest(worker))
