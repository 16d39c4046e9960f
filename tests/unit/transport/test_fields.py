"""Messages as dataclasses: both directions, and what a wrong field is answered with."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Annotated, Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from manyhands.errors import ProtocolError
from manyhands.transport.fields import (
    MAX_INT,
    Count,
    Finite,
    MessageSet,
    Positive,
    Weight,
    at_most,
    encode,
    max_length,
    read,
    write,
)


@dataclass(frozen=True)
class Row:
    step: Count
    share: Fraction
    role: Literal["own", "replica"] = "own"


@dataclass(frozen=True)
class Everything:
    count: Count
    text: Annotated[str, max_length(20)]
    loss: Finite
    rows: list[Row] = field(default_factory=list)
    pair: tuple[int, Row] | None = None
    by_name: Mapping[str, Row] = field(default_factory=dict)
    names: Sequence[str] = ()
    anything: Any = None
    either: Row | int = 0
    few: Annotated[int, at_most(16)] = 0


@dataclass(frozen=True)
class Span:
    first: Count
    last: Count

    def __post_init__(self) -> None:
        if self.last < self.first:
            raise ValueError(f"it ends at {self.last}, before {self.first}")


@dataclass(frozen=True)
class Empty:
    pass


ROWS = st.builds(
    Row,
    step=st.integers(0, MAX_INT),
    share=st.fractions(max_denominator=1000, min_value=-1000, max_value=1000),
    role=st.sampled_from(["own", "replica"]),
)


@given(
    st.builds(
        Everything,
        count=st.integers(0, MAX_INT),
        text=st.text(max_size=20),
        loss=st.floats(allow_nan=False, allow_infinity=False),
        rows=st.lists(ROWS),
        pair=st.none() | st.tuples(st.integers(-5, 5), ROWS),
        by_name=st.dictionaries(st.text(), ROWS),
        names=st.lists(st.text()).map(tuple),
        anything=st.none() | st.text() | st.lists(st.integers()),
        either=st.integers(-9, 9) | ROWS,
        few=st.integers(-9, 16),
    )
)
def test_written_messages_read_back_equal(message: Everything) -> None:
    assert read(Everything, json.loads(json.dumps(write(message)))) == message


def test_all_fields_are_written() -> None:
    assert write(Row(3, Fraction(1, 4))) == {"step": 3, "share": [1, 4], "role": "own"}
    assert write(Empty()) == {}


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ({"count": "x"}, "count is 'x', not a whole number"),
        ({"count": True}, "count is True, not a whole number"),
        ({"count": -1}, "count is negative: -1"),
        ({"count": 1 << 70}, "not a whole number"),
        ({"text": "x" * 21}, "text has a length over the limit of 20"),
        ({"loss": float("nan")}, "loss is not finite: nan"),
        ({"loss": None}, "loss is None, not a number"),
        ({"rows": {}}, "rows is {}, not a list"),
        ({"rows": [{"step": 1, "share": [1, 2]}, {"step": 1}]}, r"rows\[1\].share is missing"),
        ({"rows": [{"step": 1, "share": [1, 0]}]}, r"rows\[0\].share is \[1, 0\], not a fraction"),
        ({"by_name": {"a": {"step": -1, "share": [1, 2]}}}, r"by_name\['a'\].step is negative: -1"),
        ({"by_name": []}, "by_name is .*, not an object"),
        ({"pair": [1, 2, 3]}, "pair is .*, not a list of 2"),
        ({"either": "x"}, "either is 'x', not an object"),
        ({"few": 17}, "few is more than 16: 17"),
    ],
)
def test_a_wrong_field_is_named(changed: dict[str, Any], problem: str) -> None:
    fields = {"count": 1, "text": "", "loss": 0.5}
    assert read(Everything, fields).count == 1
    with pytest.raises(ProtocolError, match=problem):
        read(Everything, {**fields, **changed})


def test_fields_are_checked_against_each_other() -> None:
    assert read(Span, {"first": 1, "last": 2}) == Span(1, 2)
    with pytest.raises(ProtocolError, match="it ends at 1, before 2"):
        read(Span, {"first": 2, "last": 1})


def test_unknown_fields_are_ignored_or_refused() -> None:
    head = {"kind": "Span", "first": 1, "last": 2, "more": 3}
    assert MessageSet(Span).read(head) == Span(1, 2)
    with pytest.raises(ProtocolError, match="'Span' has unknown fields: more"):
        MessageSet(Span, strict=True).read(head)


def test_messages_by_kind() -> None:
    messages = MessageSet(Span, Empty, strict=True)
    for message in (Span(1, 2), Empty()):
        assert messages.read(json.loads(encode(message))) == message
    assert encode(Empty()) == '{"kind":"Empty"}'
    with pytest.raises(ProtocolError, match="'Span': first is missing"):
        messages.read({"kind": "Span"})
    for head in ({"kind": "other"}, {"kind": ["Span"]}, {}):
        with pytest.raises(ProtocolError, match=r"its kind is .*, not one of Span, Empty"):
            messages.read(head)


def test_values_are_replaced_by_what_a_check_returns() -> None:
    @dataclass(frozen=True)
    class Times:
        weight: Weight
        num: Positive

    assert read(Times, {"weight": 1, "num": 2}) == Times(1.0, 2)
    with pytest.raises(ProtocolError, match="num is less than 1: 0"):
        read(Times, {"weight": 1, "num": 0})
