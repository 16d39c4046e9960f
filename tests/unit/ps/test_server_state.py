"""Server states: when servers fall behind, die or join, parameters and optimizer state stay correct."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from server_states import OPTIMIZERS, ServerGroup, layout_for, make_train_state

from manyhands.ps.block_store import FlatTensors, ScheduleClock
from manyhands.ps.placement import place
from manyhands.ps.server_state import ServerState
from manyhands.ps.spans import SPAN_BYTES, message_spans
from manyhands.ps.updates import apply, apply_replica


def make_group(name: str = "sgd", *, shared: bool, servers: int = 3, seed: int = 0) -> ServerGroup:
    group = ServerGroup(name, shared=shared, chance=random.Random(seed), block_bytes=128)
    for _ in range(servers):
        group.join()
    group.settle()
    group.check()
    group.go()
    return group


@pytest.fixture(params=[True, False], ids=["one host", "several hosts"])
def group(request: pytest.FixtureRequest) -> Iterator[ServerGroup]:
    group = make_group(shared=request.param)
    yield group
    group.close()


def test_servers_and_replicas_follow_every_update(group: ServerGroup) -> None:
    for _ in range(4):
        group.finish(group.decide(factor=0.5))
    group.settle()
    group.check()


def test_replicas_replace_a_dead_server(group: ServerGroup) -> None:
    for number in (0, 1):
        group.finish(group.decide())
        group.lose(number)
        group.settle()
        group.check()
        group.go()
    group.finish(group.decide())
    group.settle()
    group.check()


def test_a_joining_server_gets_its_blocks_and_the_schedule(group: ServerGroup) -> None:
    for _ in range(3):
        group.finish(group.decide())
    newcomer = group.join()
    plan = group.settle()
    group.check()
    assert newcomer.name in {move.target for move in plan.moves if move.role == "own"}
    assert newcomer.schedule_clock.ticks == plan.ledger.ticks > 0
    group.go()
    group.finish(group.decide())
    group.settle()
    group.check()


def test_one_host_a_server_several_decisions_behind_completes_them_by_itself() -> None:
    """Gradients lie in memory that all can read, and the other has told what it has done."""
    group = make_group("adam", shared=True)
    ahead, behind, other = group.server_states
    for _ in range(2):
        decision = group.decide(factor=0.75)
        for server_state in (ahead, other):
            group.sum_up(server_state, decision)
            apply(server_state, decision)
    assert (ahead.ledger.version, behind.ledger.version) == (2, 0)
    plan = group.settle()
    group.check()
    # Replicas of those who went on are behind them; those of the one behind are not.
    assert plan.stale
    assert all(owner != behind.name for _, owner in plan.stale)
    group.close()


def test_one_host_replicas_of_a_dead_server_catch_up_from_the_gradients() -> None:
    group = make_group("adamw", shared=True)
    dead = group.server_states[0]
    for _ in range(2):
        decision = group.decide()
        for server_state in group.server_states:
            group.sum_up(server_state, decision)
            apply(server_state, decision)
    assert any(e.held.versions.get(dead.name) == 0 for e in group.server_states)
    group.lose(0)
    group.settle()
    group.check()
    group.close()


def test_one_host_survivors_catch_up_with_a_replica_that_is_ahead() -> None:
    """The owner applied the update, passed the sum on and died; no other server had reached that version."""
    group = make_group(shared=True)
    group.finish(group.decide())
    dead, holder = group.server_states[0], group.holders_of(group.server_states[0])[0]
    decision = group.decide()
    group.sum_up(dead, decision)
    apply(dead, decision)
    group.hand_over(dead, holder, decision)
    apply_replica(holder, dead.name, decision)
    assert (holder.ledger.version, holder.status().ledger.version) == (1, 2)
    group.lose(0)
    group.settle()
    group.check()
    group.close()


def test_several_hosts_an_update_is_completed_if_any_server_received_its_commit() -> None:
    """All sums are with their holders before any is applied, so one received commit is enough."""
    group = make_group("adafactor", shared=False)
    decision = group.decide(factor=0.5)
    for server_state in group.server_states:
        group.sum_up(server_state, decision)
        for holder in group.holders_of(server_state):
            group.hand_over(server_state, holder, decision)
    heard = group.server_states[1]
    apply(heard, decision)
    for owner in heard.held.replicas:
        apply_replica(heard, owner, decision)
    group.lose(0)
    group.settle()
    group.check()


def test_several_hosts_an_update_without_a_commit_is_discarded() -> None:
    group = make_group(shared=False)
    before = [buffer.clone() for buffer in group.server_states[1].params.buffers]
    decision = group.decide()
    for server_state in group.server_states:
        group.sum_up(server_state, decision)
    group.lose(0)
    group.settle()
    for server_state in group.server_states:
        assert server_state.ledger.version == 0
    after = group.server_states[0].params.buffers
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_a_view_that_never_began_leaves_everything_as_it_was(group: ServerGroup) -> None:
    group.finish(group.decide())
    for _ in range(2):  # nobody hears go
        group.lose(2) if len(group.server_states) > 2 else group.join()
        group.settle()
        group.check()
    group.go()
    group.finish(group.decide())
    group.settle()
    group.check()


def some_fall_behind(group: ServerGroup) -> None:
    """An update of which each has done as much as the view's sudden end allows."""
    chance, decision = group.chance, group.decide(factor=group.chance.choice([1.0, 0.5]))
    newest = chance.choice(group.server_states)
    for server_state in group.server_states:
        group.sum_up(server_state, decision)
        if not group.shared:
            for holder in group.holders_of(server_state):
                group.hand_over(server_state, holder, decision)
    for server_state in group.server_states:
        if server_state is newest or chance.random() < 0.5:
            apply(server_state, decision)
            for owner in server_state.held.replicas:
                if not group.shared:
                    apply_replica(server_state, owner, decision)
    if group.shared:
        for owner in group.server_states:
            for holder in group.holders_of(owner):
                if owner.ledger.version == decision.version and chance.random() < 0.5:
                    group.hand_over(owner, holder, decision)
                    apply_replica(holder, owner.name, decision)
    # A server whose update was found by nobody else must not be the one that dies.
    group.server_states.remove(newest)
    group.server_states.append(newest)


@settings(max_examples=25)
@given(st.sampled_from(sorted(OPTIMIZERS)), st.booleans(), st.integers(2, 4), st.integers(0, 2**32))
def test_after_any_failures_all_servers_equal_the_reference(
    name: str, shared: bool, servers: int, seed: int
) -> None:
    group = make_group(name, shared=shared, servers=servers, seed=seed)
    chance = group.chance
    for _ in range(4):
        for _ in range(chance.randrange(3)):
            group.finish(group.decide())
        if chance.random() < 0.6:
            some_fall_behind(group)
        # One dies at a time: now, or while the next view is being prepared.
        dies = chance.choice(["now", "later", "never"]) if len(group.server_states) > 1 else "never"
        victim = group.server_states[chance.randrange(max(len(group.server_states) - 1, 1))]
        if dies == "now":
            group.server_states.remove(victim)
        if len(group.server_states) < 4 and chance.random() < 0.5:
            group.join()
        plan = group.settle()
        group.check()
        # A replica behind its owner was discarded, to be sent again: until then the owner must live.
        if dies == "later" and all(victim.name != owner for _, owner in plan.stale):
            group.server_states.remove(victim)
            group.settle()
            group.check()
        group.go()
    group.close()


# Parts ------------------------------------------------------------------------------------------


def test_the_schedule_clock_steps_once_per_batch() -> None:
    train_state = make_train_state("sgd")
    schedule_clock = ScheduleClock(train_state.scheduler)
    for ticks in (1, 1, 3, 2):
        schedule_clock.advance(ticks)
    assert schedule_clock.ticks == 3
    assert train_state.lr == pytest.approx(0.1 / 4)
    assert ScheduleClock(train_state.scheduler).ticks == 3, (
        "it continues where a checkpoint stopped"
    )


def test_a_block_that_is_not_held_here_is_an_error() -> None:
    train_state = make_train_state("sgd")
    layout = layout_for(train_state)
    server_state = ServerState(
        "s0",
        "h",
        train_state,
        FlatTensors.private(layout),
        ScheduleClock(train_state.scheduler),
        replicas=1,
    )
    with pytest.raises(AssertionError, match="s0 holds no block 0"):
        server_state.block_state(0)
    placement = place(layout, ["s0", "s1"])
    with pytest.raises(AssertionError, match="s0 holds no block"):
        server_state.prepare(2, placement, {}, fresh=False)


def test_sent_blocks_are_merged_into_spans() -> None:
    layout = layout_for(make_train_state("sgd"), block_bytes=64)
    (span,) = message_spans(layout, range(len(layout.blocks)))
    assert span.numel * 4 <= SPAN_BYTES
    assert [b.number for b in span.blocks] == list(range(len(layout.blocks)))
