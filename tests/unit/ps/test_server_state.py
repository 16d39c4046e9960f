"""Estates: who falls behind, dies or joins, the parameters and what the optimizer remembers stay right."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from server_states import OPTIMIZERS, Village, layout_for, train_state

from manyhands.ps.block_store import FlatTensors, ScheduleClock
from manyhands.ps.placement import place
from manyhands.ps.server_state import SPAN_BYTES, ServerState, spans
from manyhands.ps.updates import apply, apply_replica


def make_village(name: str = "sgd", *, shared: bool, servers: int = 3, seed: int = 0) -> Village:
    village = Village(name, shared=shared, chance=random.Random(seed), block_bytes=128)
    for _ in range(servers):
        village.join()
    village.settle()
    village.check()
    village.go()
    return village


@pytest.fixture(params=[True, False], ids=["one host", "several hosts"])
def village(request: pytest.FixtureRequest) -> Iterator[Village]:
    village = make_village(shared=request.param)
    yield village
    village.close()


def test_servers_and_replicas_follow_every_update(village: Village) -> None:
    for _ in range(4):
        village.finish(village.decide(factor=0.5))
    village.settle()
    village.check()


def test_who_dies_is_replaced_by_its_replicas(village: Village) -> None:
    for number in (0, 1):
        village.finish(village.decide())
        village.lose(number)
        village.settle()
        village.check()
        village.go()
    village.finish(village.decide())
    village.settle()
    village.check()


def test_who_joins_gets_its_blocks_and_the_schedule(village: Village) -> None:
    for _ in range(3):
        village.finish(village.decide())
    newcomer = village.join()
    plan = village.settle()
    village.check()
    assert newcomer.name in {move.target for move in plan.moves if move.role == "own"}
    assert newcomer.schedule_clock.ticks == plan.ledger.ticks > 0
    village.go()
    village.finish(village.decide())
    village.settle()
    village.check()


def test_one_host_a_server_several_decisions_behind_finishes_them_by_itself() -> None:
    """Gradients lie in memory that all can read, and the other has told what it has done."""
    village = make_village("adam", shared=True)
    ahead, behind, other = village.server_states
    for _ in range(2):
        decision = village.decide(factor=0.75)
        for server_state in (ahead, other):
            village.sum_up(server_state, decision)
            apply(server_state, decision)
    assert (ahead.ledger.version, behind.ledger.version) == (2, 0)
    plan = village.settle()
    village.check()
    # Replicas of those who went on are behind them; those of the one behind are not.
    assert plan.stale
    assert all(owner != behind.name for _, owner in plan.stale)
    village.close()


def test_one_host_replicas_of_a_dead_server_catch_up_from_the_gradients() -> None:
    village = make_village("adamw", shared=True)
    dead = village.server_states[0]
    for _ in range(2):
        decision = village.decide()
        for server_state in village.server_states:
            village.sum_up(server_state, decision)
            apply(server_state, decision)
    assert any(e.held.versions.get(dead.name) == 0 for e in village.server_states)
    village.lose(0)
    village.settle()
    village.check()
    village.close()


def test_one_host_a_replica_that_is_ahead_of_all_who_live_takes_them_along() -> None:
    """Its server had applied the update, handed the sum over and died; nobody else had got so far."""
    village = make_village(shared=True)
    village.finish(village.decide())
    dead, keeper = village.server_states[0], village.keepers_of(village.server_states[0])[0]
    decision = village.decide()
    village.sum_up(dead, decision)
    apply(dead, decision)
    village.hand_over(dead, keeper, decision)
    apply_replica(keeper, dead.name, decision)
    assert (keeper.ledger.version, keeper.status().ledger.version) == (1, 2)
    village.lose(0)
    village.settle()
    village.check()
    village.close()


def test_several_hosts_whoever_heard_commit_takes_the_others_along() -> None:
    """All sums are with the keepers before anybody applies one, so one word is enough."""
    village = make_village("adafactor", shared=False)
    decision = village.decide(factor=0.5)
    for server_state in village.server_states:
        village.sum_up(server_state, decision)
        for keeper in village.keepers_of(server_state):
            village.hand_over(server_state, keeper, decision)
    heard = village.server_states[1]
    apply(heard, decision)
    for owner in heard.held.replicas:
        apply_replica(heard, owner, decision)
    village.lose(0)
    village.settle()
    village.check()


def test_several_hosts_what_nobody_heard_commit_of_never_was() -> None:
    village = make_village(shared=False)
    before = [buffer.clone() for buffer in village.server_states[1].params.buffers]
    decision = village.decide()
    for server_state in village.server_states:
        village.sum_up(server_state, decision)
    village.lose(0)
    village.settle()
    for server_state in village.server_states:
        assert server_state.ledger.version == 0
    after = village.server_states[0].params.buffers
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_a_view_that_never_began_leaves_everything_as_it_was(village: Village) -> None:
    village.finish(village.decide())
    for _ in range(2):  # nobody hears go
        village.lose(2) if len(village.server_states) > 2 else village.join()
        village.settle()
        village.check()
    village.go()
    village.finish(village.decide())
    village.settle()
    village.check()


def some_fall_behind(village: Village) -> None:
    """An update of which each has done as much as the view's sudden end allows."""
    chance, decision = village.chance, village.decide(factor=village.chance.choice([1.0, 0.5]))
    newest = chance.choice(village.server_states)
    for server_state in village.server_states:
        village.sum_up(server_state, decision)
        if not village.shared:
            for keeper in village.keepers_of(server_state):
                village.hand_over(server_state, keeper, decision)
    for server_state in village.server_states:
        if server_state is newest or chance.random() < 0.5:
            apply(server_state, decision)
            for owner in server_state.held.replicas:
                if not village.shared:
                    apply_replica(server_state, owner, decision)
    if village.shared:
        for owner in village.server_states:
            for keeper in village.keepers_of(owner):
                if owner.ledger.version == decision.version and chance.random() < 0.5:
                    village.hand_over(owner, keeper, decision)
                    apply_replica(keeper, owner.name, decision)
    # A server whose update was found by nobody else must not be the one that dies.
    village.server_states.remove(newest)
    village.server_states.append(newest)


@settings(max_examples=25)
@given(st.sampled_from(sorted(OPTIMIZERS)), st.booleans(), st.integers(2, 4), st.integers(0, 2**32))
def test_whatever_happens_all_end_equal_to_the_one_to_whom_nothing_did(
    name: str, shared: bool, servers: int, seed: int
) -> None:
    village = make_village(name, shared=shared, servers=servers, seed=seed)
    chance = village.chance
    for _ in range(4):
        for _ in range(chance.randrange(3)):
            village.finish(village.decide())
        if chance.random() < 0.6:
            some_fall_behind(village)
        # One dies at a time: now, or while the next view is being prepared.
        dies = (
            chance.choice(["now", "later", "never"]) if len(village.server_states) > 1 else "never"
        )
        victim = village.server_states[chance.randrange(max(len(village.server_states) - 1, 1))]
        if dies == "now":
            village.server_states.remove(victim)
        if len(village.server_states) < 4 and chance.random() < 0.5:
            village.join()
        plan = village.settle()
        village.check()
        # A replica behind its server was given up, to be sent anew: until then that one must live.
        if dies == "later" and all(victim.name != owner for _, owner in plan.stale):
            village.server_states.remove(victim)
            village.settle()
            village.check()
        village.go()
    village.close()


# Small things -----------------------------------------------------------------------------------


def test_the_ticker_moves_the_schedule_once_for_each_batch() -> None:
    whom = train_state("sgd")
    schedule_clock = ScheduleClock(whom.scheduler)
    for ticks in (1, 1, 3, 2):
        schedule_clock.advance(ticks)
    assert schedule_clock.ticks == 3
    assert whom.lr == pytest.approx(0.1 / 4)
    assert ScheduleClock(whom.scheduler).ticks == 3, "it goes on where a checkpoint has stopped"


def test_a_block_that_is_held_by_nobody_here_is_not_made_up() -> None:
    whom = train_state("sgd")
    layout = layout_for(whom)
    server_state = ServerState(
        "s0",
        "h",
        whom,
        FlatTensors.private(layout),
        ScheduleClock(whom.scheduler),
        shared=False,
        replicas=1,
    )
    with pytest.raises(AssertionError, match="s0 holds no block 0"):
        server_state.block_state(0)
    placement = place(layout, ["s0", "s1"])
    with pytest.raises(AssertionError, match="s0 holds no block"):
        server_state.prepare(2, placement, {}, fresh=False)


def test_what_travels_is_cut_into_spans() -> None:
    layout = layout_for(train_state("sgd"), block_bytes=64)
    (run,) = spans(layout, range(len(layout.blocks)))
    assert run.numel * 4 <= SPAN_BYTES
    assert [b.number for b in run.blocks] == list(range(len(layout.blocks)))
