"""Table rows on a server, next to the blocks of its ServerState.

    SharedRowState    inside a host: one copy of the tables in shared memory, which outlives any process. Each
                      server updates the rows whose ids are assigned to it, and keeps their old values until
                      all servers have applied the update (embeddings/undo.py)
    RowServerState    between hosts: each server has its own rows, in shards that are held by two servers
                      each (embeddings/row_placement.py). Workers push to both servers, and a decision
                      updates the rows on both, in the same order

Used only by the server's thread.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from manyhands.embeddings.chunk import RowChunk
from manyhands.embeddings.row_placement import SHARDS, RowPlacement
from manyhands.embeddings.shards import shard_of
from manyhands.embeddings.sparse_grads import SharedGrads, TableGrads, to_wire, unpack, wire_specs
from manyhands.embeddings.table_stores import EVICT_EVERY, TableStores
from manyhands.embeddings.undo import UndoLog
from manyhands.errors import JobError, LinkError, ProtocolError
from manyhands.ps.block_store import BlockState
from manyhands.ps.policies import Decision, Ledger
from manyhands.ps.protocol import (
    RowGradients,
    RowsAnswer,
    RowsRequest,
    StateEnd,
    TableStateRequest,
    TensorMessage,
)
from manyhands.ps.tensor_messages import pack

ROLE = "rows "
"""Prefix of the role of messages with rows; the table's name follows."""
MAX_CHANGES = 128
"""Modulus of the count of changes of a row: more than the changes between a read and the push that follows,
and small enough for 16 bits."""


class GradLocation(Protocol):
    def get(self) -> TableGrads: ...


class ReceivedGrads:
    """Row gradients received over the network."""

    def __init__(self) -> None:
        self.grads: TableGrads = {}

    def get(self) -> TableGrads:
        return self.grads


class RowServerState:
    def __init__(
        self,
        name: str,
        tables: TableStores,
        *,
        adds: bool,
        bits: int = 32,
        by_part: bool = False,
    ) -> None:
        """Create the row state of a server. `adds`: if true, workers push differences to add to the rows
        instead of gradients. `bits`: size of each number on the wire. `by_part`: if true, an update is one
        part of a batch."""
        self.name = name
        self.tables = tables
        self.placement: RowPlacement | None = None
        """Placement of the current view; None inside a host."""
        self.grads: dict[str, Sequence[GradLocation]] = {}
        """Gradient slots of each worker."""
        self._adds = adds
        self._bits = bits
        self._by_part = by_part
        self._wire = wire_specs(tables.specs, adds=adds)
        self._changes = {name: np.zeros(0, np.float32) for name in tables.specs}
        """Number of changes of each row, modulo MAX_CHANGES, if differences are pushed."""
        self._coming: RowPlacement | None = None
        self._arrived: list[tuple[str, int, RowChunk]] = []
        self._rates: dict[int, tuple[float, float]] = {}
        """(learning rate, base learning rate) of the last versions."""
        self.undo = self._make_undo_log()

    def _make_undo_log(self) -> UndoLog | None:
        return None

    # A view begins ------------------------------------------------------------------------------

    def pack(self, shard: int, *, since: int | None = None) -> Iterator[tuple[str, BlockState]]:
        """Yield the rows of a shard by role, to be sent. With `since`, only rows touched after that step."""
        from manyhands.embeddings.row_transfer import export  # imports numba: only with tables

        for name in self.tables.specs:
            chunk = export(self.tables.store(name), shards=[shard], of=SHARDS, since=since)
            tensors = {key: torch.from_numpy(array) for key, array in vars(chunk).items()}
            yield ROLE + name, BlockState(torch.empty(0), tensors)

    def prepare(
        self, placement: RowPlacement, received: Mapping[tuple[str, int], BlockState]
    ) -> None:
        """Keep the received rows until the view begins."""
        self._coming = placement
        self._arrived = [
            (role.removeprefix(ROLE), shard, _chunk(block_state))
            for (role, shard), block_state in received.items()
            if role.startswith(ROLE)
        ]

    def begin(self, version: int) -> None:
        self.grads = {}
        self.take_over()

    def take_over(self) -> None:
        """Switch to the prepared rows, if there are any."""
        if self._coming is None:
            return
        from manyhands.embeddings.row_transfer import drop, load

        self.placement, self._coming = self._coming, None
        stays = np.zeros(SHARDS, bool)
        stays[self.placement.shards_of(self.name)] = True
        arrived, self._arrived = self._arrived, []
        stays[[shard for _, shard, _ in arrived]] = False  # their old rows are replaced
        for name in self.tables.specs:
            store = self.tables.store(name)
            ids = store.ids()
            drop(store, ids[~stays[shard_of(ids, SHARDS)]])
            for table, _, chunk in arrived:
                if table == name:
                    load(store, chunk)

    def meet(self, undo_logs: Mapping[str, str]) -> None:
        """Attach the undo logs of the other servers, if there are any."""
        return

    def enter(self, worker: str, addresses: Sequence[str], slots: int) -> None:
        """Attach a worker's row gradients in shared memory, or create slots to receive them."""
        if addresses:
            raise ProtocolError(f"{len(addresses)} row gradients in shared memory")
        self.grads[worker] = [ReceivedGrads() for _ in range(slots)]

    # Messages of workers ------------------------------------------------------------------------

    def handle(
        self,
        worker: str,
        message: RowGradients | RowsRequest | TableStateRequest,
        payload: memoryview | None,
        *,
        done: int,
    ) -> Iterator[tuple[TensorMessage | RowsAnswer | StateEnd, memoryview | None]]:
        """Handle a message of a worker, and yield the answers. `done`: number of its last push that is in the
        weights."""
        if isinstance(message, TableStateRequest):
            yield from self._all_rows(message.since)
            return
        assert payload is not None
        if isinstance(message, RowsRequest):
            if payload.nbytes % 8:
                raise ProtocolError(f"rows for {payload.nbytes} bytes of ids")
            rows = self.look_up(message.table, np.frombuffer(payload, np.int64))
            yield RowsAnswer(message.tag), to_wire(rows, self._bits)
        elif message.seq > done:
            try:
                grads = unpack(payload, self._wire, bits=self._bits)
            except ValueError as error:
                raise ProtocolError(str(error)) from error
            for name, sparse in grads.items():
                # Check now: an invalid id would crash this server when the update is applied.
                self._check(name, sparse.ids)
            self.put(worker, message.slot, grads)

    def put(self, worker: str, slot: int, grads: TableGrads) -> None:
        """Store the row gradients of the push that follows."""
        slots = self.grads.get(worker, ())
        if not 0 <= slot < len(slots):
            raise ProtocolError(f"row gradients in slot {slot} of {len(slots)}")
        place = slots[slot]
        assert isinstance(place, ReceivedGrads)
        place.grads = grads

    def look_up(self, name: str, ids: NDArray[np.int64]) -> NDArray[np.float32]:
        """Return the rows of some ids, in the format of the wire. A lookup neither creates a row nor counts
        as a use; an update does both, because both servers of the row must do the same."""
        if name not in self.tables.specs:
            raise ProtocolError(f"rows of unknown table {name!r}")
        self._check(name, ids)
        store = self.tables.store(name)
        rows = np.empty((len(ids), self._wire[name].dim), np.float32)
        slots = store.find(ids, create=False)
        store.gather(slots, rows, ids)
        if self._adds:
            changes = self._changes_for(name, slots)
            rows[:, -1] = np.where(slots >= 0, changes[slots], np.float32(0))
        return rows

    def _check(self, name: str, ids: NDArray[np.int64]) -> None:
        """Check ids received over the network."""
        try:
            self.tables.store(name).check(ids)
        except JobError as error:
            raise ProtocolError(str(error)) from error

    def _all_rows(self, since: int) -> Iterator[tuple[TensorMessage | StateEnd, memoryview | None]]:
        """Yield all rows whose first holder is this server, for a checkpoint."""
        assert self.placement is not None
        own = [s for s, held in enumerate(self.placement.holders) if held[0] == self.name]
        for shard in own:
            for role, block_state in self.pack(shard, since=since - 1 if since else None):
                yield from pack(shard, block_state, role=role)
        yield StateEnd("table_state"), None

    # Updates ------------------------------------------------------------------------------------

    def apply(
        self, decision: Decision, servers: Sequence[str], *, lr: float, base_lr: float
    ) -> None:
        """Apply a decision's gradients to the rows that this server updates."""
        self._rates = {**dict(list(self._rates.items())[-7:]), decision.version: (lr, base_lr)}
        self._apply(decision, servers, self.name, self.undo)

    def evicts(self, decision: Decision) -> bool:
        """Return whether rows are evicted after this update."""
        return decision.step % EVICT_EVERY == 0 and bool(self.tables.evicting)

    def finish(self, ledger: Ledger, servers: Sequence[str], alive: Sequence[str]) -> None:
        """Complete the updates of dead servers, if their rows are in shared memory."""
        return

    def _apply(
        self, decision: Decision, servers: Sequence[str], server: str, undo: UndoLog | None
    ) -> None:
        all_grads = [self.grads[g.worker][g.slot].get() for g in decision.contributions]
        if self._adds:
            for grads in all_grads:
                self._add(grads, decision.step)
            return
        lr, base_lr = self._rates[decision.version]
        # Most rows are in one part of a batch only. So a gradient counts as in the mean over the batch, at
        # the whole rate: an optimizer that divides by the size of gradients would not move a row further
        # for a larger one at a smaller rate.
        part = decision.part if self._by_part else 1.0
        self.tables.apply(
            all_grads,
            [coefficient * part for coefficient in decision.coefficients()],
            lr=lr * decision.lr_scale / part if part else 0.0,
            base_lr=base_lr,
            now=decision.step,
            part=(servers.index(server), len(servers)) if undo is not None else None,
            undo=(undo, decision.version) if undo is not None else None,
            make=undo is None,
        )

    def _add(self, grads: TableGrads, now: int) -> None:
        """Add a worker's differences. If other workers have changed a row since it was read, its difference
        is scaled down accordingly: two workers that each apply their full difference would move it twice as
        far."""
        for name, sparse in grads.items():
            store = self.tables.store(name)
            slots = store.find(sparse.ids, create=True, now=now)
            store.add_differences(
                slots, sparse.grads, self._changes_for(name, slots), modulo=MAX_CHANGES, now=now
            )

    def _changes_for(self, name: str, slots: NDArray[np.int64]) -> NDArray[np.float32]:
        """Return a table's counts of changes, enlarged to include these slots."""
        changes = self._changes[name]
        highest = int(slots.max(initial=0)) + 1
        if highest > len(changes):
            changes = self._changes[name] = np.pad(changes, (0, 2 * highest - len(changes)))
        return changes


class SharedRowState(RowServerState):
    """Rows in shared memory: workers read rows and write gradients there, without messages."""

    undo: UndoLog
    _undo_logs: Mapping[str, UndoLog] = {}
    """Undo logs of the other servers."""

    def _make_undo_log(self) -> UndoLog:
        return UndoLog.create()

    def begin(self, version: int) -> None:
        super().begin(version)
        self.undo.reset(version)

    def meet(self, undo_logs: Mapping[str, str]) -> None:
        self._undo_logs = {name: UndoLog.attach(address) for name, address in undo_logs.items()}

    def enter(self, worker: str, addresses: Sequence[str], slots: int) -> None:
        if len(addresses) != slots:
            raise ProtocolError(f"{len(addresses)} row gradients in shared memory")
        try:
            self.grads[worker] = [SharedGrads.attach(a, self.tables.specs) for a in addresses]
        except (LinkError, OSError, ValueError) as error:
            raise ProtocolError(f"row gradients that do not exist: {error}") from error

    def handle(
        self,
        worker: str,
        message: RowGradients | RowsRequest | TableStateRequest,
        payload: memoryview | None,
        *,
        done: int,
    ) -> Iterator[tuple[TensorMessage | RowsAnswer | StateEnd, memoryview | None]]:
        raise ProtocolError("a message about rows that are in shared memory")

    def finish(self, ledger: Ledger, servers: Sequence[str], alive: Sequence[str]) -> None:
        for server in servers:
            log = self._undo_logs.get(server)
            if server in alive or log is None:
                continue
            if log.begun > log.done or log.done > ledger.version:
                self.tables.restore(log)
            for decision in ledger.between(log.done, ledger.version):
                self._apply(decision, servers, server, log)


class ColocatedRows:
    """Direct access to a server's rows for the worker of the same process, without messages."""

    def __init__(self, name: str, rows: RowServerState, lock: AbstractContextManager[Any]) -> None:
        """Wrap a server's rows. `lock` is held by the thread that is working on its blocks and rows."""
        self.name = name
        self._rows = rows
        self._lock = lock

    def look_up(self, name: str, ids: NDArray[np.int64]) -> NDArray[np.float32]:
        with self._lock:
            return self._rows.look_up(name, ids)

    def put(self, worker: str, slot: int, grads: TableGrads) -> None:
        with self._lock:
            self._rows.put(worker, slot, grads)


def _chunk(block_state: BlockState) -> RowChunk:
    return RowChunk(**{key: tensor.numpy() for key, tensor in block_state.state.items()})
