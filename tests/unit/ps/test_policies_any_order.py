"""Policies under any order of pushes, resends, deaths and rejoins, compared with a simple model."""

from __future__ import annotations

import copy
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from manyhands.ps.policies import (
    AsyncPolicy,
    BackupPolicy,
    Contribution,
    Decision,
    Policy,
    SspPolicy,
    SyncPolicy,
    Verdict,
)

NAMES = [f"worker{i}" for i in range(5)]
COUNT = st.sampled_from([0, 1, 2, 3, 4, 5, 3, 4, 5])
Push = tuple[str, int]
PICK = st.integers(0, 59)  # of any number of workers up to five, each as often


class AnyOrder(RuleBasedStateMachine):
    """Members of one policy do what they may, die and return; a copy of it follows along.

    The model knows nothing of clocks: only who did what, and what became of each push.
    """

    def start(self, policy: Policy, live: list[str], *, eager: bool) -> None:
        self.policy, self.twin = policy, copy.deepcopy(policy)
        self.eager = eager  # whether updates are taken at once, or some time
        self.live = list(live)
        self.first = dict.fromkeys(live, policy.version + 1)
        self.done = dict.fromkeys(live, policy.version)
        self.begun: dict[str, tuple[int, int]] = {}  # worker: seq, updates made before
        self.began_at: dict[Push, int] = {}
        self.fate: dict[Push, str] = {}
        self.updates: list[Decision] = []
        self.base = policy.version

    def both(self, method: str, *args: Any, **options: Any) -> Any:
        """The same call on the policy and its twin, which must not differ."""
        answer = getattr(self.policy, method)(*args, **options)
        assert getattr(self.twin, method)(*args, **options) == answer
        return answer

    # What may happen.

    @precondition(lambda self: self.live)
    @rule(pick=PICK)
    def begin_one(self, pick: int) -> None:
        self.begin(self.live[pick % len(self.live)])

    @precondition(lambda self: self.begun)
    @rule(pick=PICK)
    def finish_one(self, pick: int) -> None:
        self.finish(list(self.begun)[pick % len(self.begun)])

    @precondition(lambda self: self.live)
    @rule(picks=st.lists(PICK, min_size=1, max_size=10))
    def work(self, picks: list[int]) -> None:
        """Some go ahead, each with a whole step or the rest of one."""
        for pick in picks:
            worker = self.live[pick % len(self.live)]
            self.begin(worker)
            self.finish(worker)

    def begin(self, worker: str) -> None:
        seq = self.both("resume_at", worker)
        if worker not in self.begun and self.both("may_start", worker, seq):
            self.both("started", worker, seq)
            self.begun[worker] = (seq, len(self.updates))

    def finish(self, worker: str) -> None:
        if worker not in self.begun:
            return
        seq, self.began_at[worker, seq] = self.begun.pop(worker)
        assert (worker, seq) not in self.fate, "a number repeats"
        verdict = self.both("push", Contribution(worker, seq))
        assert verdict in (Verdict.ACCEPTED, Verdict.LATE)
        self.fate[worker, seq] = "late" if verdict is Verdict.LATE else "waiting"
        self.done[worker] = seq
        self.settle()

    @precondition(lambda self: self.fate)
    @rule(data=st.data())
    def resend(self, data: st.DataObject) -> None:
        worker, seq = data.draw(st.sampled_from(sorted(self.fate)))
        before = copy.deepcopy(vars(self.policy))
        wanted = Verdict.DUPLICATE if worker in self.live else Verdict.UNKNOWN
        assert self.both("push", Contribution(worker, seq)) is wanted
        assert vars(self.policy) == before

    @rule(worker=st.sampled_from(NAMES))
    def die(self, worker: str) -> None:
        lost = [each.push for each in self.both("leave", worker)]
        waited = [p for p, fate in self.fate.items() if fate == "waiting" and p[0] == worker]
        assert sorted(lost) == sorted(waited)
        for push in lost:
            self.fate[push] = "dropped"
        self.begun.pop(worker, None)
        if worker in self.live:
            self.live.remove(worker)
        assert not self.both("may_start", worker, self.both("resume_at", worker))
        self.settle()

    @rule(worker=st.sampled_from(NAMES), rank=st.integers(0, 4), later=st.integers(0, 2))
    def join(self, worker: str, rank: int, later: int) -> None:
        if worker in self.live:
            return
        at = self.both("resume_at", worker) + later if later else None
        first = self.both("join", worker, rank=rank, at=at)
        self.live.insert(rank, worker)
        assert self.policy.workers == tuple(self.live)
        self.first[worker], self.done[worker] = first, first - 1
        self.settle()

    @rule()
    def copy(self) -> None:
        self.twin = copy.deepcopy(self.policy)
        assert type(self.twin) is type(self.policy)

    @rule()
    def take_all(self) -> None:
        while update := self.both("take"):
            self.check(update)
            self.count(update)
        self.count_dropped()

    def settle(self) -> None:
        if self.eager:
            self.take_all()

    # What must hold.

    @invariant()
    def the_furthest_step_is_the_last_that_may_start(self) -> None:
        for worker in self.live:
            furthest, due = self.policy.furthest(worker), self.policy.resume_at(worker)
            for seq in range(due, due + 6):
                may = furthest is None or seq <= furthest
                assert self.policy.may_start(worker, seq) == may

    def count(self, update: Decision) -> None:
        assert update.contributions
        assert update.version == self.base + len(self.updates) + 1, "versions have no gaps"
        order = [(self.live.index(c.worker), c.seq) for c in update.contributions]
        assert order == sorted(set(order)), "in rank order, each once"
        for each in update.contributions:
            push = each.worker, each.seq
            assert self.fate[push] == "waiting"
            self.fate[push] = "applied"
            assert each.staleness == len(self.updates) - self.began_at[push]
        self.updates.append(update)
        assert self.policy.version == update.version

    def count_dropped(self) -> None:
        for push in [each.push for each in self.both("dropped")]:
            assert self.fate[push] in ("late", "waiting")
            self.fate[push] = "dropped"
        assert "late" not in self.fate.values(), "what was late is told"

    def check(self, update: Decision) -> None:
        """Holds for this policy's updates, just before they are counted."""

    def willing(self) -> list[str]:
        """Who suffices for progress, if the others never do anything again."""
        return self.live

    def teardown(self) -> None:
        if not hasattr(self, "policy"):
            return
        self.take_all()
        if not self.live:
            self.join(NAMES[0], rank=0, later=0)
        goal = len(self.updates) + 3
        accepted = [push for push, fate in self.fate.items() if fate == "waiting"]
        # A joiner's first step may be agreed a few rounds ahead, which all others have to get to.
        for _ in range(40):
            for worker in self.willing():
                self.begin(worker)
                self.finish(worker)
            self.take_all()
        assert len(self.updates) >= goal, "it stands still"
        assert all(self.fate[push] != "waiting" for push in accepted), "lost"


class SyncInAnyOrder(AnyOrder):
    @initialize(count=COUNT, clock=st.integers(0, 3), eager=st.booleans())
    def go(self, count: int, clock: int, eager: bool) -> None:
        self.start(SyncPolicy(NAMES[:count], clock=clock), NAMES[:count], eager=eager)

    def check(self, update: Decision) -> None:
        (seq,) = {c.seq for c in update.contributions}
        everybody = [w for w in self.live if self.first[w] <= seq]
        assert [c.worker for c in update.contributions] == everybody
        assert all((c.staleness, c.scale) == (0, 1.0) for c in update.contributions)

    @invariant()
    def who_waits_is_told_for_whom(self) -> None:
        waiting = [w for w in self.live if not self.policy.may_start(w, self.done[w] + 1)]
        for worker in waiting if self.eager else []:
            missing = self.policy.waiting_for(worker, self.done[worker] + 1)
            assert missing
            assert set(missing) <= set(self.live) - {worker}


class AsyncInAnyOrder(AnyOrder):
    @initialize(count=COUNT, eager=st.booleans())
    def go(self, count: int, eager: bool) -> None:
        self.start(AsyncPolicy(NAMES[:count]), NAMES[:count], eager=eager)

    def check(self, update: Decision) -> None:
        (only,) = update.contributions
        waiting = [push for push, fate in self.fate.items() if fate == "waiting"]
        assert (only.worker, only.seq) == waiting[0], "in order of arrival"

    @invariant()
    def nobody_waits(self) -> None:
        assert all(self.policy.may_start(w, self.done[w] + 1) for w in self.live)

    def willing(self) -> list[str]:
        return self.live[:1]


class SspInAnyOrder(AnyOrder):
    @initialize(count=COUNT, bound=st.integers(0, 3), eager=st.booleans())
    def go(self, count: int, bound: int, eager: bool) -> None:
        self.bound = bound
        self.start(SspPolicy(NAMES[:count], staleness=bound), NAMES[:count], eager=eager)

    check = AsyncInAnyOrder.check

    @invariant()
    def nobody_runs_too_far_ahead(self) -> None:
        for worker in self.live:
            next_step = self.done[worker] + 1
            too_slow = tuple(w for w in self.live if self.done[worker] - self.done[w] > self.bound)
            assert self.policy.may_start(worker, next_step) == (not too_slow)
            assert self.policy.waiting_for(worker, next_step) == too_slow
        for worker, (seq, _) in self.begun.items():
            # Also after deaths and joins: who joins is never further behind than the slowest was.
            assert all(seq - 1 - self.done[w] <= self.bound for w in self.live), worker

    @invariant()
    def the_slowest_may_start(self) -> None:
        if self.live:
            slowest = min(self.live, key=self.done.__getitem__)
            assert self.policy.may_start(slowest, self.done[slowest] + 1)


class BackupInAnyOrder(AnyOrder):
    @initialize(
        count=COUNT,
        spares=st.integers(0, 3),
        late=st.sampled_from(["drop", "decay"]),
        eager=st.booleans(),
    )
    def go(self, count: int, spares: int, late: Any, eager: bool) -> None:
        self.spares, self.late = spares, late
        policy = BackupPolicy(NAMES[:count], spares=spares, late=late, decay=0.5)
        self.start(policy, NAMES[:count], eager=eager)

    def check(self, update: Decision) -> None:
        newest = max(c.seq for c in update.contributions)
        timely = [c for c in update.contributions if c.seq == newest]
        gave = [p for p, fate in self.fate.items() if fate == "waiting" and p[1] == newest]
        could = [w for w in self.live if self.done[w] < newest]
        enough = max(1, len(gave) + len(could) - self.spares)
        assert {(c.worker, c.seq) for c in timely} == set(gave[:enough]), "the first to arrive"
        assert all(c.scale == 1 for c in timely)
        behind = [c for c in update.contributions if c.seq < newest]
        assert self.late == "decay" or not behind
        assert all(c.scale == 0.5**c.staleness for c in behind)

    @invariant()
    def never_waits_for_more_than_it_must(self) -> None:
        if not self.eager:
            return
        assert isinstance(self.policy, BackupPolicy)
        now = self.policy.round
        timely = [p for p, fate in self.fate.items() if fate == "waiting" and p[1] == now]
        assert len(timely) < max(1, len(self.live) - self.spares)

    def willing(self) -> list[str]:
        return self.live[min(self.spares, len(self.live) - 1) :]

    @rule()
    def end_of_data(self) -> None:
        self.take_all()
        if update := self.both("flush"):
            self.count(update)
        self.count_dropped()
        assert "waiting" not in self.fate.values()


MANY = settings(stateful_step_count=30, max_examples=80)
TestSync, TestAsync = SyncInAnyOrder.TestCase, AsyncInAnyOrder.TestCase
TestSsp, TestBackup = SspInAnyOrder.TestCase, BackupInAnyOrder.TestCase
TestSync.settings = TestAsync.settings = TestSsp.settings = TestBackup.settings = MANY
