"""What a recovery takes, from the last step before a death to the first new one."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from manyhands.coordinator.recovery_clock import RecoveryClock, RecoveryTimes


def training(*commits: float) -> RecoveryClock:
    """A clock of a run that began at 0."""
    clock = RecoveryClock()
    clock.joined(0.0, redone_steps=0)
    clock.active(0.0)
    for step, at in enumerate(commits, start=1):
        assert clock.progress(at, step) is None
    return clock


def test_a_frozen_member_costs_the_time_until_it_is_noticed() -> None:
    clock = training(1.0, 2.0)
    clock.lost(122.0)
    assert clock.progress(122.1, 3) is None, "a survivor reports what it did before"
    clock.joined(122.5, redone_steps=4)
    times = clock.progress(124.0, 4)
    assert times == RecoveryTimes(120.0, 0.5, 1.5, 4)
    assert times.seconds == 122.0
    assert clock.progress(125.0, 5) is None


def test_deaths_while_recovering_belong_to_it() -> None:
    clock = training(1.0)
    clock.lost(2.0)
    clock.lost(3.0)
    clock.joined(4.0, redone_steps=3)
    clock.lost(6.0)
    assert clock.progress(6.5, 2) is None, "not all have joined"
    clock.joined(7.0, redone_steps=2)
    assert clock.progress(9.0, 3) == RecoveryTimes(1.0, 5.0, 2.0, 5)


def test_after_a_restart_only_steps_beyond_the_old_ones_are_new() -> None:
    clock = training(1.0, 2.0, 3.0)
    clock.lost(3.5)
    clock.joined(5.0, redone_steps=2, steps_before=3)
    assert clock.progress(6.0, 2) is None
    assert clock.progress(7.0, 3) is None
    assert clock.progress(8.0, 4) == RecoveryTimes(0.5, 1.5, 3.0, 2)


def test_before_the_first_step_the_beginning_counts() -> None:
    clock = training()
    clock.lost(2.0)
    clock.joined(3.0, redone_steps=1)
    assert clock.progress(4.0, 1) == RecoveryTimes(2.0, 1.0, 1.0, 1)


def test_an_evaluation_that_advances_is_no_standstill() -> None:
    clock = training(1.0)
    for now in (5.0, 9.0, 8.0):
        clock.active(now)
    clock.lost(10.0)
    clock.joined(11.0, redone_steps=0)
    assert clock.progress(12.0, 1) == RecoveryTimes(1.0, 1.0, 1.0, 0)


def test_a_death_after_which_nothing_is_left_to_do() -> None:
    clock = training(1.0)
    assert clock.ended() is None
    clock.lost(2.0)
    assert clock.ended() is None, "the others have not joined"
    clock.joined(2.5, redone_steps=0)
    assert clock.ended() == RecoveryTimes(1.0, 0.5, 0.0, 0)
    assert clock.ended() is None


def test_a_view_change_without_a_death_is_no_recovery() -> None:
    clock = training(1.0)
    clock.joined(2.0, redone_steps=3)
    assert clock.progress(3.0, 2) is None
    clock.lost(4.0)
    clock.joined(5.0, redone_steps=1)
    assert clock.progress(6.0, 3) == RecoveryTimes(1.0, 1.0, 1.0, 1)


@given(st.lists(st.sampled_from(["commit", "lost", "joined", "active"]), max_size=30))
def test_the_three_times_cover_the_standstill_without_gaps(acts: list[str]) -> None:
    clock = training()
    stopped: float | None = None
    last = 0.0
    for step, act in enumerate(acts, start=1):
        now = float(step)
        if act == "lost":
            stopped = last if stopped is None else stopped
            clock.lost(now)
        elif act == "joined":
            clock.joined(now, redone_steps=1)
        elif act == "active":
            clock.active(now)
            last = now
        else:
            times = clock.progress(now, step)
            if times is not None:
                assert stopped is not None
                assert times.seconds == now - stopped
                assert min(times.detection_s, times.view_s, times.redo_s) >= 0
                stopped = None
            last = now
