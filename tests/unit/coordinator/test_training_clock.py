"""How long a run has trained: without start-up and evaluations, over all its starts."""

from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from manyhands.coordinator.training_clock import TrainingClock, TrainingTimes

seconds = st.integers(0, 1000).map(float)


def test_start_up_and_evaluations_are_not_training() -> None:
    clock = TrainingClock(100.0)
    assert clock.read(103.0) == TrainingTimes(startup_s=3.0)
    clock.begin(105.0)
    clock.evaluated(2.0)
    assert clock.read(115.0) == TrainingTimes(training_s=8.0, startup_s=5.0, evaluation_s=2.0)


def test_a_restart_of_all_members_is_part_of_the_training() -> None:
    clock = TrainingClock(0.0)
    clock.begin(1.0)
    clock.begin(6.0)
    assert clock.read(10.0) == TrainingTimes(training_s=9.0, startup_s=1.0)


@given(starts=st.lists(st.tuples(seconds, seconds, seconds, seconds), min_size=1, max_size=4))
def test_times_add_up_over_starts(starts: list[tuple[float, float, float, float]]) -> None:
    """Whatever lies between the starts, and whatever a start did after its checkpoint."""
    now, saved = 0.0, None
    for startup_s, training_s, evaluation_s, after_s in starts:
        clock = TrainingClock(now, saved)
        clock.begin(now + startup_s)
        clock.evaluated(evaluation_s)
        now += startup_s + training_s + evaluation_s
        saved = json.loads(json.dumps(clock.state(now)))
        now += after_s
    sums = [sum(column) for column in zip(*starts, strict=True)]
    assert TrainingTimes(**saved["times"]) == TrainingTimes(sums[1], sums[0], sums[2])


def test_times_of_a_run_that_did_not_save_them_stay_unknown() -> None:
    clock = TrainingClock(0.0, {"step": 4})
    clock.begin(1.0)
    assert clock.read(2.0) is None
    assert TrainingClock(0.0, {"step": 4, **clock.state(2.0)}).read(3.0) is None
