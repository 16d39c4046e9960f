"""All-reduce of several hosts with several workers: each adds up in shared memory, and only its sums travel.

    begin       as inside a host (shared_sums.py)
    add up      when all of the host have begun: each worker writes the reduction of its span to a row that is
                for sums, and counts this in `done`
    exchange    when all are done, the leader (rank 0 of the host) begins an all-reduce of that row with the
                leaders of the other hosts
    over        when it ends, the leader counts this in `arrived`: each worker copies the row to its tensor

A thread of each worker adds up and exchanges, so that sums leave as soon as all have begun, while backward
runs: a network takes longer than the turns of the thread. Everything else, the copy at the end included, is
done in the worker's own thread.

The row for sums is written when all have begun the next operation in the same place, so all have copied it.
Leaders exchange in the order of operations, so sums have the same bits on all hosts, and in every run.

A death is noticed by the workers of its host, and by the leaders: the exchange of the others fails. They cut
the group, so it reaches everybody. Connections to workers of other hosts are not watched: one that leaves
after the last operation would look like a death to a worker that still waits for its leader.

Cost: 2 (h-1)/h of a tensor's bytes between h hosts, sent by the leaders; for each worker one copy more than
inside a host, and some turns of the thread.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

from manyhands.collectives.shared_sums import Check, Operation, SharedSums, SharedTable
from manyhands.collectives.sums import Reduction, reduce_in_order
from manyhands.threads import start_thread
from manyhands.transport.counters import LOOK_S

if TYPE_CHECKING:
    import socket

    from manyhands.collectives.group import Group


@dataclass
class Hosts:
    """The hosts of a group, as one of its workers sees them."""

    index: int
    """Of this worker's host."""
    num_hosts: int
    ranks: Sequence[int]
    """Those of this host's workers in the group."""
    leaders: Group | None
    """The leaders of all hosts, if this worker is one."""


class SumsBetweenHosts(SharedSums):
    """One worker's end."""

    block_bytes = 128 << 10
    """So few that torch adds them up in one thread: each thread that has more gets a team of its own."""

    def __init__(
        self,
        table: SharedTable,
        connections: Iterable[socket.socket],
        *,
        rank: int,
        size: int,
        check: Check,
        timeout_s: float,
        hosts: Hosts,
    ) -> None:
        """`connections`, `rank`, `size`: among the workers of this host."""
        super().__init__(table, connections, rank=rank, size=size, check=check, timeout_s=timeout_s)
        self._hosts = hosts
        self._to_send: deque[Operation] = deque()
        self._under_way: deque[tuple[int, Any, Any]] = deque()
        """Number, work and future. gloo calls back before the work says that it is complete, so the future is
        asked."""
        self._turn = threading.Condition()
        self._num_turns = 0
        self._failed: BaseException | None = None
        self._closed = False
        self._thread = start_thread(self._run, name="between-hosts", on_error=self._fail)

    def close(self) -> None:
        self._closed = True
        self.wake_up()
        self._thread.join()
        self._to_send.clear()
        self._under_way.clear()
        # Its traceback refers to this, and to operations that keep connections open.
        self._failed = None
        super().close()

    # How sums that travel differ from those of one host ---------------------------------------------

    @property
    def _num_rows(self) -> int:
        return self._size + 1

    @property
    def _result_row(self) -> int:
        return self._size

    def describe(self, network: str) -> str:
        return f"shared memory, between hosts {network}"

    def _host(self) -> tuple[int, int]:
        return self._hosts.index, self._hosts.num_hosts

    def _ranks_in_group(self, ranks: list[int]) -> list[int]:
        return [self._hosts.ranks[rank] for rank in ranks]

    def _reduce(self, blocks: list[list[Tensor]], op: Reduction) -> None:
        for *tensors, total in blocks:
            reduce_in_order(tensors, into=total, op=op)

    def _begin_small(self, flat: Tensor, op: Reduction) -> None:
        *rows, total = self._slot(flat)
        rows[self._rank].copy_(flat)

        def add_up() -> None:
            if self._hosts.leaders is not None:
                reduce_in_order(rows, into=total, op=op)

        self._begin(
            f"{op} of {flat.numel()} {flat.dtype}",
            op,
            add_up,
            result=total,
            alone=True,
            finish=lambda: flat.copy_(total),
        )

    def _is_over(self, operation: Operation) -> bool:
        return self.table.reached(self.table.arrived, operation.number)

    # In the worker's thread ---------------------------------------------------------------------

    def _queue(self, operation: Operation) -> None:
        if self._hosts.leaders is not None:
            self._to_send.append(operation)
        super()._queue(operation)

    def _advance(self) -> None:
        table = self.table
        if table.asleep[self._rank] and table.reached(table.begun, self._begun):
            self.wake_up()
        self._finish_all()

    def _wait(self, over: Callable[[], bool]) -> None:
        while True:
            turns = self._num_turns
            self._finish_all()
            if over():
                return
            self._check()
            if self._failed is not None:
                raise self._failed
            if self._closed:
                raise RuntimeError("all_reduce in a group that is closed")
            with self._turn:
                if turns == self._num_turns:
                    self._turn.wait(LOOK_S)

    # In the thread beside it --------------------------------------------------------------------

    def _run(self) -> None:
        table, since, ended = self.table, time.monotonic(), False
        before: object = None
        while not self._closed:
            counts = self._counts()
            self._add_up()
            self._exchange()
            self._end_turn()
            self._check()
            if self._nothing_to_wait_for() or counts != before:
                since, before = time.monotonic(), counts
            if ended and not self._nothing_to_wait_for():
                raise RuntimeError("all_reduce in shared memory: connection closed by peer")
            if time.monotonic() - since > self._timeout_s:
                raise RuntimeError(
                    f"timed out waiting for {self._missing()} ({self._timeout_s:g} s)"
                )
            table.store(table.asleep, self._rank, 1)
            table.fence()  # say so before looking for the last time
            if counts == self._counts() and not self._has_arrived() and not self._closed:
                ended = self._doorbell.wait(LOOK_S)
            table.asleep[self._rank] = 0

    def _counts(self) -> object:
        """Return all counts on which a turn depends."""
        table = self.table
        return min(table.begun), min(table.done), table.arrived[0], self._begun

    def _nothing_to_wait_for(self) -> bool:
        table = self.table
        return table.reached(table.arrived, self._begun) and table.reached(table.done, self._begun)

    def _exchange(self) -> None:
        """As a leader: send what is added up, and announce what has arrived."""
        leaders, table, news = self._hosts.leaders, self.table, False
        while self._to_send and self._is_added_up(self._to_send[0]):
            assert leaders is not None
            operation = self._to_send.popleft()
            work: Any = leaders.all_reduce(operation.result, op=operation.op, async_op=True)
            future = work.get_future()
            future.add_done_callback(lambda _: self.wake_up())
            self._under_way.append((operation.number, work, future))
        while self._has_arrived():
            number, work, _ = self._under_way.popleft()
            work.wait()  # raises its error
            news |= table.announce(table.arrived, 0, number)
        if news:
            self._ring()

    def _is_added_up(self, operation: Operation) -> bool:
        done = self.table.done[:1] if operation.alone else self.table.done
        return self.table.reached(done, operation.number)

    def _has_arrived(self) -> bool:
        return bool(self._under_way) and bool(self._under_way[0][2].done())

    def _fail(self, error: BaseException) -> None:
        self._failed = error
        self._end_turn()

    def _end_turn(self) -> None:
        with self._turn:
            self._num_turns += 1
            self._turn.notify_all()
