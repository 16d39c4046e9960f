"""The placement of rows when servers join and die."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from manyhands.embeddings.row_placement import SHARDS, RowPlacement
from manyhands.errors import ManyhandsError

NAMES = [f"s{i}" for i in range(6)]


@pytest.mark.parametrize("count", [1, 2, 3, 6])
def test_a_fresh_placement_is_even_with_two_holders_per_shard(count: int) -> None:
    servers = NAMES[:count]
    placement = RowPlacement.fresh(servers, replicas=1)
    assert len(placement.holders) == SHARDS
    assert all(len(set(held)) == len(held) == min(2, count) for held in placement.holders)
    firsts = [sum(held[0] == name for held in placement.holders) for name in servers]
    assert max(firsts) - min(firsts) <= 1
    seconds = [sum(name in held[1:] for held in placement.holders) for name in servers]
    assert max(seconds) - min(seconds) <= count


@given(st.lists(st.sampled_from(["die", "join"]), max_size=12), st.randoms())
@settings(max_examples=200, deadline=None)
def test_no_row_is_lost_while_one_dies_at_a_time(happens: list[str], random: object) -> None:
    servers, fresh = list(NAMES[:3]), iter(f"n{i}" for i in range(99))
    placement = RowPlacement.fresh(servers, replicas=1)
    having = {name: set(placement.shards_of(name)) for name in servers}
    for event in happens:
        if event == "die" and len(servers) > 1:
            servers.remove(random.choice(servers))  # type: ignore[attr-defined]
        elif event == "join" and len(servers) < 6:
            servers.append(next(fresh))
        good = [name for name in placement.servers if name in servers]
        after = placement.after(servers, good, replicas=1)
        for move in after.moves_from(placement, good):
            assert move.shard in having[move.source], "it gives what it has"
            assert move.target != move.source
            having.setdefault(move.target, set()).add(move.shard)
        for shard, held in enumerate(after.holders):
            assert len(set(held)) == len(held) == min(2, len(servers))
            assert all(shard in having[name] for name in held)
        having = {name: set(after.shards_of(name)) for name in servers}
        firsts = [sum(held[0] == name for held in after.holders) for name in servers]
        assert max(firsts) <= -(-SHARDS // len(servers)) + SHARDS // 4
        placement = after


def test_a_death_moves_only_shards_that_lost_a_holder() -> None:
    before = RowPlacement.fresh(NAMES[:4], replicas=1)
    after = before.after(NAMES[1:4], NAMES[1:4], replicas=1)
    moved = {move.shard for move in after.moves_from(before, NAMES[1:4])}
    assert moved <= {shard for shard, held in enumerate(before.holders) if "s0" in held}


def test_rows_without_a_holder_are_lost_and_the_error_names_the_servers() -> None:
    placement = RowPlacement.fresh(NAMES[:3], replicas=0)
    with pytest.raises(ManyhandsError, match="was on s1, and is lost"):
        placement.after(["s0", "s2"], ["s0", "s2"], replicas=0)


def test_ids_are_pulled_from_the_primary_and_held_by_both() -> None:
    placement = RowPlacement.fresh(NAMES[:3], replicas=1)
    ids = np.arange(-500, 500, dtype=np.int64) * 1_000_003
    asked = placement.server_of(ids)
    held = np.stack([placement.held_by(name, ids) for name in placement.servers])
    assert (held.sum(axis=0) == 2).all()
    assert held[asked, np.arange(len(ids))].all()
