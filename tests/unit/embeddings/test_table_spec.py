"""The configuration of tables: what is allowed, the errors, and the cost of a row."""

from __future__ import annotations

import json
from dataclasses import asdict
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from manyhands.embeddings.layout import EXTENDED_AT, TableLayout, entries_in, levels_for
from manyhands.embeddings.parsing import parse_bytes, show_bytes
from manyhands.embeddings.spec import OPTIMIZERS, RowOptimizer, Table, check_name, salt_of
from manyhands.errors import JobError


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"optimizer": "adagrd"}, "did you mean 'adagrad'?"),
        ({"optimizer": "adam(beta=0.9)"}, "did you mean 'betas'?"),
        ({"optimizer": "adam(betas=0.9)"}, "betas=0.9:0.999"),
        ({"optimizer": "adam(eps=small)"}, "eps is a number, not 'small'"),
        ({"optimizer": "adam(eps=1,eps=2)"}, "eps was given twice"),
        ({"optimizer": "momentum(beta=1.0)"}, "from 0 to below 1"),
        ({"optimizer": "sgd(weight_decay=-1)"}, "weight_decay of sgd can't be -1"),
        ({"optimizer": "adam(eps"}, "does not parse"),
        ({"optimizer": 3}, "The job's own optimizer is for the model"),
        ({"init": "unifrom"}, "did you mean 'uniform'?"),
        ({"init": "normal"}, "normal(0.01)"),
        ({"init": "zeros(1)"}, "zeros take no number"),
        ({"rows": 0}, "whole number from 1"),
        ({"rows": True}, "whole number from 1"),
        ({"admit_after": 0}, "admit_after is a whole number"),
        ({"evict_unused": -1}, "or None (never)"),
        ({"when_full": "shar"}, "did you mean 'share'?"),
        ({"max_bytes": "2 elephants"}, "'1.5GiB'"),
        ({"max_bytes": 0}, "can't be 0"),
        ({"lr": float("nan")}, "lr of a table can't be nan"),
        ({"rows": 1000, "max_bytes": "10KB"}, "1,000 rows of 144 bytes are 140.6 KiB"),
    ],
)
def test_invalid_options_are_refused_with_a_hint(given: dict[str, object], says: str) -> None:
    with pytest.raises(JobError) as caught:
        Table(16, **given)  # type: ignore[arg-type]
    assert says in str(caught.value)


def test_a_row_of_zero_numbers_is_refused() -> None:
    for dim in (0, -1, 1.5, "64"):
        with pytest.raises(JobError, match="dim is a whole number"):
            Table(dim)  # type: ignore[arg-type]


def test_names_that_would_break_a_path_are_refused() -> None:
    for name in ("users.v2-a", "0", "encoder.3"):
        assert check_name(name) == name
    for name in ("", "../users", "a b", ".hidden", "x" * 201):
        with pytest.raises(JobError, match="name of a table"):
            check_name(name)


specs = st.builds(
    Table,
    dim=st.integers(1, 300),
    rows=st.none() | st.integers(1, 10**6),
    optimizer=st.sampled_from(OPTIMIZERS)
    | st.builds(
        RowOptimizer,
        st.sampled_from(OPTIMIZERS),
        beta=st.floats(0, 0.999),
        betas=st.tuples(st.floats(0, 0.999), st.floats(0, 0.9999)),
        eps=st.floats(1e-12, 1e-3),
        weight_decay=st.floats(0, 1),
    ),
    lr=st.none() | st.floats(0, 10),
    init=st.sampled_from(["uniform", "uniform(0.05)", "normal(0.01)", "zeros"]),
    admit_after=st.integers(1, 9),
    evict_unused=st.none() | st.integers(1, 10**6),
    max_bytes=st.none() | st.integers(10**10, 10**12),
    when_full=st.sampled_from(["share", "evict", "error"]),
)


@given(specs)
def test_a_table_survives_json(spec: Table) -> None:
    record = json.loads(json.dumps(asdict(spec)))
    back = Table(**{**record, "optimizer": RowOptimizer(**record["optimizer"])})
    assert back == spec
    assert back.digest == spec.digest
    assert "\n" not in spec.describe()


@given(st.floats(0, 0.99), st.floats(0, 1))
def test_the_options_of_an_optimizer_are_parsed(beta: float, decay: float) -> None:
    assert RowOptimizer.of("sgd") == RowOptimizer("sgd")
    momentum = RowOptimizer.of(f"momentum(beta={beta!r},weight_decay={decay!r})")
    assert momentum == RowOptimizer("momentum", beta=beta, weight_decay=decay)
    adam = RowOptimizer.of(f"adam( betas={beta!r}:0.99, weight_decay={decay!r} )")
    assert adam == RowOptimizer("adam", betas=(beta, 0.99), eps=1e-8, weight_decay=decay)


def test_two_tables_differ_in_digest_and_in_salt() -> None:
    assert Table(8).digest != Table(8, optimizer="adagrad(eps=1e-9)").digest
    assert len({salt_of(name, seed) for name in ("a", "b") for seed in (0, 1)}) == 4


@given(specs)
def test_rows_are_aligned_and_waste_little(spec: Table) -> None:
    used = spec.dim * (1 + spec.row_optimizer.slots)
    assert used <= spec.width <= used * 9 / 8
    if used >= 128:
        assert spec.width % 16 == 0
    assert spec.bytes_per_row() >= 4 * spec.width + 16


@given(specs, st.integers(10**5, 10**11))
def test_a_layout_is_the_largest_within_the_limit(spec: Table, limit: int) -> None:
    layout = TableLayout.within(spec, limit)
    if spec.rows is not None:
        assert layout.capacity == spec.rows
        return
    assert layout.capacity == 0 or layout.most_bytes <= limit
    assert TableLayout(spec, layout.capacity + 1, layout.waiting_levels).most_bytes > limit
    assert entries_in(layout.levels) * 0.6 > layout.capacity


@given(st.integers(10_000, 20_000_000))
def test_the_index_takes_under_24_bytes_a_row(rows: int) -> None:
    assert 8 * entries_in(levels_for(rows, filled=EXTENDED_AT)) / rows < 24


@given(specs)
def test_the_regions_of_a_layout_follow_each_other_and_do_not_overlap(spec: Table) -> None:
    layout = TableLayout.within(spec, 1 << 30)
    last = layout.slot_ranges(0, layout.capacity) + layout.waiting_ranges(0)
    for generation in (0, 1):
        last += layout.level_ranges(generation, 0, layout.levels)
    if not layout.waiting_levels:
        last = [r for r in last if r not in layout.waiting_ranges(0)]
    last.sort()
    for (begin, size), (after, _) in pairwise(last):
        assert begin + size <= after
    assert last[-1][0] + last[-1][1] <= layout.at.end


@pytest.mark.parametrize(
    ("text", "number"),
    [("2GiB", 2 << 30), ("1.5 KiB", 1536), ("3MB", 3_000_000), ("700", 700), (12, 12)],
)
def test_parse_bytes(text: str | int, number: int) -> None:
    assert parse_bytes("it", text) == number


def test_show_bytes() -> None:
    assert [show_bytes(n) for n in (12, 1536, 1 << 20, 5 << 40)] == [
        *("12 B", "1.5 KiB"),
        *("1.0 MiB", "5.0 TiB"),
    ]


def test_one_number_is_described_as_one() -> None:
    assert Table(1).describe().startswith("1 number a row")
    assert Table(2).describe().startswith("2 numbers a row")
