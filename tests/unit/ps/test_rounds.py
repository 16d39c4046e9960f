"""Rounds in shared memory, driven by hand: who is waited for, and that nothing is done twice."""

from __future__ import annotations

import math
import random
import threading
from pathlib import Path

import pytest
from server_states import Village, noise

from manyhands.embeddings.spec import Table as TableSpec
from manyhands.embeddings.table_stores import EVICT_EVERY, TableStores
from manyhands.ps.block_store import squared_norm
from manyhands.ps.ledger import Contribution
from manyhands.ps.mode import PsMode
from manyhands.ps.policies import SyncPolicy
from manyhands.ps.rounds import Doorbell, RoundServer, RoundTable, RoundWorker
from manyhands.ps.rows import ReceivedGrads, RowServerState

CLIP_NORM = 0.5


@pytest.mark.parametrize("tries", [1, 4])
def test_a_sum_is_clipped_once_however_often_a_round_is_tried(tries: int, tmp_path: Path) -> None:
    """The first server waits for the others where rows are evicted, and tries again and again."""
    village = Village("plain", shared=True, chance=random.Random(1), block_bytes=128)
    first, second = village.join(), village.join()
    village.settle()
    village.go()
    rounds = RoundTable.create(village.workers, [first.name, second.name])
    bells = {name: Doorbell(tmp_path, name) for name in (*village.workers, *rounds.servers)}
    servings = {}
    mode = PsMode(SyncPolicy, rounds=True, slots=1, for_all=True, clip_norm=CLIP_NORM)
    for server_state in (first, second):
        spec = TableSpec(2, evict_unused=5)
        server_state.rows = RowServerState(
            server_state.name, TableStores({"t": spec}, seed=0), shared=True, adds=False
        )
        server_state.rows.baskets = {worker: [ReceivedGrads()] for worker in village.workers}
        assert server_state.held.placement is not None
        servings[server_state.name] = RoundServer(
            *(rounds, bells[server_state.name], server_state, mode, server_state.held.placement),
            lock=threading.RLock(),
        )
    for worker in village.workers:
        village.slots[worker][0].copy_(noise(village.layout, village.generator))
        turns = RoundWorker(
            worker, rounds, bells[worker], server=None, check=lambda: None, timeout_s=10.0
        )
        turns.push(Contribution(worker, 1, 0, EVICT_EVERY, 0, 8.0, 24.0, (8, 24)))
    try:
        assert not servings[second.name].carry(1)  # its part of the norm is there
        for _ in range(tries):
            assert not servings[first.name].carry(1)
        assert servings[second.name].carry(1)
        assert servings[first.name].carry(1)
        made = [squared_norm(e.sums.of(1), e.own.runs) for e in (first, second)]
        assert math.sqrt(sum(made)) == pytest.approx(CLIP_NORM, rel=1e-4)
        assert first.ledger.decisions[0] == second.ledger.decisions[0]
    finally:
        for each in (rounds, *bells.values()):
            each.close()
        village.close()
