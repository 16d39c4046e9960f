"""Policies by example, one per guarantee. test_policies_any_order covers all orders of events."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from manyhands.errors import SpecError
from manyhands.ps.policies import (
    POLICIES,
    AsyncPolicy,
    BackupPolicy,
    Contribution,
    Decision,
    Policy,
    SspPolicy,
    SyncPolicy,
    Verdict,
)

ABC = ("a", "b", "c")


def step(policy: Policy, worker: str, seq: int) -> Verdict:
    """One whole step of a worker that asks before it begins."""
    assert policy.may_start(worker, seq)
    policy.started(worker, seq)
    return policy.push(Contribution(worker, seq))


def taken(policy: Policy) -> list[Decision]:
    updates = []
    while update := policy.take():
        updates.append(update)
    return updates


def pushes(update: Decision | None) -> list[tuple[str, int]]:
    assert update is not None
    return [(c.worker, c.seq) for c in update.contributions]


def dropped(policy: Policy) -> tuple[tuple[str, int], ...]:
    return tuple(each.push for each in policy.dropped())


def run(policy: Policy, orders: list[tuple[str, ...]]) -> list[Decision]:
    updates = []
    for order in orders:
        for worker in order:
            step(policy, worker, policy.resume_at(worker))
            updates += taken(policy)
    return updates


ORDERS = st.lists(st.permutations(ABC).map(tuple), min_size=1, max_size=6)


@given(ORDERS)
def test_sync_gives_the_same_updates_whatever_the_order_of_arrival(orders: list[Any]) -> None:
    expected = [
        Decision(version, tuple(Contribution(w, version) for w in ABC))
        for version in range(1, len(orders) + 1)
    ]
    assert run(SyncPolicy(ABC), orders) == expected
    # With nobody to spare, a backup policy is the same thing; and lock-step is ssp with no slack.
    assert run(BackupPolicy(ABC, spares=0), orders) == expected
    assert len(run(SspPolicy(ABC, staleness=0), orders)) == 3 * len(orders)


def test_sync_names_the_workers_that_it_waits_for() -> None:
    policy = SyncPolicy(ABC)
    step(policy, "b", 1)
    assert policy.take() is None
    assert not policy.may_start("b", 2)
    assert policy.waiting_for("b", 2) == ("a", "c")
    assert policy.waiting_for("b", 1) == ()


def test_sync_continues_without_a_dead_worker_and_returns_its_push() -> None:
    policy = SyncPolicy(ABC)
    for worker in "ca":
        step(policy, worker, 1)
    assert policy.leave("c") == (Contribution("c", 1),)
    assert policy.take() is None
    step(policy, "b", 1)
    assert pushes(policy.take()) == [("a", 1), ("b", 1)]
    assert policy.push(Contribution("c", 1)) is Verdict.UNKNOWN
    assert policy.leave("c") == ()


def test_a_worker_joins_sync_at_the_first_step_that_no_worker_has_begun() -> None:
    policy = SyncPolicy("ab")
    assert policy.join("c") == 1
    policy.started("a", 1)
    assert policy.join("d", rank=0) == 2
    assert not policy.may_start("d", 2)
    for worker in "abc":
        policy.push(Contribution(worker, 1))
    assert pushes(policy.take()) == [("a", 1), ("b", 1), ("c", 1)]
    for worker in "abcd":
        step(policy, worker, 2)
    assert pushes(policy.take()) == [("d", 2), ("a", 2), ("b", 2), ("c", 2)]


def test_a_joiner_does_not_wait_for_a_round_whose_members_are_all_dead() -> None:
    policy = SyncPolicy("a")
    policy.started("a", 1)
    assert policy.join("b") == 2
    policy.leave("a")
    assert step(policy, "b", 2) is Verdict.ACCEPTED
    update = policy.take()
    assert pushes(update) == [("b", 2)]
    assert update is not None
    assert update.version == 1, "versions have no gaps, though rounds may"


@pytest.mark.parametrize("name", POLICIES)
def test_a_worker_that_rejoins_repeats_no_number(name: str) -> None:
    policy = POLICIES[name]("ab", clock=4)
    assert step(policy, "a", 5) is Verdict.ACCEPTED
    policy.leave("a")
    assert policy.join("a") == 6
    assert policy.push(Contribution("a", 5)) is Verdict.DUPLICATE, (
        "left on the wire by its first life"
    )


@pytest.mark.parametrize("name", POLICIES)
def test_a_gap_in_the_numbers_fails(name: str) -> None:
    policy = POLICIES[name]("ab")
    with pytest.raises(AssertionError, match="a pushed step 2 where step 1 is due"):
        policy.push(Contribution("a", 2))
    with pytest.raises(AssertionError, match="a is in already"):
        policy.join("a")
    with pytest.raises(AssertionError, match="can't join at step 0"):
        policy.join("c", at=0)


def test_a_push_ahead_of_its_round_waits_for_its_turn() -> None:
    """After a failover, a worker's pushes may come to the replica before the others' of the step before."""
    policy = SyncPolicy("ab")
    policy.push(Contribution("a", 1))
    policy.push(Contribution("a", 2))
    policy.push(Contribution("b", 1))
    assert [pushes(update) for update in taken(policy)] == [[("a", 1), ("b", 1)]]
    policy.push(Contribution("b", 2))
    assert [pushes(update) for update in taken(policy)] == [[("a", 2), ("b", 2)]]


def test_staleness_counts_the_updates_since_the_pull() -> None:
    policy: Policy = AsyncPolicy("ab")
    policy.started("a", 1)
    for seq in (1, 2, 3):
        step(policy, "b", seq)
        assert policy.take() == Decision(seq, (Contribution("b", seq),))
    policy.push(Contribution("a", 1))
    assert policy.take() == Decision(4, (Contribution("a", 1, staleness=3),))
    # Where the pull was not seen, the oldest weights that a can have got are those it made.
    step(policy, "b", 4)
    policy.take()
    policy.push(Contribution("a", 2))
    assert policy.take() == Decision(6, (Contribution("a", 2, staleness=1),))
    policy.started("a", 3, version=2)
    policy.push(Contribution("a", 3))
    assert policy.take() == Decision(7, (Contribution("a", 3, staleness=4),))


def test_ssp_bounds_how_far_a_worker_is_ahead() -> None:
    policy = SspPolicy(ABC, staleness=2)
    for seq in (1, 2, 3):
        step(policy, "a", seq)
    step(policy, "b", 1)
    assert not policy.may_start("a", 4)
    assert policy.waiting_for("a", 4) == ("c",)
    policy.leave("c")
    assert policy.may_start("a", 4)
    assert policy.join("c") == 2, "beside the slowest"
    assert not policy.may_start("a", 5)


def test_backup_continues_without_the_slowest_and_loses_no_samples() -> None:
    policy = BackupPolicy(ABC, spares=1)
    policy.started("b", 1)
    step(policy, "c", 1)
    step(policy, "a", 1)
    assert pushes(policy.take()) == [("a", 1), ("c", 1)]
    for worker in "ac":
        step(policy, worker, 2)
    policy.take()
    assert policy.push(Contribution("b", 1)) is Verdict.LATE
    assert dropped(policy) == (("b", 1),)
    assert dropped(policy) == ()
    assert policy.push(Contribution("b", 1)) is Verdict.DUPLICATE
    assert policy.resume_at("b") == 3
    assert step(policy, "b", 3) is Verdict.ACCEPTED


def test_backup_decays_late_pushes() -> None:
    policy = BackupPolicy(ABC, spares=1, late="decay", decay=0.5)
    policy.started("b", 1)
    run(policy, [("a", "c"), ("a", "c")])
    assert policy.push(Contribution("b", 1)) is Verdict.ACCEPTED
    (update,) = run(policy, [("a", "c")])
    late = Contribution("b", 1, staleness=2, scale=0.25)
    assert update == Decision(3, (Contribution("a", 3), late, Contribution("c", 3)))
    assert dropped(policy) == ()


def test_backup_takes_the_first_pushes_even_if_more_have_arrived() -> None:
    policy = BackupPolicy(ABC, spares=2)
    for worker in "bac":
        step(policy, worker, 1)
    assert [pushes(update) for update in taken(policy)] == [[("b", 1)]]
    assert dropped(policy) == (("a", 1), ("c", 1))
    assert policy.join("d") == 2, "in the open round, at once"


def test_backup_ends_with_the_data() -> None:
    policy = BackupPolicy(ABC, spares=1)
    assert policy.flush() is None
    step(policy, "b", 1)
    assert policy.take() is None
    assert pushes(policy.flush()) == [("b", 1)]
    policy.started("a", 1)
    assert policy.push(Contribution("a", 1)) is Verdict.LATE


def test_backup_does_not_wait_for_a_stalled_worker_when_the_others_rejoined() -> None:
    policy = BackupPolicy(ABC, spares=1)
    policy.started("a", 1)
    step(policy, "c", 1)
    policy.leave("c")
    policy.leave("b")
    assert policy.join("c") == 2
    step(policy, "c", 2)
    assert pushes(policy.take()) == [("c", 2)]


def test_backup_reaches_the_round_of_a_joiner_without_the_spare() -> None:
    policy = BackupPolicy("a", spares=1)
    step(policy, "a", 1)
    assert policy.join("b", at=3) == 3
    assert pushes(policy.take()) == [("a", 1)]
    step(policy, "b", 3)
    assert pushes(policy.take()) == [("b", 3)]


def test_pushes_in_time_are_never_decayed() -> None:
    policy = BackupPolicy("ab", spares=1, late="decay")
    policy.join("c", at=3)
    run(policy, [("a",), ("a",)])
    policy.push(Contribution("c", 3))  # its pull was not seen
    (update,) = run(policy, [("a",)])
    assert update.contributions[1] == Contribution("c", 3, staleness=2, scale=1.0)


def test_a_worker_that_returns_after_all_left_continues_at_the_current_step() -> None:
    policy = SspPolicy("ab", staleness=9)
    run(policy, [("a", "b", "b", "b", "b")])
    policy.leave("a")
    policy.leave("b")
    assert policy.join("a") == 5
    assert policy.join("c") == 5


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        (
            SspPolicy,
            {"staleness": -1},
            r"ps:ssp\(staleness=-1\).*0 or more\. Write ps:ssp\(staleness=4\)",
        ),
        (SspPolicy, {"staleness": 1.5}, r"ps:ssp\(staleness=1\.5\).*whole number"),
        (BackupPolicy, {"spares": True}, r"ps:backup\(spares=True\).*whole number"),
        (BackupPolicy, {"late": "dorp"}, r"late is drop or decay; did you mean 'drop'\?"),
        (BackupPolicy, {"decay": 0.0}, r"decay=0\.0.*above 0 and at most 1"),
    ],
)
def test_invalid_options_are_refused(kind: Any, options: Any, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        kind(ABC, **options)
