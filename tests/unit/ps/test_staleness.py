"""Staleness: the rules for the learning rate."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from manyhands.errors import SpecError
from manyhands.ps.staleness import RULES, lr_scale


def test_rules() -> None:
    assert [lr_scale("none", s) for s in (0, 3)] == [1.0, 1.0]
    assert [lr_scale("inverse", s) for s in (0, 1, 3)] == [1.0, 0.5, 0.25]
    assert [lr_scale("sqrt", s) for s in (0, 3)] == [1.0, 0.5]


@given(staleness=st.floats(0, 1e9))
def test_a_staler_push_never_counts_more(staleness: float) -> None:
    for rule in RULES:
        assert 0 < lr_scale(rule, staleness + 1) <= lr_scale(rule, staleness) <= 1
    assert lr_scale("inverse", staleness) <= lr_scale("sqrt", staleness)


def test_a_misspelt_rule_is_refused_with_the_right_one() -> None:
    with pytest.raises(SpecError, match=r"'invers'.*did you mean 'inverse'\?.*none, inverse, sqrt"):
        lr_scale("invers", 1)  # type: ignore[arg-type]
    with pytest.raises(AssertionError):
        lr_scale("none", -1)
