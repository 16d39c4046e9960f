"""The ledger: decisions survive the wire, coefficients form a mean, and the schedule counts batches."""

from __future__ import annotations

import json
from dataclasses import replace
from fractions import Fraction
from typing import TypeVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from manyhands.ps.policies import (
    KEEP_PARTS,
    KEEP_PUSHES,
    Contribution,
    Decision,
    Ledger,
    lr_factor,
    progress_after,
)
from manyhands.transport.fields import read, write

names = st.sampled_from(["worker-0", "worker-1", "a name with a space"])
fractions = st.tuples(st.integers(0, 50), st.integers(1, 50))
parts = st.integers(1, 50).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n)))
numbers = st.floats(0, 1e9)
pushes = st.builds(
    Contribution, names, st.integers(1, 99), st.integers(0, 1), st.integers(1, 99), st.integers(0, 7),
    samples=numbers, total=st.floats(1e-3, 1e9), share=parts, staleness=st.integers(0, 9),
    scale=st.floats(0, 1), lr_factor=st.floats(0.1, 9), ticks=st.integers(0, 3),
)  # fmt: skip


def pushed(
    worker: str, *, samples: float = 4, total: float = 4, step: int = 1, **more: float
) -> Contribution:
    share = (round(samples), round(total) or 1)
    return Contribution(worker, 1, 0, step, 0, float(samples), float(total), share, **more)  # type: ignore[arg-type]


T = TypeVar("T")


def on_the_wire(message: T) -> T:
    return read(type(message), json.loads(json.dumps(write(message))))


@given(
    st.builds(Decision, st.integers(1, 99), st.lists(pushes, max_size=4).map(tuple),
              lr_scale=numbers, progress=fractions, factor=st.floats(0, 1))
)  # fmt: skip
def test_a_decision_survives_the_wire(decision: Decision) -> None:
    again = on_the_wire(decision)
    assert again == decision
    assert hash(again) == hash(decision), "lists became tuples again"


@given(st.lists(st.lists(pushes, min_size=1, max_size=3), max_size=KEEP_PUSHES + 9))
def test_a_ledger_survives_the_wire_and_counts_every_push(
    updates: list[list[Contribution]],
) -> None:
    ledger = Ledger()
    for made in updates:
        ledger.note(Decision.of(ledger.version + 1, tuple(made), before=ledger.progress))
    flat = [push for made in updates for push in made]
    assert ledger.version == len(updates)
    assert ledger.counts == {w: sum(p.worker == w for p in flat) for w in {p.worker for p in flat}}
    assert ledger.progress == sum((Fraction(*p.share) * p.ticks for p in flat), Fraction())
    assert ledger.ticks == int(ledger.progress)
    assert list(ledger.parts) == [(p.step, p.part, p.samples, p.loss) for p in flat]
    again = on_the_wire(ledger)
    assert again == ledger
    copied = ledger.copy()
    copied.note(Decision(ledger.version + 1, (pushed("a"),)))
    assert again == ledger, "a copy shares nothing"
    assert not ledger.after(ledger.version)


def test_decisions_after_a_version_are_returned_oldest_first_or_refused() -> None:
    ledger = Ledger()
    for version in range(1, 201):
        ledger.note(Decision(version, (pushed("a"),)))
    assert [d.version for d in ledger.after(197)] == [198, 199, 200]
    oldest = ledger.decisions[0].version
    assert len(ledger.decisions) == KEEP_PUSHES + 4
    assert ledger.after(oldest - 1)[0].version == oldest
    for version in (oldest - 2, 201):
        with pytest.raises(AssertionError, match=f"{version} "):
            ledger.after(version)


def test_versions_have_no_gaps_and_old_parts_are_dropped() -> None:
    ledger = Ledger()
    with pytest.raises(AssertionError, match="2 after 0"):
        ledger.note(Decision(2, (pushed("a"),)))
    for version in range(1, KEEP_PARTS + 2):
        ledger.note(Decision(version, (pushed("a", step=version),)))
    assert (ledger.parts[0][:2], ledger.parts[-1][:2]) == ((2, 0), (KEEP_PARTS + 1, 0))


def test_with_many_workers_every_server_can_still_catch_up() -> None:
    """Each has two pushes under way at most, so a server lags by twice as many updates at most."""
    ledger = Ledger()
    for version in range(1, 501):
        ledger.note(Decision(version, (pushed(f"worker-{version % 100}"),)))
    assert len(ledger.after(500 - 2 * 100)) == 200
    assert on_the_wire(ledger).after(300) == ledger.after(300)


def test_with_many_workers_in_rounds_only_a_few_updates_are_kept() -> None:
    """What a server says of itself when the membership changes stays small."""
    ledger = Ledger()
    for version in range(1, 50):
        ledger.note(Decision(version, tuple(pushed(f"worker-{i}") for i in range(200))))
    assert len(ledger.after(49 - 4)) == 4
    assert len(ledger.decisions) < 8


# Coefficients: each sample as in the mean over its own batch.

shares = st.lists(st.tuples(st.integers(1, 40), st.integers(1, 64)), min_size=1, max_size=4)


@given(shares, st.booleans())
def test_every_sample_counts_as_in_the_mean_over_its_own_batch(
    sizes: list[tuple[int, int]], weighted: bool
) -> None:
    """Whatever else is in the update: parts of other batches, of other sizes, or none."""
    given = []
    for i, (n, more) in enumerate(sizes):
        part = pushed(f"w{i}", samples=n, total=n + more, step=i)
        # By a job's own weights, of which each sample here has 3.
        given.append(replace(part, samples=3.0 * n, total=1.0) if weighted else part)
    for g, coefficient in zip(given, Decision(1, tuple(given)).coefficients(), strict=True):
        # The gradient is the sum over the samples, times their weights, divided by `total`.
        per_sample = coefficient * (3.0 if weighted else 1.0) / g.total
        assert per_sample == pytest.approx(1 / g.share[1])
        assert weighted or coefficient == 1.0


def test_a_whole_batch_is_added_without_a_multiplication() -> None:
    """All parts of one batch, none late: coefficients of exactly 1, so sums are bit-equal."""
    parts = (3, 7, 6)
    given = tuple(pushed(f"w{i}", samples=n, total=16) for i, n in enumerate(parts))
    assert Decision(1, given).coefficients() == [1.0, 1.0, 1.0]


def test_a_decayed_push_counts_less_and_does_not_affect_the_others() -> None:
    late, timely = pushed("a", samples=4, total=8, scale=0.25), pushed("b", samples=4, total=8)
    assert Decision(1, (late, timely)).coefficients() == [0.25, 1.0]


def test_weights_of_a_job_replace_sample_counts() -> None:
    """A gradient that is multiplied by its own weight is divided by everybody's."""
    two = (pushed("a", samples=4, total=8), pushed("b", samples=4, total=8))
    given = tuple(replace(g, samples=w, total=1.0) for g, w in zip(two, (30.0, 10.0), strict=True))
    assert Decision(1, given).coefficients() == [1 / 40, 1 / 40]


def test_an_update_without_weight_moves_nothing() -> None:
    given = (pushed("a", samples=0, total=1), pushed("b", samples=0, total=1))
    assert Decision(1, given).coefficients() == [0.0, 0.0]


@given(st.lists(st.integers(1, 9), min_size=1, max_size=9), st.integers(1, 5))
def test_the_schedule_counts_whole_batches_however_they_are_cut(
    parts: list[int], epochs: int
) -> None:
    total, done, ticks = sum(parts), Fraction(), []
    for _ in range(epochs):
        for samples in parts:
            done = progress_after(done, [pushed("a", samples=samples, total=total)])
            ticks.append(Decision(1, (), progress=(done.numerator, done.denominator)).ticks)
    assert done == epochs, "no rounding"
    ends = [i for i, (a, b) in enumerate(zip([0, *ticks], ticks, strict=False)) if b > a]
    assert ends == [len(parts) * (epoch + 1) - 1 for epoch in range(epochs)]


@given(factor=st.floats(1e-3, 1e3), workers=st.integers(1, 5))
def test_the_factor_of_a_step_is_that_of_its_pushes(factor: float, workers: int) -> None:
    assert lr_factor([pushed("a", lr_factor=factor)] * workers) == factor


def test_an_update_of_several_steps_has_their_mean_factor() -> None:
    few, many = pushed("a", samples=1, lr_factor=1.0), pushed("b", samples=3, lr_factor=2.0)
    assert lr_factor([few, many]) == 1.75
    nothing = [pushed("a", samples=0, lr_factor=f) for f in (1.0, 2.0)]
    assert lr_factor(nothing) == 1.0
