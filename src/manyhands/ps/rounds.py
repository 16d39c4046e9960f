"""Synchronous rounds inside one host, coordinated through shared memory, almost without messages.

If every update consists of the gradients of all workers, no server has to decide what the next update is. All
members share a RoundTable. When it shows that all workers have pushed, each server sums the gradients of its
own blocks and applies the update; when it shows that all servers have applied it, the workers continue. The
member that completes a count wakes the others through their doorbells; nothing else is sent. A worker that is
also a server does the server's part itself instead of waiting.

    push      writes its round and contribution         the last worker rings the servers
    add up    writes its part of the norm, if clipped   the last server rings the servers
    apply     writes `applied`                          the last server rings the workers
    follow    applies other servers' sums to their replicas, in a separate thread, and writes `taken`: the
              sum's buffer is free

Cost per step: two or three barriers, each with about one datagram per member, whatever the number of blocks.
Counters and doorbells: transport/counters.py.
"""

from __future__ import annotations

import struct
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from manyhands.errors import LinkTimeout
from manyhands.hosts.activity import WAITING, Activity
from manyhands.ps.mode import PsMode
from manyhands.ps.placement import Placement
from manyhands.ps.policies import Contribution, Decision
from manyhands.ps.server_state import ServerState
from manyhands.ps.updates import UpdateExchange, UpdatePipeline, apply_replica
from manyhands.threads import OnError, start_thread
from manyhands.transport.counters import COUNTER_BYTES, LOOK_S, Doorbell, SharedCounters
from manyhands.transport.shm import Segment

if TYPE_CHECKING:
    from manyhands.contract import StepReport

SHORT_S = 0.001
"""Interval at which a server checks whether a sum's buffer is free; see `RoundTable.patience_s`."""
_PUSH = struct.Struct("=5q4d")
"""Fields: step, part, share (numerator and denominator), ticks, samples, total, lr_factor, loss."""


class RoundTable(SharedCounters):
    """Progress of each member, as round numbers, and the workers' contributions, in shared memory."""

    def __init__(self, segment: Segment, workers: Sequence[str], servers: Sequence[str]) -> None:
        super().__init__()
        self.workers, self.servers = list(workers), list(servers)
        self._segment = segment
        sizes = [len(workers), *[len(servers)] * 5, 1]
        columns = self.columns(segment.memory, sizes)
        self.pushed, self.measured, self.summed, self.applied, self.taken = columns[:5]
        self.norm, self.ticks = columns[5].cast("B").cast("d"), columns[6]
        self._pushes = segment.memory[COUNTER_BYTES * sum(sizes) :]

    @property
    def address(self) -> str:
        return self._segment.address

    def close(self) -> None:
        """Refuse new members. Members that have attached it can still read it."""
        self._segment.close()

    @classmethod
    def create(cls, workers: Sequence[str], servers: Sequence[str]) -> RoundTable:
        counters = len(workers) + 5 * len(servers) + 1
        nbytes = COUNTER_BYTES * counters + _PUSH.size * len(workers)
        return cls(Segment.create(nbytes, label="manyhands-rounds"), workers, servers)

    @classmethod
    def attach(cls, address: str, workers: Sequence[str], servers: Sequence[str]) -> RoundTable:
        return cls(Segment.attach(address), workers, servers)

    def write_push(self, i: int, push: Contribution) -> None:
        """Write the contribution of worker `i` to the round that it announces next."""
        numbers = (push.step, push.part, *push.share, push.ticks)
        weights = (push.samples, push.total, push.lr_factor, push.loss)
        _PUSH.pack_into(self._pushes, i * _PUSH.size, *numbers, *weights)

    def read_push(self, i: int, number: int) -> Contribution:
        """Read the contribution of worker `i` to a round that it has announced."""
        step, part, share, of, ticks, samples, total, factor, loss = _PUSH.unpack_from(
            self._pushes, i * _PUSH.size
        )
        return Contribution(
            *(self.workers[i], number, 0, step, part, samples, total, (share, of)),
            lr_factor=factor,
            ticks=ticks,
            loss=loss,
        )

    def patience_s(self, number: int) -> float:
        """Return the timeout of one wait for the doorbell. It is short once all workers have pushed: a server
        may then wait for a sum's buffer that a replica still reads, and freeing it rings no doorbell."""
        return SHORT_S if self.reached(self.pushed, number) else LOOK_S


class RoundServer(UpdateExchange):
    """Server side of a round: updates its own blocks and the replicas that it holds."""

    def __init__(
        self,
        table: RoundTable,
        doorbell: Doorbell,
        server_state: ServerState,
        mode: PsMode,
        placement: Placement,
        *,
        lock: AbstractContextManager[Any],
    ) -> None:
        """Create the server side. `lock` is held by the thread that is working on the server's blocks."""
        self._table = table
        self._doorbell = doorbell
        self._server_state = server_state
        self._base = server_state.ledger.version
        """The version before round 1."""
        self._me = table.servers.index(server_state.name)
        self.may_evict = self._me == 0
        mine = placement.blocks_of(server_state.name)
        replica_holders = {placement.replica_of(block) for block in mine} - {None}
        self._replica_holders = [
            table.servers.index(name) for name in replica_holders if name is not None
        ]
        self._kept = {name: table.servers.index(name) for name in server_state.held.replicas}
        self._pipeline = UpdatePipeline(server_state, mode, self)
        self._lock = lock
        self._stopped = False
        self._has_news = threading.Event()
        """Set when there may be updates to apply to replicas."""

    @property
    def done(self) -> int:
        """Number of the last round that is applied here."""
        return self._server_state.ledger.version - self._base

    def start(self, *, colocated: bool, on_error: OnError) -> None:
        """Start the thread. If this process has no worker, it does whole rounds, otherwise only `follow`."""
        name = f"{self._server_state.name}-rounds"
        if not colocated:
            start_thread(self._carry_all, name=name, on_error=on_error)
        elif self._kept:
            start_thread(self._follow_all, name=name, on_error=on_error)

    def carry(self, number: int) -> bool:
        """Do as much of a round as is possible now. Returns whether the round is applied here."""
        if number <= self.done:
            return True
        with self._lock:
            if self._stopped or not self._table.reached(self._table.pushed, number):
                return False
            if self._pipeline.decided < self._base + number:
                self._pipeline.enqueue(self._decision(number))
            else:
                self._pipeline.advance()
            if number > self.done:
                return False
        self._has_news.set()
        return True

    def follow(self) -> None:
        """Apply to the replicas here all updates that this server has applied to its own blocks."""
        table, state = self._table, self._server_state
        versions = state.held.versions
        for owner, i in self._kept.items():
            last = self._base + min(self.done, table.load(table.summed, i))
            for decision in state.ledger.between(versions[owner], last):
                apply_replica(state, owner, decision)
        if self._kept:
            taken = min(versions[owner] for owner in self._kept) - self._base
            table.store(table.taken, self._me, taken)

    def freeze(self) -> None:
        """Stop carrying out rounds, because the view is over, and wake the thread so that it ends."""
        self._stopped = True
        self._has_news.set()
        self._doorbell.ring([self._doorbell.name])

    def stop(self) -> None:
        """Note which sums of other servers are complete, for the server that takes over. No round can be
        carried out after this."""
        del self._pipeline  # breaks a cycle that would keep the memory of the view alive
        self.follow()
        for owner, i in self._kept.items():
            for number in (self._table.summed[i] - 1, self._table.summed[i]):
                if number > 0:
                    self._server_state.others[owner].note(self._base + number)

    def _carry_all(self) -> None:
        number = 1
        while not self._stopped:
            if self.carry(number):
                number += 1
                with self._lock:
                    self.follow()
            else:
                self._doorbell.wait(self._table.patience_s(number))

    def _follow_all(self) -> None:
        while not self._stopped:
            self._has_news.wait()
            self._has_news.clear()
            with self._lock:
                if not self._stopped:
                    self.follow()

    def _decision(self, number: int) -> Decision:
        table = self._table
        contributions = tuple(table.read_push(i, number) for i in range(len(table.workers)))
        before = self._server_state.ledger.progress
        return Decision.of(self._base + number, contributions, before=before)

    # Exchange -----------------------------------------------------------------------------------

    def is_free(self, version: int) -> bool:
        table, last = self._table, version - self._base - 2
        return all(table.load(table.taken, i) >= last for i in self._replica_holders)

    def share_norm(self, version: int, squared: float) -> None:
        self._table.norm[self._me] = squared
        self._announce(self._table.measured, version, self._table.servers)

    def norms(self, version: int) -> Sequence[float] | None:
        table = self._table
        return list(table.norm) if table.reached(table.measured, version - self._base) else None

    def replicate(self, decision: Decision) -> None:
        self._table.store(self._table.summed, self._me, decision.version - self._base)

    def is_final(self, decision: Decision) -> bool:
        """Return True at once, with one exception: the first server evicts rows, and only when all other
        servers have applied the update and are waiting for it."""
        rows = self._server_state.rows
        if rows is None or not self.may_evict or not rows.evicts(decision):
            return True
        return self._table.reached(self._table.applied[1:], decision.version - self._base)

    def applied(self, decision: Decision) -> None:
        if not self._me:
            self._table.ticks[0] = decision.ticks
        self._announce(self._table.applied, decision.version, self._table.workers)

    def _announce(self, column: memoryview, version: int, members: Sequence[str]) -> None:
        if self._table.announce(column, self._me, version - self._base):
            self._doorbell.ring(name for name in members if name != self._doorbell.name)


class RoundWorker:
    """Worker side of a round: pushes, and waits until all servers have applied the round."""

    def __init__(
        self,
        worker: str,
        table: RoundTable,
        doorbell: Doorbell,
        *,
        server: RoundServer | None,
        check: Callable[[], None],
        timeout_s: float,
        activity: Activity | None = None,
    ) -> None:
        """Create the worker side. `server` is the server of this process, if any. `check` raises if the view
        is over, so that waiting is pointless."""
        self.seq = 0
        self._table = table
        self._doorbell = doorbell
        self._server = server
        self._check = check
        self._timeout_s = timeout_s
        self._activity = activity or Activity()
        self._me = table.workers.index(worker)

    @property
    def ticks(self) -> int:
        return int(self._table.ticks[0])

    def begin(self) -> tuple[int, int]:
        """Return the number of the next round, and the slot for its gradient (there is only one)."""
        return self.seq + 1, 0

    def accumulating(self) -> AbstractContextManager[None]:
        return nullcontext()

    def take_bytes_sent(self) -> int:
        return 0

    def drain(self) -> None:
        """Do nothing: no push is pending after a round."""

    def push(
        self,
        push: Contribution,
        report: StepReport | None = None,
        rows: Mapping[str, memoryview] | None = None,
    ) -> None:
        """Announce that the gradient of the next round is in shared memory."""
        table = self._table
        self.seq += 1
        table.write_push(self._me, push)
        if table.announce(table.pushed, self._me, self.seq):
            self._doorbell.ring(name for name in table.servers if name != self._doorbell.name)

    def finish(self) -> None:
        """Do this process's part of the round, and wait until all servers have applied it."""
        with self._activity.during(WAITING):
            self._finish()

    def _finish(self) -> None:
        table, began = self._table, time.monotonic()
        while not table.reached(table.applied, self.seq):
            done = self._server is None or self._server.carry(self.seq)
            if table.reached(table.applied, self.seq):
                return
            self._doorbell.wait(LOOK_S if done else table.patience_s(self.seq))
            if table.reached(table.applied, self.seq):
                return
            self._check()
            if time.monotonic() - began > self._timeout_s:
                raise LinkTimeout(self._too_long(time.monotonic() - began))

    def _too_long(self, waited_s: float) -> str:
        table = self._table
        missing = _behind(table.workers, table.pushed, self.seq) or _behind(
            table.servers, table.applied, self.seq
        )
        return f"{table.workers[self._me]} timed out after {waited_s:.0f} s: waiting for {', '.join(missing)}"


def _behind(names: Sequence[str], column: memoryview, number: int) -> list[str]:
    return [name for name, reached in zip(names, column, strict=True) if reached < number]
