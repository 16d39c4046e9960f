"""Leases: every position is used once, whatever is taken, committed or given back."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    rule,
)

from manyhands.coordinator.leases import Leases
from manyhands.ranges import Range, Ranges, shares, split


def positions(ranges: list[Range] | tuple[Range, ...]) -> list[int]:
    return [i for start, stop in ranges for i in range(start, stop)]


def assert_tidy(ranges: Ranges) -> None:
    """Sorted, disjoint, not touching, none empty."""
    pieces = ranges.to_list()
    assert all(start < stop for start, stop in pieces)
    assert all(left[1] < right[0] for left, right in pairwise(pieces))


class AnyOrder(RuleBasedStateMachine):
    """Holders take, commit, or die, in any order; a plain list counts along."""

    held = Bundle("held")

    @initialize(num_samples=st.integers(0, 60))
    def begin(self, num_samples: int) -> None:
        self.num_samples = num_samples
        self.leases = Leases(num_samples)
        self.open: list[list[Range]] = []
        self.used: list[int] = []

    @rule(target=held, count=st.integers(0, 25))
    def take(self, count: int) -> list[Range]:
        free = len(self.leases.free)
        taken = self.leases.take(count)
        assert len(positions(taken)) == min(count, free)
        self.open.append(taken)
        return taken

    @rule(taken=consumes(held))
    def commit(self, taken: list[Range]) -> None:
        self.open.remove(taken)
        self.leases.commit(taken)
        self.used += positions(taken)

    @rule(taken=consumes(held))
    def die(self, taken: list[Range]) -> None:
        self.open.remove(taken)
        self.leases.give_back(taken)

    @rule(taken=consumes(held), part=st.integers(0, 25))
    def die_half_way(self, taken: list[Range], part: int) -> None:
        """Some of what it held was in the weights already."""
        self.open.remove(taken)
        rest = Ranges(taken)
        done = rest.take(part)
        self.leases.commit(done)
        self.leases.give_back(rest.to_list())
        self.used += positions(done)

    @rule()
    def start_again(self) -> None:
        """A resumed run knows only what was committed."""
        self.leases = Leases(self.num_samples, self.leases.committed.to_list())
        for taken in self.open:
            again = self.leases.take(len(positions(taken)))
            taken[:] = again

    @invariant()
    def nothing_is_lost_and_nothing_doubled(self) -> None:
        parts = (self.leases.free, self.leases.leased, self.leases.committed)
        for part in parts:
            assert_tidy(part)
        everything = sorted(i for part in parts for i in positions(part.to_list()))
        assert everything == list(range(self.num_samples))
        assert sorted(self.used) == positions(self.leases.committed.to_list())
        assert self.leases.exhausted == (len(self.leases.free) == 0)

    def teardown(self) -> None:
        if not hasattr(self, "leases"):
            return
        for taken in self.open:
            self.leases.give_back(taken)
        while taken := self.leases.take(7):
            self.leases.commit(taken)
            self.used += positions(taken)
        assert sorted(self.used) == list(range(self.num_samples))


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(stateful_step_count=40)


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 40), st.integers(0, 12)), max_size=30))
def test_ranges_are_a_set(changes: list[tuple[bool, int, int]]) -> None:
    ranges, model = Ranges(), set[int]()
    for add, start, length in changes:
        piece = (start, start + length)
        members = set(range(*piece))
        if add and not members & model:
            ranges.add(piece)
            model |= members
        elif not add and members <= model:
            ranges.remove(piece)
            model -= members
        assert_tidy(ranges)
        assert positions(ranges.to_list()) == sorted(model)
        assert len(ranges) == len(model)


@pytest.mark.parametrize("piece", [(0, 1), (4, 6), (9, 10), (0, 10), (2, 3)])
def test_a_range_cannot_be_added_twice(piece: Range) -> None:
    ranges = Ranges([(0, 3), (5, 10)])
    with pytest.raises(AssertionError, match="overlaps"):
        ranges.add(piece)
    assert ranges == Ranges([(0, 3), (5, 10)])


def test_only_leased_ranges_can_be_committed_or_given_back() -> None:
    leases = Leases(10)
    leases.take(4)
    with pytest.raises(AssertionError):
        leases.commit([(3, 5)])
    with pytest.raises(AssertionError):
        leases.give_back([(4, 5)])


@given(total=st.integers(0, 5_000), weights=st.lists(st.integers(0, 64), min_size=1, max_size=9))
def test_shares_add_up_and_follow_the_weights(total: int, weights: list[int]) -> None:
    if not any(weights):
        weights = [1] * len(weights)
    counts = shares(total, [weight / 8 for weight in weights])
    assert sum(counts) == total
    exact = [total * weight / sum(weights) for weight in weights]
    for count, weight, value in zip(counts, weights, exact, strict=True):
        assert abs(count - value) < 1
        assert weight or count == 0
    for i, mine in enumerate(weights):
        for j, other in enumerate(weights):
            if mine > other:
                assert counts[i] >= counts[j]
            elif mine == other:
                assert abs(counts[i] - counts[j]) <= 1
                # Of equals, the lower rank is never the one with less.
                assert i < j or counts[i] <= counts[j]


@given(
    pieces=st.lists(st.tuples(st.integers(1, 5), st.integers(1, 9)), max_size=6),
    weights=st.lists(st.integers(1, 9), min_size=1, max_size=6),
)
def test_split_is_a_partition_in_order(pieces: list[tuple[int, int]], weights: list[int]) -> None:
    ranges: list[Range] = []
    at = 0
    for gap, length in pieces:
        ranges.append((at + gap, at + gap + length))
        at += gap + length
    counts = shares(sum(stop - start for start, stop in ranges), weights)
    parts = split(ranges, counts)
    assert [len(positions(part)) for part in parts] == counts
    assert [i for part in parts for i in positions(part)] == positions(ranges)


def test_split_refuses_more_than_there_is() -> None:
    with pytest.raises(AssertionError, match="6 requested of 5"):
        split([(0, 5)], [3, 3])
