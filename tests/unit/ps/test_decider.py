"""Decider: in whatever order pushes reach the servers, each is decided or reported late exactly once."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from manyhands.ps.policies import (
    AsyncPolicy,
    BackupPolicy,
    Contribution,
    Decider,
    Decision,
    Ledger,
    Policy,
    SspPolicy,
    SyncPolicy,
)
from manyhands.ps.staleness import RULES, lr_scale

SERVERS = ["s0", "s1", "s2"]
WORKERS = ["w0", "w1", "w2", "w3"]


def push(
    worker: str, seq: int, *, share: tuple[int, int] = (1, 2), scale: float = 1.0
) -> Contribution:
    samples, total = float(share[0]), float(share[1])
    return Contribution(worker, seq, seq % 2, 1, 0, samples, total, share, scale=scale)


# One after the other ----------------------------------------------------------------------------


def test_a_push_counts_once_every_server_has_it() -> None:
    decider = Decider(AsyncPolicy(["w0"]), Ledger(), servers=SERVERS, by_part=True)
    for server in ("s2", "s2", "s0"):
        decider.received(server, push("w0", 1), began=0, after=0)
        assert decider.decisions() == []
    decider.received("s1", push("w0", 1), began=0, after=0)
    (decision,) = decider.decisions()
    assert [g.seq for g in decision.contributions] == [1]
    assert decision.progress == (1, 2)


def test_reordered_pushes_of_a_worker_count_in_its_order() -> None:
    decider = Decider(AsyncPolicy(["w0"]), Ledger(), servers=["s0"], by_part=True)
    decider.received("s0", push("w0", 2), began=0, after=1)
    assert decider.decisions() == []
    decider.received("s0", push("w0", 1), began=0, after=0)
    assert [d.contributions[0].seq for d in decider.decisions()] == [1, 2]


def test_duplicates_change_nothing_and_leave_no_state() -> None:
    decider = Decider(AsyncPolicy(["w0"]), Ledger(), servers=["s0"], by_part=True)
    for seq in (1, 2, 1, 2, 1):
        decider.received("s0", push("w0", seq), began=0, after=seq - 1)
    assert [d.contributions[0].seq for d in decider.decisions()] == [1, 2]
    assert not decider._received
    assert not decider._complete["w0"]


def test_numbers_continue_after_those_of_the_ledger() -> None:
    ledger = Ledger(version=7, progress=Fraction(5, 2))
    decider = Decider(SyncPolicy(["w0"]), ledger, servers=["s0"])
    decider.received("s0", push("w0", 1), began=7, after=0)
    (decision,) = decider.decisions()
    assert (decision.version, decision.progress, decision.ticks) == (8, (3, 1), 3)
    assert decision.contributions[0].staleness == 0


def test_the_learning_rate_of_a_part_is_its_share_and_falls_with_staleness() -> None:
    decider = Decider(
        AsyncPolicy(["w0", "w1"]), Ledger(), servers=["s0"], lr_rule="inverse", by_part=True
    )
    decider.received("s0", push("w0", 1, share=(1, 4)), began=0, after=0)
    decider.received("s0", push("w1", 1, share=(3, 4)), began=0, after=0)
    first, second = decider.decisions()
    assert (first.lr_scale, first.part) == (0.25, 0.25)
    # One update behind, of a part like its own.
    assert (second.lr_scale, second.part) == (0.75 / 1.75, 0.75)


def test_the_factor_of_a_step_is_in_its_decision() -> None:
    decider = Decider(SyncPolicy(["w0", "w1"]), Ledger(), servers=["s0"])
    for worker in ("w0", "w1"):
        told = replace(push(worker, 1), lr_factor=1.5, ticks=3)
        decider.received("s0", told, began=0, after=0)
    (decision,) = decider.decisions()
    assert (decision.lr_scale, decision.ticks) == (1.5, 3)
    decider = Decider(AsyncPolicy(["w0"]), Ledger(), servers=["s0"], by_part=True)
    decider.received("s0", replace(push("w0", 1, share=(1, 4)), lr_factor=0.5), began=0, after=0)
    assert [d.lr_scale for d in decider.decisions()] == [0.125]


def test_a_resting_worker_is_not_waited_for_and_keeps_its_rank() -> None:
    decider = Decider(SyncPolicy(["w0", "w1", "w2"]), Ledger(), servers=["s0"])
    decider.rest("w0")
    decider.rest("w0")
    for worker in ("w2", "w1"):
        decider.received("s0", push(worker, 1), began=0, after=0)
    assert [[g.worker for g in d.contributions] for d in decider.decisions()] == [["w1", "w2"]]
    decider.wake("w0")
    decider.wake("w0")
    assert (decider.permit("w0").at, decider.permit("w0").until) == (2, 2)
    for worker in ("w2", "w1", "w0"):
        decider.received("s0", push(worker, 2), began=1, after=0 if worker == "w0" else 1)
    (decision,) = decider.decisions()
    assert [g.worker for g in decision.contributions] == ["w0", "w1", "w2"], "added in rank order"


def test_a_late_push_is_reported_once_or_waits_for_the_next_round() -> None:
    def after_a_round(late: Any) -> Decider:
        policy = BackupPolicy(["w0", "w1", "w2"], spares=1, late=late)
        decider = Decider(policy, Ledger(), servers=["s0"])
        for worker in ("w0", "w1"):
            decider.received("s0", push(worker, 1), began=0, after=0)
        assert len(decider.decisions()) == 1
        decider.received("s0", push("w2", 1, scale=0.5), began=0, after=0)
        return decider

    decider = after_a_round("drop")
    assert decider.decisions() == []
    assert [(g.worker, g.seq) for g in decider.late()] == [("w2", 1)]
    assert decider.late() == decider.stragglers() == []
    assert decider.permit("w2").at == 2

    decider = after_a_round("decay")
    assert decider.decisions() == decider.late() == []
    assert decider.stragglers() == ["w2"]
    assert decider.stragglers() == []
    for worker in ("w0", "w1"):
        decider.received("s0", push(worker, 2), began=1, after=1)
    (decision,) = decider.decisions()
    assert [(g.worker, g.seq, g.scale) for g in decision.contributions] == [
        ("w0", 2, 1.0), ("w1", 2, 1.0), ("w2", 1, 0.25),
    ]  # fmt: skip


def test_waiting_pushes_are_applied_at_the_end_of_the_data() -> None:
    policy = BackupPolicy(["w0", "w1", "w2"], spares=1, late="decay")
    decider = Decider(policy, Ledger(), servers=["s0"])
    for worker in ("w0", "w1", "w2"):
        decider.received("s0", push(worker, 1), began=0, after=0)
        decider.decisions()
    decider.rest("w0")
    decider.rest("w1")
    assert decider.decisions() == [], "w2 may still give something to the open round"
    decider.end_pushes("w2")
    (decision,) = decider.decisions()
    assert [(g.worker, g.seq) for g in decision.contributions] == [("w2", 1)]


# In any order -----------------------------------------------------------------------------------


class DelayedMessages:
    """Simulation of workers that push parts of batches to servers, with delayed messages and one decider.

    A worker behaves like its client: it does one step after the other as it is permitted, has two gradient
    buffers, waits for each step in rounds, and rests when all its pushes are resolved.
    """

    def __init__(
        self, policy: Policy, *, servers: int, batches: int, parts: int, rule: Any, by_part: bool
    ) -> None:
        self.servers, self.workers = SERVERS[:servers], policy.workers
        self.by_part, self.rule = by_part, rule
        self.batches = batches
        self.decider = Decider(
            policy, Ledger(), servers=self.servers, lr_rule=rule, by_part=by_part
        )
        self.slots = (
            1 if isinstance(policy, SyncPolicy) and not isinstance(policy, BackupPolicy) else 2
        )
        self.parts = [(step, part) for step in range(1, batches + 1) for part in range(parts)]
        self.num_parts = parts
        self.last = dict.fromkeys(self.workers, 0)  # the number of its last push
        self.resumed = dict.fromkeys(self.workers, 0)  # where it continues after a rest
        self.under_way: dict[str, dict[int, Contribution]] = {w: {} for w in self.workers}
        self.counted: set[tuple[str, int]] = set()
        self.released: set[str] = set()
        self.resting: set[str] = set()
        self.in_transit: list[tuple[str, Contribution, int, int]] = []
        self.said: list[tuple[str, Contribution, int, int]] = []
        self.missing: dict[tuple[str, int], set[str]] = {}
        self.fate: dict[tuple[str, int], str] = {}
        self.began: dict[tuple[str, int], int] = {}
        self.decided: list[Decision] = []

    # Actions.

    def may_push(self, worker: str) -> bool:
        """Return whether it has work, may begin, and has a free buffer."""
        mine = self.under_way[worker]
        if not self.parts or len(mine) >= self.slots:
            return False
        if not self.by_part and mine and worker not in self.released:
            return False
        if worker in self.resting:
            return True
        until = self.decider.permit(worker).until
        return until is None or self.next_of(worker) <= until

    def next_of(self, worker: str) -> int:
        if self.by_part:
            return max(self.last[worker], self.resumed[worker]) + 1
        return self.decider.permit(worker).at

    def push(self, worker: str) -> None:
        if worker in self.resting:
            self.resting.discard(worker)
            self.decider.wake(worker)
            self.resumed[worker] = self.decider.permit(worker).at - 1
            return
        seq, (step, part) = self.next_of(worker), self.parts.pop(0)
        share = (part + 1, self.num_parts * (self.num_parts + 1) // 2)
        given = replace(push(worker, seq, share=share), step=step, part=part)
        self.began[worker, seq] = len(self.decided)
        self.under_way[worker][seq] = given
        self.missing[worker, seq] = set(self.servers)
        self.released.discard(worker)
        for server in self.servers:
            self.in_transit.append((server, given, self.began[worker, seq], self.last[worker]))
        self.last[worker] = seq

    def deliver(self, number: int) -> None:
        said = self.in_transit.pop(number)
        server, given, began, after = said
        self.said.append(said)
        self.missing[given.worker, given.seq].discard(server)
        self.decider.received(server, given, began=began, after=after)
        self.look()

    def send_again(self, number: int) -> None:
        server, given, began, after = self.said[number]
        self.decider.received(server, given, began=began, after=after)
        self.look()

    def may_rest(self, worker: str) -> bool:
        return not self.under_way[worker] and worker not in self.resting

    def rest(self, worker: str) -> None:
        self.resting.add(worker)
        self.decider.rest(worker)
        self.look()

    def may_end(self, worker: str) -> bool:
        mine = self.under_way[worker]
        return bool(mine) and (self.by_part or worker in self.released)

    def end(self, worker: str) -> None:
        self.decider.end_pushes(worker)
        self.look()

    def moves(self) -> list[tuple[Callable[[Any], None], Any]]:
        moves: list[tuple[Callable[[Any], None], Any]] = []
        moves += [(self.push, w) for w in self.workers if self.may_push(w)]
        moves += [(self.deliver, i) for i in range(len(self.in_transit))]
        moves += [(self.send_again, i) for i in range(len(self.said))][-2:]
        moves += [(self.rest, w) for w in self.workers if self.may_rest(w)]
        moves += [(self.end, w) for w in self.workers if self.may_end(w) and not self.parts]
        return moves

    # Invariants.

    def look(self) -> None:
        for decision in self.decider.decisions():
            self.decided.append(decision)
            assert decision.version == len(self.decided), "versions have no gaps"
            assert decision.contributions
            order = [(g.worker, g.seq) for g in decision.contributions]
            assert order == sorted(order), "in rank order"
            for each in decision.contributions:
                self.resolve(each, "decided")
                assert each.staleness == decision.version - 1 - self.began[each.worker, each.seq]
            self.check_rate(decision)
        for each in self.decider.late():
            self.resolve(each, "late")
            self.parts.insert(0, (each.step, each.part))
        self.released |= set(self.decider.stragglers())

    def resolve(self, given: Contribution, fate: str) -> None:
        key = given.worker, given.seq
        assert key not in self.fate, "each once"
        self.fate[key] = fate
        assert not self.missing[key], "every server has it"
        mine = self.under_way[given.worker]
        assert min(mine) == given.seq, "in its worker's order"
        wanted = mine.pop(given.seq)
        assert (given.step, given.part, given.slot) == (wanted.step, wanted.part, wanted.slot)

    def check_rate(self, decision: Decision) -> None:
        if self.by_part:
            (only,) = decision.contributions
            share = only.share[0] / only.share[1]
            assert decision.lr_scale == share * lr_scale(self.rule, only.staleness * share)
        else:
            assert decision.lr_scale == 1.0
        done = sum((Fraction(*g.share) for d in self.decided for g in d.contributions), Fraction())
        assert Fraction(*decision.progress) == done

    def finish(self) -> None:
        """Run to the end: whatever happened before, all batches must get into the weights."""
        for _ in range(60 * (len(self.parts) + 20)):
            if self.in_transit:
                self.deliver(0)
                continue
            pushing = [w for w in self.workers if self.may_push(w)]
            if pushing:
                self.push(pushing[0])
                continue
            for worker in self.workers:
                if self.may_rest(worker) and not self.parts:
                    self.rest(worker)
                elif self.may_end(worker) and not self.parts:
                    self.end(worker)
            if not self.parts and not any(self.under_way.values()):
                break
        assert not self.parts, "it stands still"
        assert not any(self.under_way.values()), "a push was forgotten"
        assert Fraction(*self.decided[-1].progress) == self.batches
        assert self.decided[-1].ticks == self.batches
        assert not self.decider.policy._waiting
        assert not self.decider._received


POLICIES: dict[str, Callable[[st.DataObject, list[str]], Policy]] = {
    "sync": lambda data, workers: SyncPolicy(workers),
    "async": lambda data, workers: AsyncPolicy(workers),
    "ssp": lambda data, workers: SspPolicy(workers, staleness=data.draw(st.integers(0, 3))),
    "drop": lambda data, workers: BackupPolicy(
        workers, spares=data.draw(st.integers(0, 2)), late="drop"
    ),
    "decay": lambda data, workers: BackupPolicy(
        workers, spares=data.draw(st.integers(0, 2)), late="decay"
    ),
}


@pytest.mark.parametrize("name", POLICIES)
@settings(max_examples=100)
@given(st.data())
def test_every_push_is_decided_or_reported_late_once_in_any_order(
    name: str, data: st.DataObject
) -> None:
    workers = WORKERS[: data.draw(st.integers(1, 4))]
    simulation = DelayedMessages(
        POLICIES[name](data, workers),
        servers=data.draw(st.integers(1, 3)),
        batches=data.draw(st.integers(1, 6)),
        parts=data.draw(st.integers(1, 4)),
        rule=data.draw(st.sampled_from(RULES)),
        by_part=name in ("async", "ssp"),
    )
    chance = random.Random(data.draw(st.integers(0, 2**32)))
    for _ in range(data.draw(st.integers(0, 150))):
        if moves := simulation.moves():
            move, what = chance.choice(moves)
            move(what)
    simulation.finish()
