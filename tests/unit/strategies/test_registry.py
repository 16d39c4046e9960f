"""From a spec to a config: every mistake is a SpecError that shows what would work."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from manyhands.codecs.codec import PLAIN
from manyhands.codecs.int8 import Int8
from manyhands.errors import SpecError
from manyhands.strategies.allreduce import AllReduce
from manyhands.strategies.registry import STRATEGIES, make_strategy, spec_of
from manyhands.strategies.single import Single


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("alreduce", "There is no strategy 'alreduce'; did you mean 'allreduce'"),
        ("singel", "did you mean 'single'"),
        ("AllReduce", "did you mean 'allreduce'"),
        ("zzzz", r"There is no strategy 'zzzz'\. There are: single, allreduce"),
        ("allreduce(bucket=3)", "no option 'bucket'; did you mean 'bucket_mb'"),
        ("allreduce(bucketmb=3)", "did you mean 'bucket_mb'"),
        ("allreduce(table=shared)", "did you mean 'tables'"),
        ("allreduce(drop=1.5)", r"the option 'drop' was removed\. Use  --strategy ps:backup"),
        ("allreduce(q=3)", r"no option 'q'\. Its options: bucket_mb, tables"),
        ("single(workers=2)", "single has no option 'workers'. It has none"),
        ("allreduce(bucket_mb=big)", "bucket_mb must be a whole number, and is 'big'"),
        ("allreduce(bucket_mb=2.5)", "bucket_mb must be a whole number, and is 2.5"),
        ("allreduce(bucket_mb=true)", "bucket_mb must be a whole number, and is True"),
        ("allreduce(bucket_mb=none)", "bucket_mb must be a whole number, and is None"),
        ("allreduce(tables=1)", "tables must be replicated or shared, and is 1"),
        ("allreduce(tables=maybe)", "must be replicated or shared, and is 'maybe'"),
        ("allreduce + int9", "There is no codec 'int9'; did you mean 'int8'"),
        ("allreduce + zzzz", r"There is no codec 'zzzz'\. There are: int8"),
        ("allreduce + INT8", r"is called 'int8' here\. Type  --strategy allreduce\+int8$"),
        (
            "allreduce(bucket_mb=9)+topk+int8",
            r"'topk' is planned .* Type  --strategy 'allreduce\(bucket_mb=9\)\+int8'$",
        ),
        ("allreduce + int8(chunks=3)", "int8 has no option 'chunks'; did you mean 'chunk'"),
        ("allreduce + int8(q=3)", r"int8 has no option 'q'\. Its options: chunk"),
        ("allreduce + int8(chunk=big)", "chunk must be a whole number, and is 'big'"),
        ("allreduce + int8(chunk=3)", "chunk=3; 16 to 65536 numbers .* such as chunk=256"),
        ("allreduce(codec=int8)", "allreduce has no option 'codec'"),
        (
            "allreduce + int8(chunk=64) + int8",
            r"one codec can be used, not 2\. Type  --strategy 'allreduce\+int8\(chunk=64\)'",
        ),
        (
            "ps:sync(servers=2) + int8",
            r"int8 does not work with ps:sync\(servers=2\): it was tested only with allreduce\. "
            r"Use  --strategy allreduce\+int8  or  --strategy 'ps:sync\(servers=2\)'\.$",
        ),
        (
            "single + int8(chunk=64)",
            r"Use  --strategy 'allreduce\+int8\(chunk=64\)'  or  --strategy single",
        ),
        ("allreduce(", "does not parse"),
    ],
)
def test_a_mistake_is_answered_with_a_correction(text: str, says: str) -> None:
    with pytest.raises(SpecError, match=says):
        make_strategy(text)


@given(st.sampled_from(sorted(STRATEGIES)), st.text(max_size=12), st.text(max_size=5))
def test_any_option_is_accepted_or_a_spec_error(name: str, key: str, value: str) -> None:
    try:
        config = make_strategy(f"{name}({key}={value})")
    except SpecError:
        return
    assert key.strip() in {field.name for field in dataclasses.fields(config)}


@pytest.mark.parametrize(
    ("text", "shortest"),
    [
        ("single", "single"),
        ("single()", "single"),
        ("allreduce", "allreduce"),
        ("allreduce(bucket_mb=25)", "allreduce"),
        (" allreduce ( bucket_mb = 10 ) ", "allreduce(bucket_mb=10)"),
        ("allreduce(tables=shared,bucket_mb=25)", "allreduce(tables=shared)"),
        ("allreduce + int8(chunk=256)", "allreduce+int8"),
        ("allreduce(bucket_mb=10) + int8(chunk=512)", "allreduce(bucket_mb=10)+int8(chunk=512)"),
    ],
)
def test_the_shortest_spec_makes_the_same_config(text: str, shortest: str) -> None:
    config = make_strategy(text)
    assert spec_of(config) == shortest
    assert make_strategy(spec_of(config)) == config


tables = st.sampled_from(["replicated", "shared"])
codecs = st.just(PLAIN) | st.builds(Int8, st.integers(16, 65_536))


@given(st.builds(AllReduce, st.integers(1, 999), tables, codec=codecs) | st.just(Single()))
def test_every_config_has_a_spec(config: AllReduce | Single) -> None:
    assert make_strategy(spec_of(config)) == config


def test_every_strategy_has_a_name_and_fits_its_default_number_of_workers() -> None:
    for name, cls in STRATEGIES.items():
        config = make_strategy(name)
        assert type(config) is cls
        config.check(config.traits.default_workers)
        with pytest.raises(SpecError, match="at least 1 worker"):
            config.check(0)
        with pytest.raises(dataclasses.FrozenInstanceError):
            config.name = "other"  # type: ignore[misc]


def test_impossible_worker_counts_are_refused_with_an_alternative() -> None:
    with pytest.raises(SpecError, match="bucket_mb must be at least 1, and is 0"):
        make_strategy("allreduce(bucket_mb=0)").check(2)
