"""Statistics of staleness."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from manyhands.coordinator.staleness_stats import StalenessStats

COUNTS = st.lists(st.integers(0, 300), max_size=80)


def stats_of(values: list[int]) -> StalenessStats:
    stats = StalenessStats()
    for value in values:
        stats.add(value)
    return stats


@given(COUNTS)
def test_counts_mean_and_percentile(values: list[int]) -> None:
    stats = stats_of(values)
    assert stats.count == len(values)
    assert stats.max == max(values, default=0)
    assert stats.mean == pytest.approx(sum(values) / len(values) if values else 0)
    for label, count in stats.histogram().items():
        low, _, high = label.partition("-")
        assert count == sum(int(low) <= value <= int(high or low) for value in values)
    assert sum(stats.histogram().values()) == len(values)
    if values:
        exact = sorted(values)[math.ceil(len(values) * 95 / 100) - 1]
        assert exact <= stats.p95 <= max(1, 2 * exact)


def test_bins_are_powers_of_two() -> None:
    stats = stats_of([0, 1, 2, 3, 4, 8])
    assert stats.histogram() == {"0": 1, "1": 1, "2-3": 2, "4-7": 1, "8-15": 1}


def test_empty_stats_are_all_zero() -> None:
    assert StalenessStats().to_dict() == {
        "count": 0,
        "total": 0,
        "mean": 0.0,
        "max": 0,
        "p95": 0,
        "histogram": {},
    }
