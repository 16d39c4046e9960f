"""Workers that leave hand their state over first: once, and to workers that stay."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from manyhands.control.messages import HandOverOrder
from manyhands.coordinator.handover import Handover, receivers

WORKERS = ("a", "b", "c")


class Sent(list[tuple[str, HandOverOrder]]):
    def __call__(self, name: str, order: HandOverOrder) -> None:
        self.append((name, order))

    @property
    def numbers(self) -> list[int]:
        return [order.number for _, order in self]


def test_all_workers_carry_out_the_order_before_one_leaves() -> None:
    sent = Sent()
    handover = Handover(sent, needed=True)
    assert not handover.done(["c"], WORKERS)
    assert [name for name, _ in sent] == list(WORKERS)
    (order,) = {(o.number, *o.receivers.items()) for _, o in sent}
    assert order in ((1, ("c", "a")), (1, ("c", "b")))
    for name in WORKERS:
        assert not handover.done(["c"], WORKERS)
        handover.note(name, 1)
    assert handover.done(["c"], WORKERS)
    assert len(sent) == 3, "ordered once"


def test_nothing_is_ordered_if_nobody_holds_state_or_leaves() -> None:
    sent = Sent()
    assert Handover(sent, needed=False).done(["c"], WORKERS)
    assert Handover(sent, needed=True).done([], WORKERS)
    assert not sent


def test_after_training_went_on_it_is_ordered_again() -> None:
    sent = Sent()
    handover = Handover(sent, needed=True)
    handover.done(["c"], WORKERS)
    for name in WORKERS:
        handover.note(name, 1)
    handover.cancel()
    assert not handover.done(["c"], WORKERS)
    assert sent.numbers == [1, 1, 1, 2, 2, 2]
    for name in WORKERS:
        handover.note(name, 1)  # of the order before
    assert not handover.done(["c"], WORKERS)
    for name in WORKERS:
        handover.note(name, 2)
    assert handover.done(["c"], WORKERS)


def test_others_that_leave_instead_are_ordered_anew() -> None:
    sent = Sent()
    handover = Handover(sent, needed=True)
    handover.done(["c"], WORKERS)
    for name in WORKERS:
        handover.note(name, 1)
    assert not handover.done(["b"], WORKERS)
    assert sent[-1][1].receivers.keys() == {"b"}


@given(num_workers=st.integers(2, 9), first=st.integers(0, 99), data=st.data())
def test_each_state_goes_to_one_worker_that_stays_and_none_gets_many(
    num_workers: int, first: int, data: st.DataObject
) -> None:
    workers = [f"worker-{number}" for number in range(num_workers)]
    leaving = data.draw(st.lists(st.sampled_from(workers), unique=True, max_size=num_workers - 1))
    found = receivers(leaving, workers, first=first)
    assert found.keys() == set(leaving)
    stay = set(workers) - set(leaving)
    assert set(found.values()) <= stay
    most = max(Counter(found.values()).values(), default=0)
    assert most <= -(-len(leaving) // len(stay))
