"""The state of a worker that leaves gets to one that stays, which has it from the view without the sender."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from manyhands.collectives.group import GroupCut
from manyhands.contract import Joined, Learner, State, StepReport
from manyhands.hosts.view import Seat, View
from manyhands.testing.thread_group import ThreadWorld
from manyhands.threads import start_thread
from manyhands.worker.received_states import ReceivedStates

NAMES = ("a", "b", "c", "d")


class Counter(Learner):
    def __init__(self, count: int) -> None:
        self.count = torch.tensor(count)

    def on_view(self, view: Any) -> Joined:
        raise NotImplementedError

    def step(self, share: Any) -> StepReport:
        raise NotImplementedError

    def snapshot(self) -> State:
        return {"count": self.count} if self.count else {}

    def restore(self, states: Sequence[State]) -> None:
        assert states, "there is nothing to take over"
        self.count += sum(state["count"] for state in states)


class Four:
    """Four workers, each with a counter, in a thread of its own."""

    def __init__(self) -> None:
        self.learners = {name: Counter(10**number) for number, name in enumerate(NAMES)}
        self.received = {name: ReceivedStates(each) for name, each in self.learners.items()}

    @property
    def counts(self) -> list[int]:
        return [int(each.count) for each in self.learners.values()]

    def hand_over(self, **receivers: str) -> None:
        groups = dict(zip(NAMES, ThreadWorld(len(NAMES)).groups(), strict=True))
        together(
            lambda name: self.received[name].exchange(receivers, view(*NAMES), groups[name]), NAMES
        )

    def enter(self, *names: str) -> None:
        for name in names:
            self.received[name].begin_view(view(*names))
            self.received[name].restore()


def view(*names: str) -> View:
    return View(1, tuple(Seat(name, "here") for name in names))


def together(act: Callable[[str], None], names: Sequence[str]) -> None:
    errors: list[BaseException] = []
    threads = [start_thread(act, name, name=name, on_error=errors.append) for name in names]
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


@pytest.fixture
def workers() -> Four:
    return Four()


def test_a_state_moves_when_the_view_without_its_worker_begins(workers: Four) -> None:
    workers.hand_over(d="b", c="a")
    assert workers.counts == [1, 10, 100, 1000], "so far they are kept apart"
    workers.enter("a", "b")
    assert workers.counts[:2] == [101, 1010]
    workers.enter("a", "b")
    assert workers.counts[:2] == [101, 1010], "once"


def test_one_worker_may_get_several_and_one_that_leaves_none(workers: Four) -> None:
    workers.hand_over(d="a", c="a", b="a")
    workers.enter("a")
    assert workers.counts[0] == 1111


def test_a_worker_that_is_in_the_next_view_keeps_its_state(workers: Four) -> None:
    workers.hand_over(d="b", c="a")
    workers.enter("a", "b", "d")
    assert workers.counts[:2] == [101, 10]
    workers.enter("a", "b")
    assert workers.counts[:2] == [101, 10], "it died later, and its state with it"


def test_what_was_handed_over_before_training_went_on_is_dropped(workers: Four) -> None:
    workers.hand_over(d="b")
    workers.learners["d"].count += 5
    workers.hand_over(d="a")
    workers.enter("a", "b", "c")
    assert workers.counts[:3] == [1006, 10, 100]
    workers.hand_over(d="b")
    workers.received["b"].drop()
    workers.enter("a", "b", "c")
    assert workers.counts[:3] == [1006, 10, 100]


def test_a_worker_without_state_hands_over_nothing(workers: Four) -> None:
    workers.learners["d"].count.zero_()
    workers.hand_over(d="b")
    workers.enter("a", "b", "c")
    assert workers.counts[:3] == [1, 10, 100]


def test_a_break_leaves_nothing_half_received(workers: Four) -> None:
    world = ThreadWorld(len(NAMES))
    groups = dict(zip(NAMES, world.groups(), strict=True))

    def act(name: str) -> None:
        if name == "d":
            world.cut()  # as for a dead worker
            return
        with pytest.raises(GroupCut):
            workers.received[name].exchange({"d": "b"}, view(*NAMES), groups[name])

    together(act, ["b", "d"])
    workers.enter("a", "b", "c")
    assert workers.counts[:3] == [1, 10, 100]
