"""The rows of tables on a server, beside the blocks of its ServerState.

Inside a host there is one copy of the tables in shared memory, which outlives any process. Each server
changes the rows whose ids fall to it, and keeps the old ones until all have made the update
(embeddings/undo.py).

Between hosts each server has rows of its own, in shards that two servers hold (embeddings/row_placement.py).
Workers push to both; a decision changes the rows on both, in the same order.

Used by the server's thread alone.
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
"""Role of messages with rows: this, followed by the name of the table."""
TURNS = 128
"""Changes of a row are counted modulo this: more than can happen between reading it and pushing, and no
more than 16 bits can hold."""


class GradLocation(Protocol):
    def get(self) -> TableGrads: ...


class ReceivedGrads:
    """Gradients of rows that came over the network."""

    def __init__(self) -> None:
        self.basket: TableGrads = {}

    def get(self) -> TableGrads:
        return self.basket


class RowServerState:
    def __init__(
        self, name: str, tables: TableStores, *, shared: bool, adds: bool, bits: int = 32
    ) -> None:
        """`adds`: what is pushed is not a gradient but what to add to the rows. `bits`: of each number on
        the wire."""
        self.name = name
        self.tables = tables
        self.shared = shared
        self.homes: RowPlacement | None = None
        """Of the view that counts; None inside a host."""
        self.baskets: dict[str, Sequence[GradLocation]] = {}
        """The slots of each worker."""
        self.undo = UndoLog.create() if shared else None
        self.undo_logs: dict[str, UndoLog] = {}
        """Those of the other servers."""
        self._adds = adds
        self._bits = bits
        self._wire = wire_specs(tables.specs, adds=adds)
        self._turns = {name: np.zeros(0, np.float32) for name in tables.specs}
        """How often each row was changed, modulo TURNS, where differences are pushed."""
        self._coming: RowPlacement | None = None
        self._arrived: list[tuple[str, int, RowChunk]] = []
        self._rates: dict[int, tuple[float, float]] = {}
        """(learning rate, base learning rate) of the last versions."""

    # A view begins ------------------------------------------------------------------------------

    def pack(self, shard: int, *, since: int | None = None) -> Iterator[tuple[str, BlockState]]:
        """The rows of a shard, by role, to be sent; or only those touched after a step."""
        from manyhands.embeddings.row_transfer import export  # and numba: not without tables

        for name in self.tables.specs:
            chunk = export(self.tables.store(name), shards=[shard], of=SHARDS, since=since)
            tensors = {key: torch.from_numpy(array) for key, array in vars(chunk).items()}
            yield ROLE + name, BlockState(torch.empty(0), tensors)

    def prepare(self, homes: RowPlacement, materials: Mapping[tuple[str, int], BlockState]) -> None:
        """Keep the received rows until the view begins."""
        self._coming = homes
        self._arrived = [
            (role.removeprefix(ROLE), shard, _chunk(block_state))
            for (role, shard), block_state in materials.items()
            if role.startswith(ROLE)
        ]

    def begin(self, version: int) -> None:
        self.baskets = {}
        if self.undo is not None:
            self.undo.reset(version)
        self.take_over()

    def take_over(self) -> None:
        """Switch to what was prepared."""
        if self._coming is None:
            return
        from manyhands.embeddings.row_transfer import drop, load

        self.homes, self._coming = self._coming, None
        stays = np.zeros(SHARDS, bool)
        stays[self.homes.shards_of(self.name)] = True
        arrived, self._arrived = self._arrived, []
        stays[[shard for _, shard, _ in arrived]] = False  # what was here of them is old
        for name in self.tables.specs:
            store = self.tables.store(name)
            ids = store.ids()
            drop(store, ids[~stays[shard_of(ids, SHARDS)]])
            for table, _, chunk in arrived:
                if table == name:
                    load(store, chunk)

    def meet(self, undo_logs: Mapping[str, str]) -> None:
        """Attach the undo logs of the other servers."""
        self.undo_logs = {name: UndoLog.attach(address) for name, address in undo_logs.items()}

    def enter(self, worker: str, addresses: Sequence[str], slots: int) -> None:
        """Find a worker's row gradients in shared memory, or make space for them."""
        if len(addresses) != (slots if self.shared else 0):
            raise ProtocolError(f"{len(addresses)} baskets in shared memory")
        try:
            found = [SharedGrads.attach(address, self.tables.specs) for address in addresses]
        except (LinkError, OSError, ValueError) as error:
            raise ProtocolError(f"baskets that are not there: {error}") from error
        self.baskets[worker] = found or [ReceivedGrads() for _ in range(slots)]

    # What workers ask and give, between hosts ---------------------------------------------------

    def handle(
        self,
        worker: str,
        message: RowGradients | RowsRequest | TableStateRequest,
        payload: memoryview | None,
        *,
        done: int,
    ) -> Iterator[tuple[TensorMessage | RowsAnswer | StateEnd, memoryview | None]]:
        """Handle a message of a worker; yields the answers. `done`: its last push that is in the weights."""
        if self.shared:
            raise ProtocolError("a message about rows, which are in shared memory")
        if isinstance(message, TableStateRequest):
            yield from self._tell_all(message.since)
            return
        assert payload is not None
        if isinstance(message, RowsRequest):
            if payload.nbytes % 8:
                raise ProtocolError(f"rows for {payload.nbytes} bytes of ids")
            rows = self.look_up(message.table, np.frombuffer(payload, np.int64))
            yield RowsAnswer(message.tag), to_wire(rows, self._bits)
        elif message.seq > done:
            try:
                basket = unpack(payload, self._wire, bits=self._bits)
            except ValueError as error:
                raise ProtocolError(str(error)) from error
            for name, sparse in basket.items():
                # An id that no row can have would stop this server later.
                self._check(name, sparse.ids)
            self.put(worker, message.slot, basket)

    def put(self, worker: str, slot: int, basket: TableGrads) -> None:
        """What the push that follows wants changed in rows."""
        places = self.baskets.get(worker, ())
        if not 0 <= slot < len(places):
            raise ProtocolError(f"a basket in slot {slot}, which there is not")
        place = places[slot]
        assert isinstance(place, ReceivedGrads)
        place.basket = basket

    def look_up(self, name: str, ids: NDArray[np.int64]) -> NDArray[np.float32]:
        """The rows of some ids, as they travel. Rows are made, and lookups counted, when they are changed, at
        both who hold them alike."""
        if name not in self.tables.specs:
            raise ProtocolError(f"rows of {name!r}, which is no table")
        self._check(name, ids)
        store = self.tables.store(name)
        rows = np.empty((len(ids), self._wire[name].dim), np.float32)
        slots = store.find(ids, create=False)
        store.gather(slots, rows, ids)
        if self._adds:
            turns = self._turns_for(name, slots)
            rows[:, -1] = np.where(slots >= 0, turns[slots], np.float32(0))
        return rows

    def _check(self, name: str, ids: NDArray[np.int64]) -> None:
        """Check ids that came over the network."""
        try:
            self.tables.store(name).check(ids)
        except JobError as error:
            raise ProtocolError(str(error)) from error

    def _tell_all(self, since: int) -> Iterator[tuple[TensorMessage | StateEnd, memoryview | None]]:
        """All rows of which this server is the first holder, for a checkpoint."""
        assert self.homes is not None
        own = [s for s, held in enumerate(self.homes.holders) if held[0] == self.name]
        for shard in own:
            for role, block_state in self.pack(shard, since=since - 1 if since else None):
                yield from pack(shard, block_state, role=role)
        yield StateEnd("table_state"), None

    # Updates ------------------------------------------------------------------------------------

    def apply(
        self, decision: Decision, servers: Sequence[str], *, lr: float, base_lr: float
    ) -> None:
        """Apply a decision's gradients to the rows that this server changes."""
        self._rates = {**dict(list(self._rates.items())[-7:]), decision.version: (lr, base_lr)}
        self._apply(decision, servers, self.name, self.undo)

    def evicts(self, decision: Decision) -> bool:
        """Whether rows are to be evicted after this update."""
        return decision.step % EVICT_EVERY == 0 and bool(self.tables.evicting)

    def finish(self, ledger: Ledger, servers: Sequence[str], alive: Sequence[str]) -> None:
        """Inside a host: bring the rows of dead servers up to the others."""
        for server in servers:
            log = self.undo_logs.get(server)
            if server in alive or log is None:
                continue
            if log.begun > log.done or log.done > ledger.version:
                self.tables.restore(log)
            for decision in ledger.between(log.done, ledger.version):
                self._apply(decision, servers, server, log)

    def _apply(
        self, decision: Decision, servers: Sequence[str], server: str, undo: UndoLog | None
    ) -> None:
        baskets = [self.baskets[g.worker][g.slot].get() for g in decision.contributions]
        if self._adds:
            for basket in baskets:
                self._add(basket, decision.step)
            return
        lr, base_lr = self._rates[decision.version]
        self.tables.apply(
            baskets,
            decision.coefficients(),
            lr=lr * decision.lr_scale,
            base_lr=base_lr,
            now=decision.step,
            part=(servers.index(server), len(servers)) if self.shared else None,
            undo=(undo, decision.version) if undo is not None else None,
            make=not self.shared,
        )

    def _add(self, basket: TableGrads, now: int) -> None:
        """Add the differences that a worker has made. A row that others have changed since it was read moves
        by as much less: two workers that both move it all the way would move it twice as far."""
        for name, sparse in basket.items():
            store = self.tables.store(name)
            slots = store.find(sparse.ids, create=True, now=now)
            store.add_differences(
                slots, sparse.grads, self._turns_for(name, slots), modulo=TURNS, now=now
            )

    def _turns_for(self, name: str, slots: NDArray[np.int64]) -> NDArray[np.float32]:
        """The counts of changes of a table, with space for these slots."""
        turns = self._turns[name]
        highest = int(slots.max(initial=0)) + 1
        if highest > len(turns):
            turns = self._turns[name] = np.pad(turns, (0, 2 * highest - len(turns)))
        return turns


class ColocatedRows:
    """The rows of a server, for the worker of its process: without messages."""

    def __init__(self, name: str, rows: RowServerState, turn: AbstractContextManager[Any]) -> None:
        """`turn` is held by the thread that works on the server's blocks and rows."""
        self.name = name
        self._rows = rows
        self._turn = turn

    def look_up(self, name: str, ids: NDArray[np.int64]) -> NDArray[np.float32]:
        with self._turn:
            return self._rows.look_up(name, ids)

    def put(self, worker: str, slot: int, basket: TableGrads) -> None:
        with self._turn:
            self._rows.put(worker, slot, basket)


def _chunk(block_state: BlockState) -> RowChunk:
    return RowChunk(**{key: tensor.numpy() for key, tensor in block_state.state.items()})
