"""The queue of parts: fast workers take more, no worker waits, no part is assigned twice."""

from __future__ import annotations

import heapq
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from manyhands.coordinator.plan import StepPlan
from manyhands.coordinator.work_queue import AHEAD_S, MAX_AHEAD, QueuedPart, WorkQueue, cut


def parts_of(steps: int, number: int) -> list[QueuedPart]:
    plans = [StepPlan(s, 0, ((s * 100, s * 100 + number),)) for s in range(1, steps + 1)]
    return [part for plan in plans for part in cut(plan, number)]


@given(samples=st.integers(1, 30), number=st.integers(1, 12))
def test_a_step_is_cut_into_equal_parts_without_empty_ones(samples: int, number: int) -> None:
    parts = cut(StepPlan(3, 0, ((5, 5 + samples), (60, 63))), number)
    assert len(parts) == min(number, samples + 3)
    sizes = [sum(high - low for low, high in part.ranges) for part in parts]
    assert min(sizes) >= 1
    assert max(sizes) - min(sizes) <= 1
    used = [i for part in parts for low, high in part.ranges for i in range(low, high)]
    assert used == [*range(5, 5 + samples), 60, 61, 62]
    assert len({part.key for part in parts}) == len(parts)


def play(queue: WorkQueue, seconds: dict[str, float], until_s: float) -> dict[str, int]:
    """Workers that take so many seconds a part, on a clock of their own; how many each has done."""
    done = dict.fromkeys(seconds, 0)
    backlog: dict[str, list[QueuedPart]] = {name: [] for name in seconds}
    clock: list[tuple[float, str]] = []
    now = 0.0
    while now < until_s:
        for name, part in queue.deal():
            if not backlog[name]:
                heapq.heappush(clock, (now + seconds[name], name))
            backlog[name].append(part)
        now, name = heapq.heappop(clock)
        queue.done(name, backlog[name].pop(0).key, seconds[name])
        done[name] += 1
        if backlog[name]:
            heapq.heappush(clock, (now + seconds[name], name))
        assert all(backlog[n] for n in seconds if n != name), "somebody waits while there is work"
    return done


def test_parts_follow_speed() -> None:
    queue = WorkQueue()
    queue.set_workers(["slow", "fast"])
    queue.extend(parts_of(400, 2))
    done = play(queue, {"slow": 0.09, "fast": 0.03}, until_s=10)
    assert done["fast"] / done["slow"] == pytest.approx(3, rel=0.05)


@pytest.mark.parametrize(
    ("seconds", "ahead"),
    [(0.5, 1), (AHEAD_S, 1), (0.39, 2), (0.1, 4), (0.001, MAX_AHEAD), (0, MAX_AHEAD)],
)
def test_work_ahead_follows_the_speed_of_each_worker(seconds: float, ahead: int) -> None:
    queue = WorkQueue()
    queue.set_workers(["a"])
    assert queue.room() == 1, "one, before anything is known"
    queue.extend(parts_of(600, 1))
    ((_, first),) = queue.deal()
    queue.done("a", first.key, seconds)
    assert queue.room() == ahead
    assert len(queue.deal()) == ahead
    assert queue.room() == 0


def test_a_dropped_part_is_next_for_any_worker() -> None:
    queue = WorkQueue()
    queue.set_workers(["a", "b"])
    queue.extend(parts_of(3, 1))
    first, second = queue.deal()
    assert [first[1].key, second[1].key] == [(1, 0), (2, 0)]
    assert queue.done("a", (1, 0), 1.0, again=True)
    assert not queue.done("a", (1, 0), 1.0), "it is not in its hands any more"
    assert not queue.done("a", (2, 0), 1.0), "that one is b's"
    assert queue.done("b", (2, 0), 1.0)
    assert sorted(part.key for _, part in queue.deal()) == [(1, 0), (3, 0)]


def test_assigned_parts_come_back_to_the_front_in_order() -> None:
    queue = WorkQueue()
    queue.set_workers(["a", "b"])
    queue.extend(parts_of(2, 3))
    queue.deal()
    assert queue.num_assigned == 2
    assert [part.key for part in queue.take_back(lambda _: True)] == [(1, 0), (1, 1)]
    assert queue.num_assigned == 0
    assert [p.key for p in queue.waiting] == [(1, 0), (1, 1), (1, 2), (2, 0), (2, 1), (2, 2)]
    assert queue.take_back(lambda key: key not in [(1, 1), (2, 2)]) == []
    queue.set_workers(["b"])
    assert [part.key for _, part in queue.deal()] == [(1, 0)]


@given(seed=st.integers(0, 2**32), workers=st.integers(1, 5))
def test_each_part_is_always_in_one_place(seed: int, workers: int) -> None:
    chance = random.Random(seed)
    queue = WorkQueue()
    names = [f"w{i}" for i in range(workers)]
    queue.set_workers(names)
    everything = parts_of(6, 4)
    queue.extend(everything)
    hands: dict[str, list[QueuedPart]] = {name: [] for name in names}
    finished = []
    while len(finished) < len(everything):
        for name, part in queue.deal():
            hands[name].append(part)
        if chance.random() < 0.1:
            assert len(queue.take_back(lambda _: True)) == sum(map(len, hands.values()))
            names = [f"w{chance.randrange(9)}"]
            queue.set_workers(names)
            hands = {name: [] for name in names}
            continue
        name = chance.choice([n for n in hands if hands[n]])
        part = hands[name].pop(chance.randrange(len(hands[name])))
        again = chance.random() < 0.2
        assert queue.done(name, part.key, chance.random(), again=again)
        if not again:
            finished.append(part.key)
        places = (
            [p.key for p in queue.waiting] + [p.key for h in hands.values() for p in h] + finished
        )
        assert sorted(places) == sorted(part.key for part in everything)


def test_the_last_parts_go_to_the_first_free_worker() -> None:
    queue = WorkQueue()
    queue.set_workers(["slow", "fast"])
    queue.extend(parts_of(1, 2))
    for name, part in queue.deal():
        queue.done(name, part.key, {"slow": 0.2, "fast": 0.05}[name])
    queue.extend(parts_of(1, 5))
    names = [name for name, _ in queue.deal()]
    assert (names.count("slow"), names.count("fast")) == (1, 4)
