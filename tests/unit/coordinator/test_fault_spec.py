"""The language of --chaos: what parses, what is refused, when faults are due and for which members."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from manyhands.coordinator.fault_injector import ActiveClause
from manyhands.coordinator.fault_spec import (
    AFTER_STEP,
    AT,
    CUT,
    EVERY,
    KILL,
    ONCE,
    PAUSE,
    FaultClause,
    FaultSpec,
    FaultTiming,
    check,
    parse_chaos,
    possible_targets,
)
from manyhands.errors import UsageError

durations = st.integers(1, 10_000_000).map(lambda ms: ms / 1000)
targets = st.sampled_from(["worker", "server", "member", "worker-0", "server-12"])
timings = st.one_of(
    st.builds(FaultTiming, st.sampled_from([EVERY, AT]), durations),
    st.builds(FaultTiming, st.just(AFTER_STEP), st.integers(0, 10**9)),
    st.just(FaultTiming(ONCE, 0.0)),
)
clauses = st.one_of(
    st.builds(FaultClause, st.just(KILL), targets, st.just(0.0), timings),
    st.builds(FaultClause, st.just(PAUSE), targets, durations, timings),
    st.builds(FaultClause, st.just(CUT), targets, st.just(0.0) | durations, timings),
)
chaoses = st.builds(
    FaultSpec,
    st.lists(clauses, min_size=1, max_size=4).map(tuple),
    st.none() | st.integers(0, 10**9),
)


def test_the_example() -> None:
    chaos = parse_chaos("kill worker every 10s; pause server 2s; cut link 1s; seed 7")
    assert chaos == FaultSpec(
        (
            FaultClause(KILL, "worker", 0.0, FaultTiming(EVERY, 10.0)),
            FaultClause(PAUSE, "server", 2.0, FaultTiming(EVERY, 10.0)),
            FaultClause(CUT, "member", 1.0, FaultTiming(EVERY, 10.0)),
        ),
        seed=7,
    )


def test_other_moments_and_units() -> None:
    text = "  KILL worker-1 at 1m;pause  member 500ms after step 100; cut link of server once;"
    assert parse_chaos(text).clauses == (
        FaultClause(KILL, "worker-1", 0.0, FaultTiming(AT, 60.0)),
        FaultClause(PAUSE, "member", 0.5, FaultTiming(AFTER_STEP, 100)),
        FaultClause(CUT, "server", 0.0, FaultTiming(ONCE, 0.0)),
    )


@given(chaoses)
def test_what_is_shown_parses_to_the_same(chaos: FaultSpec) -> None:
    assert parse_chaos(str(chaos)) == chaos


words = st.sampled_from(
    [
        *("kill", "pause", "cut", "link", "of", "every", "at", "after", "step", "once", "seed"),
        *("worker", "server", "member", "worker-1", "7", "2s", "500ms", ";", "x"),
    ]
)


@given(st.lists(words, max_size=8).map(" ".join) | st.text(max_size=30))
def test_any_text_parses_or_is_a_usage_error(text: str) -> None:
    try:
        chaos = parse_chaos(text)
    except UsageError as error:
        complaint = str(error)
    else:
        assert parse_chaos(str(chaos)) == chaos
        return
    assert complaint.startswith("--chaos ")
    assert "Write  " in complaint


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("kil worker", "'kil' is not a fault; did you mean 'kill'?"),
        ("kill wroker", "'wroker' is not a target; did you mean 'worker'?"),
        ("kill coordinator", "'coordinator' is not a target"),
        ("kill", "the target is missing"),
        ("kill worker evry 10s", "'evry' is not a moment; did you mean 'every'?"),
        ("kill worker every 10", "'10' is not a duration, such as 500ms, 2s or 1m"),
        ("kill worker every 0s", "'0s' is not a duration"),
        ("kill worker 2s", "Write  kill worker every 10s"),
        ("kill worker after 10", "Write  after step 100"),
        ("kill worker after step x", "'x' is not a whole number"),
        ("kill worker once more", "'more' is not expected here"),
        ("pause server", "the duration is missing"),
        ("cut worker", "Write  cut link of worker-1"),
        ("kill worker; seed 1; seed 2", "the seed is given twice"),
        ("seed 4", "names no fault"),
        (" ; ", "names no fault"),
    ],
)
def test_an_error_shows_what_to_write(text: str, wanted: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_chaos(text)
    assert wanted in str(caught.value)


def refusal(text: str, *, workers: int = 3, servers: int = 0) -> str:
    with pytest.raises(UsageError) as caught:
        check(parse_chaos(text), workers=workers, servers=servers)
    return str(caught.value)


def test_impossible_faults_are_refused() -> None:
    assert "--workers 3" in refusal("kill worker", workers=2)
    assert "--workers 3" in refusal("kill worker-1", workers=2)
    assert "this run has no dedicated servers" in refusal("pause server-0 1s")
    assert "two servers" in refusal("kill server", servers=1)
    fine = parse_chaos("pause worker 1s; cut link; kill server; kill member")
    check(fine, workers=2, servers=2)


names = st.integers(0, 5)


@given(st.sampled_from([KILL, PAUSE, CUT]), targets, names, names)
def test_a_kill_leaves_enough(fault: str, target: str, num_workers: int, num_servers: int) -> None:
    workers = [f"worker-{n}" for n in range(num_workers)]
    servers = [f"server-{n}" for n in range(num_servers)]
    for victim in possible_targets(FaultClause(fault, target, 1.0), workers, servers):
        assert target in ("member", victim, victim.partition("-")[0])
        if fault == KILL:
            assert len([name for name in workers if name != victim]) >= 2
            assert not servers or [name for name in servers if name != victim]


@given(timings, st.integers(0, 1000))
def test_once_is_once_and_every_comes_again(timing: FaultTiming, seed: int) -> None:
    clause = ActiveClause(FaultClause(KILL, timing=timing), random.Random(seed))
    late_s, late_step = 1e8, 10**10
    assert clause.due(late_s, late_step)
    assert clause.due(late_s, late_step), "it waits until it can be done"
    clause.done(late_s)
    assert not clause.due(late_s, late_step), "what was late is not made up for"
    assert clause.due(2 * late_s, late_step) is (timing.kind == EVERY)


def test_not_before_its_time() -> None:
    rng = random.Random(0)
    assert not ActiveClause(FaultClause(KILL, timing=FaultTiming(EVERY, 10.0)), rng).due(9.9, 10**6)
    assert not ActiveClause(FaultClause(KILL, timing=FaultTiming(AT, 10.0)), rng).due(9.9, 10**6)
    assert not ActiveClause(FaultClause(KILL, timing=FaultTiming(AFTER_STEP, 10)), rng).due(1e6, 9)
    assert ActiveClause(FaultClause(KILL, timing=FaultTiming(AFTER_STEP, 10)), rng).due(0.0, 10)
    assert ActiveClause(FaultClause(KILL, timing=FaultTiming(ONCE, 0.0)), rng).due(60.0, 0)
