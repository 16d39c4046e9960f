"""The four parameter-server specs: their modes, and what they refuse."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from manyhands.errors import SpecError
from manyhands.ps.config import DEDICATED, ParameterServer
from manyhands.ps.policies import AsyncPolicy, BackupPolicy, Policy, SspPolicy, SyncPolicy
from manyhands.ps.staleness import RULES
from manyhands.strategies.registry import STRATEGIES, make_strategy, spec_of

NAMES = [name for name in STRATEGIES if name.startswith("ps:")]


def config(text: str) -> ParameterServer:
    made = make_strategy(text)
    assert isinstance(made, ParameterServer)
    return made


@pytest.mark.parametrize(
    ("text", "kind", "rounds", "slots", "says"),
    [
        ("ps:sync", SyncPolicy, True, 1, {}),
        ("ps:async", AsyncPolicy, False, 2, {}),
        ("ps:ssp(staleness=2)", SspPolicy, False, 2, {"staleness": 2}),
        ("ps:ssp(staleness=0)", SspPolicy, False, 2, {"staleness": 0}),
        ("ps:backup", BackupPolicy, True, 2, {"spares": 1, "late": "drop"}),
        ("ps:backup(spares=2, late=decay, decay=0.25)", BackupPolicy, True, 2,
         {"spares": 2, "late": "decay", "decay": 0.25}),
    ],
)  # fmt: skip
def test_modes(
    text: str, kind: type[Policy], rounds: bool, slots: int, says: dict[str, Any]
) -> None:
    made = config(text)
    made.check(3)
    mode = made.mode(None)
    policy = mode.make_policy(["b", "a", "c"])
    assert type(policy) is kind
    assert policy.workers == ("b", "a", "c"), "in rank order"
    assert (mode.rounds, mode.slots) == (rounds, slots)
    for option, value in says.items():
        assert getattr(policy, option) == value
    assert config(spec_of(made)) == made


def test_servers_clip_sums_and_workers_clip_single_updates() -> None:
    assert {name: config(name).mode(0.5).clip_norm for name in NAMES} == {
        "ps:sync": 0.5, "ps:backup": 0.5, "ps:async": None, "ps:ssp": None,
    }  # fmt: skip


def test_staleness_options_reach_the_servers() -> None:
    for name in ("ps:async", "ps:ssp"):
        for rule in RULES:
            mode = config(f"{name}(lr_rule={rule}, compensate=0.04)").mode(None)
            assert (mode.lr_rule, mode.compensate) == (rule, 0.04)
        assert config(name).mode(None).momentum_rule == "ahead"
        assert config(f"{name}(momentum_rule=none)").mode(None).momentum_rule == "none"
    assert config("ps:backup").mode(None).momentum_rule == "none", "its rounds are whole batches"


@pytest.mark.parametrize("name", NAMES)
def test_servers_are_colocated_or_dedicated(name: str) -> None:
    assert config(name).servers_for(3) == 0, "workers serve"
    assert config(f"{name}(servers=2)").servers_for(3) == 0
    assert config(f"{name}(placement=dedicated)").servers_for(3) == DEDICATED
    assert config(f"{name}(placement=dedicated, servers=5)").servers_for(3) == 5
    config(f"{name}(placement=dedicated, servers=5)").check(2)
    assert config(f"{name}(transport=tcp)").needs_keys(2)
    assert not config(f"{name}(transport=shm)").needs_keys(2)


@pytest.mark.parametrize(
    ("text", "workers", "says"),
    [
        ("ps:sync", 0, "at least 1 worker"),
        ("ps:sync(replicas=2)", 2, "replicas=2; a block has 0 or 1"),
        ("ps:sync(replicas=-1)", 2, "replicas=-1"),
        ("ps:sync(servers=3)", 2, r"servers=3, and there are 2 workers.*servers=1 to 2, or auto"),
        ("ps:sync(servers=0)", 2, "servers=0"),
        ("ps:async(servers=65, placement=dedicated)", 2, "only wait for each other.*1 to 64"),
        ("ps:async(compensate=-1)", 2, "compensate=-1; a number from 0"),
        ("ps:async(compensate=nan)", 2, "compensate="),
        ("ps:async(compensate=inf)", 2, "compensate=inf"),
        ("ps:ssp(staleness=-1)", 2, r"staleness=-1.*Write ps:ssp\(staleness=4\)"),
        ("ps:ssp(compensate=-1)", 2, "ps:ssp: compensate=-1"),
        ("ps:backup(spares=-1)", 2, r"spares=-1.*Write ps:backup\(spares=1\)"),
        ("ps:backup(decay=0)", 2, r"decay=0.*Write ps:backup\(late=decay, decay=0.5\)"),
        ("ps:backup(decay=1.5)", 2, "decay=1.5"),
        ("ps:backup", 1, "spares=1 of 1 workers leaves nobody"),
        ("ps:backup(spares=4)", 4, r"spares=4 of 4 workers.*Use spares=3 or fewer"),
    ],
)
def test_impossible_options_are_refused_with_an_alternative(
    text: str, workers: int, says: str
) -> None:
    with pytest.raises(SpecError, match=says):
        make_strategy(text).check(workers)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("ps:sink", r"There is no strategy 'ps:sink'; did you mean 'ps:sync'"),
        ("ps:sync(staleness=4)", "ps:sync has no option 'staleness'"),
        ("ps:sync(server=2)", "no option 'server'; did you mean 'servers'"),
        ("ps:sync(servers=two)", "servers must be a whole number or auto, and is 'two'"),
        ("ps:sync(servers=true)", "servers must be"),
        ("ps:sync(placement=coloc)", "placement must be colocated or dedicated"),
        ("ps:sync(transport=udp)", "transport must be auto or shm or tcp"),
        ("ps:async(lr_rule=log)", "lr_rule must be sqrt or inverse or none"),
        ("ps:ssp(momentum_rule=dana)", "momentum_rule must be ahead or none, and is 'dana'"),
        ("ps:sync(momentum_rule=ahead)", "ps:sync has no option 'momentum_rule'"),
        ("ps:backup(late=keep)", "late must be drop or decay"),
        ("ps:ssp(staleness=1.5)", "staleness must be a whole number"),
        (
            "ps:ssp+int8",
            r"int8 does not work with ps:ssp: .* Use  --strategy allreduce\+int8  or  --strategy ps:ssp",
        ),
    ],
)
def test_a_mistake_is_answered_with_a_correction(text: str, says: str) -> None:
    with pytest.raises(SpecError, match=says):
        make_strategy(text)


OPTIONS = [(name, field.name) for name in NAMES for field in dataclasses.fields(STRATEGIES[name])]


@settings(max_examples=200)
@given(
    st.sampled_from(OPTIONS),
    st.one_of(
        st.sampled_from(["auto", "none", "true", "drop", "decay", "inverse", "tcp", "dedicated"]),
        st.integers(-2, 70).map(str),
        st.floats().map(str),
        st.from_regex(r"[a-z]{1,6}", fullmatch=True),
    ),
    st.integers(1, 4),
)
def test_any_value_of_any_option_is_accepted_or_refused(
    option: tuple[str, str], value: str, workers: int
) -> None:
    name, key = option
    try:
        made = config(f"{name}({key}={value})")
        made.check(workers)
    except SpecError:
        return
    assert config(spec_of(made)) == made
    policy = made.mode(None).make_policy([f"w{i}" for i in range(workers)])
    assert len(policy.workers) == workers


def test_a_step_has_as_many_parts_as_it_waits_for() -> None:
    assert [config("ps:backup(spares=2)").parts(n) for n in (1, 3, 8)] == [1, 1, 6]
    assert [config("ps:async").parts(n) for n in (1, 3)] == [1, 3]
