"""Members that hang in the job's code, and members that only wait."""

from __future__ import annotations

from manyhands.coordinator.stuck import ENDING_S, StuckWatch
from manyhands.hosts.activity import COMPUTING, EVALUATING, LOADING, SAVING, WAITING, Activity
from manyhands.hosts.messages import Beat


def beat(step: int, doing: str, ticks: int, *, busy: bool = False) -> Beat:
    return Beat("training", 0.0, ticks=ticks, step=step, doing=doing, busy=busy)


class Clock:
    """Beats of members, one a second, and what the watch says of them."""

    def __init__(self, after_s: float = 60.0) -> None:
        self.watch = StuckWatch(after_s)
        self.now = 1000.0
        self.named: list[tuple[str, str]] = []
        self.given_up: list[tuple[str, str]] = []
        self.moved: list[tuple[str, str]] = []

    def beat(self, seconds: int, *, ending: bool = False, **doing: tuple[int, str, int]) -> None:
        for _ in range(seconds):
            self.now += 1
            for name, (step, what, ticks) in doing.items():
                said = self.watch.on_beat(name, beat(step, what, ticks), self.now)
                self.moved += [(name, said)] if said else []
            self.named += self.watch.newly_stuck(self.now).items()
            self.given_up += self.watch.hopeless(self.now, ending=ending).items()


def test_a_stuck_member_is_reported_once_and_waiting_ones_are_not() -> None:
    clock = Clock()
    clock.beat(60, a=(35, LOADING, 70), b=(35, WAITING, 70))
    assert clock.named == []
    clock.beat(500, a=(35, LOADING, 70), b=(35, WAITING, 70))
    assert clock.named == [("a", "has been in step 35 for 60 s (loading data)")]
    assert clock.given_up == []
    clock.beat(100, a=(35, LOADING, 70), b=(35, WAITING, 70))
    assert clock.given_up == [("a", "has been in step 35 for 600 s (loading data)")]
    assert clock.moved == []


def test_a_member_that_continues_is_reported_and_may_hang_again() -> None:
    clock = Clock()
    clock.beat(80, a=(35, COMPUTING, 70))
    clock.beat(1, a=(36, COMPUTING, 71))
    assert clock.moved == [("a", "continues after 80 s (forward and backward)")]
    clock.beat(61, a=(36, LOADING, 71))
    assert [words for _, words in clock.named] == [
        "has been in step 35 for 60 s (forward and backward)",
        "has been in step 36 for 60 s (loading data)",
    ]


def test_progress_inside_a_step_or_an_evaluation_is_enough() -> None:
    clock = Clock()
    for ticks in range(30):
        clock.beat(50, a=(35, COMPUTING, ticks), b=(0, EVALUATING, ticks))
    assert clock.named == []
    clock.beat(40, a=(35, COMPUTING, 29), b=(0, EVALUATING, 29))
    assert clock.named == []  # longer than usual, but not twice as long
    clock.beat(40, a=(35, COMPUTING, 29), b=(0, EVALUATING, 29))
    assert [words for _, words in clock.named] == [
        "has been in step 35 for 100 s (forward and backward)",
        "has been evaluating for 100 s",
    ]


def test_long_steps_are_not_reported_repeatedly() -> None:
    clock = Clock()
    for step in range(1, 20):
        clock.beat(90, a=(step, COMPUTING, step))
    assert len(clock.named) == 2


def test_a_first_step_that_keeps_a_core_busy_may_compile() -> None:
    watch = StuckWatch(60.0)
    for now in range(1000):
        watch.on_beat("a", beat(1, COMPUTING, 0, busy=True), now)
        watch.on_beat("b", beat(1, COMPUTING, 3, busy=True), now)
        watch.on_beat("c", beat(1, COMPUTING, 0), now)
    assert list(watch.newly_stuck(1000)) == ["b", "c"]


def test_a_member_without_beats_is_reported_by_its_last_beat() -> None:
    clock = Clock()
    clock.beat(1, a=(35, COMPUTING, 70))
    clock.beat(61)
    assert len(clock.named) == 1
    clock.watch.forget("a")
    clock.beat(1000)
    assert clock.given_up == []


def test_the_limit_is_short_when_the_run_ends() -> None:
    clock = Clock()
    clock.beat(int(ENDING_S), a=(35, LOADING, 70), b=(0, SAVING, 70), ending=True)
    assert clock.given_up == []
    clock.beat(100, a=(35, LOADING, 70), b=(0, SAVING, 70), ending=True)
    assert clock.given_up == [("a", "has been in step 35 for 20 s (loading data)")]


def test_zero_never_reports_but_a_run_can_still_be_ended() -> None:
    clock = Clock(0.0)
    clock.beat(10_000, a=(35, LOADING, 70))
    assert clock.named == clock.given_up == []
    clock.beat(1, a=(35, LOADING, 70), ending=True)
    assert len(clock.given_up) == 1


def test_sections_are_nested_and_restored() -> None:
    activity = Activity()
    with activity.in_step(7), activity.during(COMPUTING):
        assert (activity.step, activity.doing) == (7, COMPUTING)
        with activity.during(WAITING):
            assert activity.doing == WAITING
        assert activity.doing == COMPUTING
    assert (activity.step, activity.doing) == (0, WAITING)
