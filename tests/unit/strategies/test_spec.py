"""The language of specs: it survives a round trip, and errors point at their position."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from manyhands.errors import SpecError
from manyhands.strategies.spec import Spec, SpecPart, Value, parse_spec

word = st.from_regex(r"[A-Za-z][A-Za-z0-9_-]{0,6}", fullmatch=True)
names = st.lists(word, min_size=1, max_size=3).map(":".join)
keys = st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,6}", fullmatch=True)
spoken = ("true", "false", "none", "nan", "inf", "infinity")
values: st.SearchStrategy[Value] = st.one_of(
    st.integers(),
    st.floats(allow_nan=False),
    st.booleans(),
    st.none(),
    word.filter(lambda text: text.lower() not in spoken),
)
parts = st.builds(SpecPart, names, st.dictionaries(keys, values, max_size=4))
specs = st.builds(Spec, parts, st.lists(parts, max_size=3).map(tuple))


@settings(max_examples=300)
@given(specs)
def test_a_spec_survives_str_and_parse(spec: Spec) -> None:
    again = parse_spec(str(spec))
    assert again == spec
    for ours, theirs in zip(
        (spec.strategy, *spec.codecs), (again.strategy, *again.codecs), strict=True
    ):
        # True is 1 to Python, and not to us.
        kinds = [[type(value) for value in part.options.values()] for part in (ours, theirs)]
        assert kinds[0] == kinds[1]
    assert str(again) == str(spec)


@given(specs, st.lists(st.sampled_from(["", " ", "  ", "\t"]), min_size=1, max_size=9))
def test_spaces_between_symbols_do_not_matter(spec: Spec, spaces: list[str]) -> None:
    loose = ""
    for at, symbol in enumerate(str(spec)):
        space = spaces[at % len(spaces)]
        loose += f"{space}{symbol}{space}" if symbol in "(),=" else symbol
    assert parse_spec(f" {loose} ") == spec


garbage = st.one_of(
    st.text(max_size=30),
    st.text(alphabet="ab1:+-_,=()e. \t\n", max_size=30),
    st.builds(lambda s, i, c: str(s)[:i] + c + str(s)[i:], specs, st.integers(0, 20), st.text()),
)


@settings(max_examples=500)
@given(garbage)
def test_garbage_is_a_spec_error_or_a_spec(text: str) -> None:
    try:
        spec = parse_spec(text)
    except SpecError:
        return
    # What was understood can be written down and is understood alike.
    assert str(parse_spec(str(spec))) == str(spec)


@pytest.mark.parametrize(
    ("text", "column", "says"),
    [
        ("", 0, "a name such as allreduce"),
        ("   ", 3, "a name"),
        ("1ps", 0, "a name"),
        ("ps(", 3, "an option such as"),
        ("ps(a", 4, "'=' after a"),
        ("ps(a 1)", 5, "'=' after a"),
        ("ps(a=", 5, "a value for a"),
        ("ps(a=)", 5, "a value for a"),
        ("ps(a=1", 6, "',' or '\\)'"),
        ("ps(a=1 b=2)", 7, "',' or '\\)'"),
        ("ps(a=1,)", 7, "an option"),
        ("ps(a=1, a=2)", 8, "a was given twice"),
        ("ps(=1)", 3, "an option"),
        ("ps)", 2, "the end"),
        ("ps async", 3, "the end"),
        ("ps:", 2, "the end"),
        ("ps +", 4, "a name"),
        ("ps + int8 (x=1))", 15, "the end"),
    ],
)
def test_an_error_points_at_its_position(text: str, column: int, says: str) -> None:
    with pytest.raises(SpecError, match=says) as caught:
        parse_spec(text)
    _, shown, pointer, advice = str(caught.value).splitlines()
    assert shown == f"    {text}"
    assert pointer == " " * (4 + column) + "^"
    assert "allreduce(bucket_mb=10)" in advice


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("10", 10),
        ("-3", -3),
        ("0.5", 0.5),
        ("1e-3", 1e-3),
        ("1e+3", 1000.0),
        ("True", True),
        ("FALSE", False),
        ("none", None),
        ("exponential", "exponential"),
        ("10.0.0.1", "10.0.0.1"),
        ("inf", math.inf),
    ],
)
def test_values(text: str, value: Value) -> None:
    spec = parse_spec(f"ps(x={text})")
    assert spec.strategy.options == {"x": value}
    assert type(spec.strategy.options["x"]) is type(value)


def test_a_strategy_with_codecs() -> None:
    spec = parse_spec("ps:async(servers=2) + topk(ratio=0.01)+ int8")
    assert spec.strategy == SpecPart("ps:async", {"servers": 2})
    assert spec.codecs == (SpecPart("topk", {"ratio": 0.01}), SpecPart("int8"))
    assert str(spec) == "ps:async(servers=2)+topk(ratio=0.01)+int8"
