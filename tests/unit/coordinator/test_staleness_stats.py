"""Staleness: a tally that adds up."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from manyhands.coordinator.staleness_stats import StalenessStats

COUNTS = st.lists(st.integers(0, 300), max_size=80)


def tally_of(values: list[int]) -> StalenessStats:
    tally = StalenessStats()
    for value in values:
        tally.add(value)
    return tally


@given(COUNTS)
def test_a_tally_tells_the_truth(values: list[int]) -> None:
    tally = tally_of(values)
    assert tally.count == len(values)
    assert tally.max == max(values, default=0)
    assert tally.mean == pytest.approx(sum(values) / len(values) if values else 0)
    for label, count in tally.histogram().items():
        low, _, high = label.partition("-")
        assert count == sum(int(low) <= value <= int(high or low) for value in values)
    assert sum(tally.histogram().values()) == len(values)
    if values:
        exact = sorted(values)[math.ceil(len(values) * 95 / 100) - 1]
        assert exact <= tally.p95 <= max(1, 2 * exact)


def test_bins_are_powers_of_two() -> None:
    tally = tally_of([0, 1, 2, 3, 4, 8])
    assert tally.histogram() == {"0": 1, "1": 1, "2-3": 2, "4-7": 1, "8-15": 1}


@given(COUNTS, COUNTS)
def test_two_tallies_merge_into_one_of_all(left: list[int], right: list[int]) -> None:
    tally, other = tally_of(left), tally_of(right)
    # One of them has come a long way, as part of an event.
    tally.merge(StalenessStats.from_dict(json.loads(json.dumps(other.to_dict()))))
    assert tally.to_dict() == tally_of(left + right).to_dict()
    assert other.to_dict() == tally_of(right).to_dict()


def test_an_empty_tally_is_all_zero() -> None:
    assert StalenessStats().to_dict() == {
        "count": 0,
        "total": 0,
        "mean": 0.0,
        "max": 0,
        "p95": 0,
        "histogram": {},
    }
