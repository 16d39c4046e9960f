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
    run_stats = StalenessStats()
    for value in values:
        run_stats.add(value)
    return run_stats


@given(COUNTS)
def test_a_tally_tells_the_truth(values: list[int]) -> None:
    run_stats = tally_of(values)
    assert run_stats.count == len(values)
    assert run_stats.max == max(values, default=0)
    assert run_stats.mean == pytest.approx(sum(values) / len(values) if values else 0)
    for label, count in run_stats.histogram().items():
        low, _, high = label.partition("-")
        assert count == sum(int(low) <= value <= int(high or low) for value in values)
    assert sum(run_stats.histogram().values()) == len(values)
    if values:
        exact = sorted(values)[math.ceil(len(values) * 95 / 100) - 1]
        assert exact <= run_stats.p95 <= max(1, 2 * exact)


def test_bins_are_powers_of_two() -> None:
    run_stats = tally_of([0, 1, 2, 3, 4, 8])
    assert run_stats.histogram() == {"0": 1, "1": 1, "2-3": 2, "4-7": 1, "8-15": 1}


@given(COUNTS, COUNTS)
def test_two_tallies_merge_into_one_of_all(left: list[int], right: list[int]) -> None:
    run_stats, other = tally_of(left), tally_of(right)
    # One of them has come a long way, as part of an event.
    run_stats.merge(StalenessStats.from_dict(json.loads(json.dumps(other.to_dict()))))
    assert run_stats.to_dict() == tally_of(left + right).to_dict()
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
