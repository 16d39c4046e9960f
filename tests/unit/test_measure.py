"""Rules by which values of workers combine, as laws."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from manyhands.errors import JobError
from manyhands.measure import RULES, STEP_MEASURES, Measure, Pair, Rule, add_to, combine, value_of

# Sums of small whole numbers are exact, so that an order of additions can't show.
VALUES = st.tuples(st.integers(-1000, 1000).map(float), st.integers(0, 50).map(float))
PARTS = st.lists(st.lists(VALUES, max_size=5), min_size=1, max_size=6)


def pairs_of(part: Sequence[tuple[float, float]], measure: Measure) -> dict[str, Pair]:
    """What one worker sends: its values, combined over micro-batches."""
    sums: dict[str, Pair] = {}
    for value, weight in part:
        add_to(sums, measure.name, measure.pair(value, weight), measure.rule)
    return sums


def of(rule: Rule) -> Measure:
    return Measure("x", rule=rule)


@pytest.mark.parametrize("rule", RULES)
@given(parts=PARTS)
def test_how_values_are_cut_into_workers_does_not_matter(
    rule: Rule, parts: list[list[tuple[float, float]]]
) -> None:
    measure = of(rule)
    by_workers = combine([pairs_of(part, measure) for part in parts], {"x": measure})
    flat = [each for part in parts for each in part]
    alone = combine([pairs_of(flat, measure)], {"x": measure})
    assert str(by_workers) == str(alone)  # NaN is not equal to itself
    if not flat:
        assert by_workers == {}


@given(parts=PARTS, chance=st.randoms(use_true_random=False))
def test_the_order_of_workers_matters_to_the_last_only(
    parts: list[list[tuple[float, float]]], chance: random.Random
) -> None:
    shuffled = chance.sample(parts, len(parts))
    for rule in RULES:
        measure = of(rule)
        one, other = (
            combine([pairs_of(part, measure) for part in order], {"x": measure})
            for order in (parts, shuffled)
        )
        if rule != "last":
            assert str(one) == str(other)
    last = of("last")
    found = combine([pairs_of(part, last) for part in parts], {"x": last})
    flat = [value for part in parts for value, _ in part]
    assert found == ({"x": flat[-1]} if flat else {})


@given(values=st.lists(VALUES, min_size=1))
def test_each_rule_is_what_it_says(values: list[tuple[float, float]]) -> None:
    numbers = [value for value, _ in values]
    weight = sum(weight for _, weight in values)
    expected = {
        "sum": sum(numbers),
        "max": max(numbers),
        "last": numbers[-1],
        "mean": sum(v * w for v, w in values) / weight if weight else math.nan,
    }
    for rule in RULES:
        (pair,) = pairs_of(values, of(rule)).values()
        assert value_of(pair, rule) == pytest.approx(expected[rule], nan_ok=True)


@given(numbers=st.lists(st.floats(allow_nan=False), min_size=1), at=st.integers(0))
def test_a_maximum_does_not_hide_nan(numbers: list[float], at: int) -> None:
    numbers.insert(at % (len(numbers) + 1), math.nan)
    (pair,) = pairs_of([(number, 1.0) for number in numbers], of("max")).values()
    assert math.isnan(value_of(pair, "max"))


def test_what_is_not_declared_is_a_mean() -> None:
    parts = [{"x": (6.0, 3.0), "y": (1.0, 1.0)}, {"x": (2.0, 1.0)}]
    assert combine(parts, {}) == {"x": 2.0, "y": 1.0}
    assert combine(parts, {"x": of("sum")}) == {"x": 8.0, "y": 1.0}


def test_a_wrong_rule_says_which_there_are() -> None:
    with pytest.raises(JobError) as failed:
        Measure("tokens", rule="average")  # type: ignore[arg-type]
    assert str(failed.value) == (
        "The rule of measure 'tokens' must be 'sum', 'mean', 'max' or 'last', and is 'average', such as  "
        'mh.Measure("tokens", rule="sum").'
    )


def test_a_description_has_unit_and_rule() -> None:
    assert Measure("tokens", "tokens", "sum").describe() == "sum, in tokens"
    assert Measure("norm", help="of the gradient").describe() == "mean: of the gradient"
    assert all(name == measure.name for name, measure in STEP_MEASURES.items())
