"""Rounds in shared memory, step by step: members wait for each other, and nothing is done twice."""

from __future__ import annotations

import gc
import math
import multiprocessing
import random
import threading
import time
import weakref
from pathlib import Path
from typing import Any

import pytest
from server_states import ServerGroup, noise

import manyhands.ps.rounds as rounds_module
from manyhands.embeddings.spec import Table as TableSpec
from manyhands.embeddings.table_stores import EVICT_EVERY, TableStores
from manyhands.ps.block_store import squared_norm
from manyhands.ps.mode import PsMode
from manyhands.ps.policies import Contribution, SyncPolicy
from manyhands.ps.rounds import RoundServer, RoundTable, RoundWorker
from manyhands.ps.rows import ReceivedGrads, SharedRowState
from manyhands.transport.counters import Doorbell
from manyhands.transport.shm import Segment

CLIP_NORM = 0.5


@pytest.mark.parametrize("tries", [1, 4])
def test_a_sum_is_clipped_once_however_often_a_round_is_retried(tries: int, tmp_path: Path) -> None:
    """The first server waits for the others where rows are evicted, and tries again and again."""
    group = ServerGroup("plain", shared=True, chance=random.Random(1), block_bytes=128)
    first, second = group.join(), group.join()
    group.settle()
    group.go()
    rounds = RoundTable.create(group.workers, [first.name, second.name])
    doorbells = {name: Doorbell(tmp_path, name) for name in (*group.workers, *rounds.servers)}
    servings = {}
    mode = PsMode(SyncPolicy, rounds=True, slots=1, for_all=True, clip_norm=CLIP_NORM)
    for server_state in (first, second):
        spec = TableSpec(2, evict_unused=5)
        server_state.rows = SharedRowState(
            server_state.name, TableStores({"t": spec}, seed=0), adds=False
        )
        server_state.rows.grads = {worker: [ReceivedGrads()] for worker in group.workers}
        assert server_state.held.placement is not None
        servings[server_state.name] = RoundServer(
            *(
                rounds,
                doorbells[server_state.name],
                server_state,
                mode,
                server_state.held.placement,
            ),
            lock=threading.RLock(),
        )
    for worker in group.workers:
        group.slots[worker][0].copy_(noise(group.layout, group.generator))
        member = RoundWorker(
            worker, rounds, doorbells[worker], server=None, check=lambda: None, timeout_s=10.0
        )
        member.push(Contribution(worker, 1, 0, EVICT_EVERY, 0, 8.0, 24.0, (8, 24)))
    try:
        assert not servings[second.name].carry(1)  # its part of the norm is there
        for _ in range(tries):
            assert not servings[first.name].carry(1)
        assert servings[second.name].carry(1)
        assert servings[first.name].carry(1)
        made = [squared_norm(e.sums.of(1), e.own.spans) for e in (first, second)]
        assert math.sqrt(sum(made)) == pytest.approx(CLIP_NORM, rel=1e-4)
        assert first.ledger.decisions[0] == second.ledger.decisions[0]
    finally:
        for each in (rounds, *doorbells.values()):
            each.close()
        group.close()


def test_a_server_that_has_stopped_frees_the_table_without_the_cyclic_collector(
    tmp_path: Path,
) -> None:
    """Else each view change leaves two descriptors behind until the collector happens to run."""
    group = ServerGroup("plain", shared=True, chance=random.Random(1), block_bytes=128)
    state = group.join()
    group.settle()
    group.go()
    rounds = RoundTable.create(group.workers, [state.name])
    doorbell = Doorbell(tmp_path, state.name)
    mode = PsMode(SyncPolicy, rounds=True, slots=1, for_all=True)
    assert state.held.placement is not None
    server = RoundServer(
        *(rounds, doorbell, state, mode, state.held.placement), lock=threading.RLock()
    )
    table = weakref.ref(rounds)
    gc.disable()
    try:
        server.freeze()
        server.stop()
        del server, rounds
        assert table() is None
    finally:
        gc.enable()
        doorbell.close()
        group.close()


# Memory order -----------------------------------------------------------------------------------

NUM_MEMBERS = 2
LONG_S = 60.0


class AddingServer:
    """Adds up one number of each worker, and fails if it reads one of another round."""

    def __init__(self, table: RoundTable, doorbell: Doorbell, numbers: memoryview, me: int) -> None:
        self._table, self._doorbell, self._numbers, self._me = table, doorbell, numbers, me
        self.done = 0

    def carry(self, number: int) -> bool:
        table = self._table
        if number <= self.done:
            return True
        if not table.reached(table.pushed, number):
            return False
        for i in range(NUM_MEMBERS):
            push = table.read_push(i, number)
            assert (self._numbers[i], push.step, push.samples) == (number, number, number * 0.5), (
                f"worker {i} in round {number}: {self._numbers[i]}, {push}"
            )
        self._numbers[NUM_MEMBERS + self._me] = number * NUM_MEMBERS
        self.done = number
        if table.announce(table.applied, self._me, number):
            self._doorbell.ring(name for name in table.workers if name != self._doorbell.name)
        return True


def run_member(me: int, rounds: int, addresses: tuple[str, str], folder: Path) -> None:
    """A worker that serves too. Without a ring nothing wakes it before the time limit."""
    rounds_module.LOOK_S = 10 * LONG_S
    names = [f"w{i}" for i in range(NUM_MEMBERS)]
    table = RoundTable.attach(addresses[0], names, names)
    numbers: Any = Segment.attach(addresses[1]).memory.cast("q")
    doorbell = Doorbell(folder, names[me])
    table.announce(table.summed, me, 1)
    deadline = time.monotonic() + LONG_S
    while not table.reached(table.summed, 1):  # until all have a doorbell
        assert time.monotonic() < deadline
        time.sleep(0.01)
    server: Any = AddingServer(table, doorbell, numbers, me)
    worker = RoundWorker(
        names[me], table, doorbell, server=server, check=lambda: None, timeout_s=LONG_S
    )
    for number in range(1, rounds + 1):
        numbers[me] = number
        worker.push(Contribution(names[me], number, step=number, samples=number * 0.5))
        worker.finish()
        sums = list(numbers[NUM_MEMBERS : 2 * NUM_MEMBERS])
        assert sums == [number * NUM_MEMBERS] * NUM_MEMBERS, f"round {number}: {sums}"


@pytest.mark.parametrize("rounds", [20_000, pytest.param(1_000_000, marks=pytest.mark.long)])
def test_counters_order_memory_and_no_ring_is_lost(rounds: int, tmp_path: Path) -> None:
    """Members see what was written before a counter, and never both miss that a count is complete."""
    names = [f"w{i}" for i in range(NUM_MEMBERS)]
    table = RoundTable.create(names, names)
    segment = Segment.create(8 * 2 * NUM_MEMBERS)
    context = multiprocessing.get_context("spawn")
    addresses = (table.address, segment.address)
    members = [
        context.Process(target=run_member, args=(me, rounds, addresses, tmp_path), daemon=True)
        for me in range(NUM_MEMBERS)
    ]
    try:
        for member in members:
            member.start()
        # If one waits in vain, no round is completed for a while.
        last, progressed = 0, time.monotonic()
        while any(member.is_alive() for member in members):
            members[0].join(0.2)
            if (now := min(table.applied)) > last:
                last, progressed = now, time.monotonic()
            assert time.monotonic() - progressed < 2 * LONG_S, f"it stands still in round {last}"
            assert not any(member.exitcode for member in members), "a member has failed"
        assert min(table.applied) == rounds
    finally:
        for member in members:
            member.kill()
            member.join()
        table.close()
        segment.close()
