"""Rounds that wait for all, inside one host: agreed on in shared memory, almost without messages.

Where an update is everybody's gradients, nobody needs to decide what the next one is: each server sees in
a shared Table that all workers have pushed, adds up its own blocks and applies them, and each worker sees
there that all servers have. Who completes a count rings the others' bells; that is all that is sent. A
worker that serves too does the server's part itself, in the time in which it would wait.

    push      table: my round, what I give              the last one rings the servers
    add up    table: my part of the norm, if clipped    the last one rings the servers
    apply     table: applied                            the last one rings the workers
    follow    replicas of others, from their sums, when there is time; table: taken, their place is free

Cost a step: two or three barriers of about as many datagrams as there are members, however many blocks.
Numbers in the table are eight bytes at a multiple of eight: a processor writes and reads them at once.
"""

from __future__ import annotations

import math
import select
import socket
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from manyhands.errors import LinkTimeout
from manyhands.ps.block_store import scale, squared_norm
from manyhands.ps.ledger import Contribution, Decision, lr_factor, progress_after
from manyhands.ps.placement import Placement
from manyhands.ps.rows import step_of
from manyhands.ps.server_state import ServerState
from manyhands.transport.shm import Segment

LOOK_S = 0.2
"""How often a waiting member looks whether there is anything to wait for."""
SHORT_S = 0.001
_WORKER = ("pushed", "step", "part", "share", "of", "advance")
_WEIGHTS = ("samples", "total", "lr_factor", "loss")
"""Of each worker, too: numbers that are not whole."""
_SERVER = ("summed", "applied", "taken", "measured")


class RoundTable:
    """Where each member stands: numbers of rounds, and what workers give."""

    def __init__(self, segment: Segment, workers: Sequence[str], servers: Sequence[str]) -> None:
        self.workers, self.servers = list(workers), list(servers)
        self._segment = segment
        self._fence = threading.Lock()
        counts = [len(workers)] * len(_WORKER) + [len(servers)] * len(_SERVER) + [1]
        floats = [len(workers)] * len(_WEIGHTS) + [len(servers)]
        memory: Any = segment.memory
        offset = 0
        columns: list[Any] = []
        for count, kind in [(c, "q") for c in counts] + [(c, "d") for c in floats]:
            columns.append(memory[offset : offset + 8 * count].cast(kind))
            offset += 8 * count
        self.pushed, self.step, self.part, self.share, self.of, self.advance = columns[:6]
        self.summed, self.applied, self.taken, self.measured = columns[6:10]
        self.ticks = columns[10]
        self.samples, self.total, self.lr_factor, self.loss, self.norm = columns[11:]

    @property
    def address(self) -> str:
        return self._segment.address

    def close(self) -> None:
        """Nobody comes any more. Whoever has it may still look."""
        self._segment.close()

    @classmethod
    def create(cls, workers: Sequence[str], servers: Sequence[str]) -> RoundTable:
        return cls(
            Segment.create(cls._size(workers, servers), label="manyhands-rounds"), workers, servers
        )

    @classmethod
    def attach(cls, address: str, workers: Sequence[str], servers: Sequence[str]) -> RoundTable:
        return cls(Segment.attach(address), workers, servers)

    @staticmethod
    def _size(workers: Sequence[str], servers: Sequence[str]) -> int:
        a_worker, a_server = len(_WORKER) + len(_WEIGHTS), len(_SERVER) + 1
        return 8 * (len(workers) * a_worker + len(servers) * a_server + 1)

    def reached(self, column: memoryview, number: int) -> bool:
        """Everybody has, in this column. After a write of one's own: see `fence`."""
        return min(column) >= number

    def patience(self, number: int) -> float:
        """How long to wait for a bell in a round. When all have pushed it is short: what a server may
        wait for then, the place of a sum that a keeper still reads, is freed without a ring."""
        return SHORT_S if self.reached(self.pushed, number) else LOOK_S

    def fence(self) -> None:
        """What was written is seen by others before anything is read: else two who complete a count
        might each miss the other, and nobody would ring."""
        with self._fence:
            pass


class Doorbell:
    """Wakes one member."""

    def __init__(self, folder: Path, name: str) -> None:
        self._folder = folder
        self._path = self._path_of(name)
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._sock.setblocking(False)
        with suppress(FileNotFoundError):
            Path(self._path).unlink()
        self._sock.bind(self._path)
        self._poll = select.poll()
        self._poll.register(self._sock, select.POLLIN)
        self.name = name

    def ring(self, names: Iterable[str]) -> None:
        """Wake others. One whose bell is full, or gone, needs no ring."""
        for name in names:
            with suppress(OSError):
                self._sock.sendto(b"!", self._path_of(name))

    def wait(self, timeout_s: float) -> None:
        """Until it rings, or the time is over; it may have rung for something that is long done."""
        if self._poll.poll(timeout_s * 1000):
            with suppress(OSError):
                for _ in range(64):  # whoever rings without end must not hold this member up
                    self._sock.recv(16)

    def close(self) -> None:
        self._sock.close()
        with suppress(OSError):
            Path(self._path).unlink()

    def _path_of(self, name: str) -> str:
        return f"{self._folder}/bell-{name}"


class RoundServer:
    """The servers' half: one of them, for its own blocks and the replicas that it keeps."""

    def __init__(
        self,
        table: RoundTable,
        bell: Doorbell,
        server_state: ServerState,
        placement: Placement,
        *,
        clip_norm: float | None,
    ) -> None:
        self.done = 0
        """The last round that is applied here."""
        self._table = table
        self._bell = bell
        self._server_state = server_state
        self._clip_norm = clip_norm
        self._base = server_state.ledger.version
        self._me = table.servers.index(server_state.name)
        self._summed: Decision | None = None
        """What is added up, and not applied yet."""
        self._clipped: Decision | None = None
        """The same once its sum is clipped, in place: never a second time."""
        mine = placement.blocks_of(server_state.name)
        keepers = {placement.replica_of(block) for block in mine} - {None}
        self._keepers = [table.servers.index(name) for name in keepers if name is not None]
        self._kept = {name: table.servers.index(name) for name in server_state.held.replicas}

    def carry(self, number: int) -> bool:
        """As much of a round as is possible now; True when it is applied here."""
        table, server_state = self._table, self._server_state
        if number <= self.done:
            return True
        if not table.reached(table.pushed, number):
            return False
        decision = self._whole_sum(number)
        if decision is None:
            return False
        rows, alone = server_state.rows, False
        if rows is not None and not self._me and rows.evicts(decision):
            # While all others have done their part, and wait for this one.
            alone = all(applied >= number for applied in table.applied[1:])
            if not alone:
                return False
        server_state.sums.note(decision.version)
        table.summed[self._me] = number
        server_state.apply(decision)
        if rows is not None and alone:
            rows.tables.evict(step_of(decision))
        self._summed = self._clipped = None
        self.done = number
        if not self._me:
            table.ticks[0] = decision.ticks
        self._tell(table.applied, number, table.workers)
        return True

    def follow(self) -> None:
        """Bring the replicas that are kept here up to what is applied here."""
        table, server_state = self._table, self._server_state
        if not self._kept:
            return
        versions = server_state.held.versions
        for owner, index in self._kept.items():
            last = min(self._base + self.done, self._base + table.summed[index])
            for decision in server_state.ledger.between(versions[owner], last):
                server_state.apply_replica(owner, decision)
        table.taken[self._me] = min(versions[owner] for owner in self._kept) - self._base

    def stop(self) -> None:
        """The view is over: note which sums of others are complete, for whoever takes over."""
        self.follow()
        for owner, index in self._kept.items():
            for number in (self._table.summed[index] - 1, self._table.summed[index]):
                if number > 0:
                    self._server_state.others[owner].note(self._base + number)

    def _whole_sum(self, number: int) -> Decision | None:
        """Add up and clip, each once, however often a round is tried; None while others are waited for."""
        table, server_state = self._table, self._server_state
        if self._clipped is not None:
            return self._clipped
        if self._summed is None and not self._add_up(number):
            return None
        decision = self._summed
        assert decision is not None
        if self._clip_norm is not None:
            if not table.reached(table.measured, number):
                return None
            # In one order: every server computes the same factor from the same numbers.
            norm = math.sqrt(math.fsum(table.norm))
            factor = min(1.0, self._clip_norm / (norm + 1e-6))
            decision = replace(decision, factor=factor)
            scale(server_state.sums.of(decision.version), server_state.own.runs, factor)
        self._clipped = decision
        return decision

    def _add_up(self, number: int) -> bool:
        table, server_state = self._table, self._server_state
        if any(table.taken[keeper] < number - 2 for keeper in self._keepers):
            return False
        decision = self._decision(number)
        sums = server_state.sums.of(decision.version)
        server_state.add_up(decision, sums, server_state.own.runs)
        self._summed = decision
        if self._clip_norm is not None:
            table.norm[self._me] = squared_norm(sums, server_state.own.runs)
            self._tell(table.measured, number, table.servers)
        return True

    def _tell(self, column: memoryview, number: int, whom: Sequence[str]) -> None:
        column[self._me] = number
        self._table.fence()
        if self._table.reached(column, number):
            self._bell.ring(name for name in whom if name != self._bell.name)

    def _decision(self, number: int) -> Decision:
        table = self._table
        given = tuple(
            Contribution(
                worker=worker,
                seq=number,
                slot=0,
                step=table.step[i],
                part=table.part[i],
                samples=table.samples[i],
                total=table.total[i],
                share=(table.share[i], table.of[i]),
                lr_factor=table.lr_factor[i],
                ticks=table.advance[i],
                loss=table.loss[i],
            )
            for i, worker in enumerate(table.workers)
        )
        progress = progress_after(self._server_state.ledger.progress, given)
        return Decision(
            self._base + number,
            given,
            lr_scale=lr_factor(given),
            progress=(progress.numerator, progress.denominator),
        )


class RoundWorker:
    """A worker's half."""

    def __init__(
        self,
        worker: str,
        table: RoundTable,
        bell: Doorbell,
        *,
        carry: Callable[[int], bool] | None,
        check: Callable[[], None],
        timeout_s: float,
    ) -> None:
        """`carry` does the part of the server in this process, if there is one. `check` raises when
        there is nothing to wait for any more."""
        self.seq = 0
        self._table = table
        self._bell = bell
        self._carry = carry
        self._check = check
        self._timeout_s = timeout_s
        self._me = table.workers.index(worker)

    @property
    def ticks(self) -> int:
        return int(self._table.ticks[0])

    def push(
        self,
        *,
        step: int,
        part: int,
        samples: float,
        total: float,
        share: tuple[int, int],
        lr_factor: float = 1.0,
        ticks: int = 1,
        loss: float = 0.0,
    ) -> None:
        """The gradient of the next round is in its place."""
        table, me = self._table, self._me
        table.step[me], table.part[me] = step, part
        table.share[me], table.of[me] = share
        table.samples[me], table.total[me] = samples, total
        table.lr_factor[me], table.advance[me] = lr_factor, ticks
        table.loss[me] = loss
        self.seq += 1
        table.pushed[me] = self.seq
        table.fence()
        if table.reached(table.pushed, self.seq):
            self._bell.ring(name for name in table.servers if name != self._bell.name)

    def finish(self) -> None:
        """Until the round is applied everywhere."""
        table, began = self._table, time.monotonic()
        while not table.reached(table.applied, self.seq):
            done = self._carry is None or self._carry(self.seq)
            if table.reached(table.applied, self.seq):
                return
            self._bell.wait(LOOK_S if done else table.patience(self.seq))
            self._check()
            if time.monotonic() - began > self._timeout_s:
                raise LinkTimeout(self._late(time.monotonic() - began))

    def _late(self, waited_s: float) -> str:
        table = self._table
        missing = _behind(table.workers, table.pushed, self.seq) or _behind(
            table.servers, table.applied, self.seq
        )
        return f"{table.workers[self._me]} waited {waited_s:.0f} s for {', '.join(missing)}"


def _behind(names: Sequence[str], column: memoryview, number: int) -> list[str]:
    return [name for name, reached in zip(names, column, strict=True) if reached < number]
