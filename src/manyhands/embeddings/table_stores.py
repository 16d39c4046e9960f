"""The rows of a model's tables in the memory of this host: made, shared, loaded, saved and updated.

A table is made when it is first used or shared. Until then loaded rows stay in their source, because only one
of the workers of a host has to read them.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from manyhands.embeddings.chunk import RowChunk, RowWeights, fitted, untrained
from manyhands.embeddings.shards import shard_of
from manyhands.embeddings.sparse_grads import TableGrads, weighted_sum
from manyhands.embeddings.spec import Table, salt_of
from manyhands.embeddings.undo import UndoLog
from manyhands.errors import JobError
from manyhands.runs.table_files import SavedTable

if TYPE_CHECKING:
    from manyhands.embeddings.store import TableStore

EVICT_EVERY = 100
"""Steps between two evictions."""


@dataclass(frozen=True)
class Pending:
    """Rows of a table that is not made yet. It may become private or shared, here or in another process."""

    source: RowChunk | SavedTable | Mapping[str, Tensor]
    spec: Table | None = None
    """Set if the table may have another optimizer than the source."""
    anew: bool = False
    """If true, training starts with these rows; counts and steps of the source are dropped."""

    def chunk(self) -> RowChunk:
        chunk = self.source
        if not isinstance(chunk, RowChunk):
            tensors = chunk.read() if isinstance(chunk, SavedTable) else chunk
            chunk = RowChunk(**{key: tensor.numpy() for key, tensor in tensors.items()})
        if self.spec is None:
            return chunk
        if self.anew:
            return untrained(chunk.without_optimizer(0), self.spec, now=0)
        return fitted(chunk, self.spec)


class TableStores:
    """Tables by name. numba is imported when the first one is made."""

    def __init__(self, specs: Mapping[str, Table], *, seed: int) -> None:
        self.specs = dict(specs)
        self.seed = seed
        self.spread = False
        """If true, this process holds only a part of the rows; other servers have the rest."""
        self.changed = False
        """If true, rows were loaded or trained."""
        self._salts: dict[str, int] = {}
        """Salts of loaded tables: their initial rows do not follow from the seed and the name."""
        self._stores: dict[str, TableStore] = {}
        self._saved: dict[str, Pending] = {}

    # Memory -------------------------------------------------------------------------------------

    def store(self, name: str) -> TableStore:
        """Return a table. It is in private memory, unless it was shared before its first use."""
        if name not in self._stores:
            self._make(name, shared=False)
        return self._stores[name]

    def share(self) -> dict[str, str]:
        """Move all tables to shared memory. Returns their addresses, for other processes of this host."""
        for name in self.specs:
            self._make(name, shared=True)
        return self.addresses()

    def attach(self, addresses: Mapping[str, str]) -> None:
        """Use the tables that another process of this host has shared."""
        from manyhands.embeddings.store import TableStore

        # Their owner may have died: keep the own tables until all of its tables are attached.
        attached = {n: TableStore.attach(n, table, addresses[n]) for n, table in self.specs.items()}
        self.close()
        self._saved.clear()
        self._stores.update(attached)

    def addresses(self) -> dict[str, str]:
        """Return the addresses of the shared tables."""
        return {name: store.address for name, store in self._stores.items()}

    def _make(self, name: str, *, shared: bool) -> None:
        from manyhands.embeddings.store import TableStore

        store = TableStore.create(
            name,
            self.specs[name],
            seed=self.seed,
            salt=self._salts.get(name),
            shared=shared,
            spread=self.spread,
        )
        before = self._stores.pop(name, None)
        if (saved := self._saved.pop(name, None)) is not None:
            _transfer().load(store, saved.chunk())
        if before is not None:
            _transfer().load(store, _transfer().export(before))
            before.close()
        self._stores[name] = store

    def close(self) -> None:
        for store in self._stores.values():
            store.close()
        self._stores.clear()

    # Updates ------------------------------------------------------------------------------------

    def apply(
        self,
        grads: Sequence[TableGrads],
        coefficients: Sequence[float],
        *,
        lr: float,
        base_lr: float,
        now: int,
        part: tuple[int, int] | None = None,
        undo: tuple[UndoLog, int] | None = None,
        make: bool = False,
    ) -> None:
        """Update rows by the weighted sum of gradients.

        `lr` is the job's learning rate now, `base_lr` the one that it began with. `part`, (index, count):
        only the ids that fall to one of several servers. `undo`: the log that keeps the rows as they were,
        and the version that they will have. `make`: count the ids as seen and make their rows, because
        looking them up did not.
        """
        self.changed = True
        stores = {name: self.store(name) for name in self.specs}
        if part is not None and part[1] > 1:
            index, count = part
            grads = [
                {name: s.part(shard_of(s.ids, count) == index) for name, s in each.items()}
                for each in grads
            ]
        summed = weighted_sum(grads, coefficients, self.specs)
        slots = {name: np.empty(0, np.int64) for name in self.specs}
        for name, sparse in summed.items():
            slots[name] = stores[name].find(sparse.ids, create=make, now=now)
        if undo is not None:
            changed = {name: found[found >= 0] for name, found in slots.items()}
            log, version = undo
            log.begin(version, changed, stores)
        for name, sparse in summed.items():
            own = self.specs[name].lr
            rate = lr if own is None else own * (lr / base_lr if base_lr else 1.0)
            values = np.ascontiguousarray(sparse.grads)
            stores[name].update(slots[name], values, lr=rate, now=now)
        if undo is not None:
            undo[0].end()

    def restore(self, undo: UndoLog) -> None:
        """Undo the last update in a log."""
        undo.restore({name: self.store(name) for name in self.specs})

    @property
    def evicting(self) -> list[str]:
        """Names of the tables that evict rows."""
        return [
            name
            for name, table in self.specs.items()
            if table.evict_unused or table.evict_below or table.when_full == "evict"
        ]

    def evict_periodically(self, now: int) -> None:
        if now % EVICT_EVERY == 0:
            self.evict(now)

    def evict(self, now: int) -> None:
        """Evict rows as the tables say, while no other process uses them."""
        for name in self.evicting:
            _transfer().evict(self.store(name), now)

    # Checkpoints --------------------------------------------------------------------------------

    def state_dict(self, since: int | None = None) -> dict[str, Any]:
        """Copy all rows as tensors, or those touched after a step. No process may change rows meanwhile."""
        chunks = {name: _transfer().export(self.store(name), since=since) for name in self.specs}
        return {
            name: {key: torch.from_numpy(array) for key, array in vars(chunk).items()}
            for name, chunk in chunks.items()
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if self.specs.keys() != state.keys():
            raise ValueError(
                f"it has the tables {', '.join(sorted(state)) or 'none'}, and the job has "
                f"{', '.join(sorted(self.specs)) or 'none'}"
            )
        self.close()
        self._saved = {name: Pending(rows) for name, rows in state.items()}
        self.changed = True

    def load_rows(self, state: Mapping[str, Any], *, anew: bool) -> None:
        """Like load_state_dict, for tables whose optimizers may differ. `anew`: training starts with these
        rows; nothing else of the state counts."""
        for name, rows in state.items():
            self._put(name, Pending(rows, self.specs[name], anew=anew), self.salt(name))

    # State dict of the model --------------------------------------------------------------------

    def weights(self, name: str) -> RowWeights:
        """Copy all rows of a table, without the state of its optimizer."""
        if name in self._stores:
            return _transfer().weights(self._stores[name])
        return self._read_saved(name).without_optimizer(self.salt(name))

    def whole(self, name: str) -> tuple[RowChunk, int]:
        """Copy all rows of a table with their state and counts; and its salt."""
        store = self._stores.get(name)
        chunk = self._read_saved(name) if store is None else _transfer().export(store)
        return chunk, self.salt(name)

    def put_whole(self, name: str, chunk: RowChunk, salt: int) -> None:
        """Replace a table by what `whole` returned."""
        self._put(name, Pending(chunk), salt)

    def _read_saved(self, name: str) -> RowChunk:
        """Read the rows of a table that is not made yet; none, if none were loaded."""
        if name not in self._saved:
            return untrained(RowWeights.none(self.specs[name].dim, 0), self.specs[name], now=0)
        chunk = self._saved[name].chunk()
        self._saved[name] = Pending(chunk)  # it will be needed again
        return chunk

    def salt(self, name: str) -> int:
        """Return what the initial rows of a table are generated from."""
        return self._salts.get(name, salt_of(name, self.seed))

    @property
    def salts(self) -> dict[str, int]:
        return {name: self.salt(name) for name in self.specs}

    @salts.setter
    def salts(self, salts: Mapping[str, int]) -> None:
        self._salts = dict(salts)

    def fingerprint(self) -> int:
        """Return 32 bits that are equal in processes with the same rows."""
        value = 0
        for name in sorted(self.specs):
            weights = self.weights(name)
            value = zlib.crc32(f"{name} {weights.salt}".encode(), value)
            for array in (weights.ids, weights.rows, weights.shared):
                value = zlib.crc32(np.ascontiguousarray(array).view(np.uint8).data, value)
        return value

    def _put(self, name: str, rows: Pending, salt: int) -> None:
        store = self._stores.get(name)
        if store is not None:
            if store.shared:
                raise JobError(
                    f"The rows of the table {name!r} are shared with other workers by now. Call "
                    "model.load_state_dict(...)  before  hands.prepare(model, optimizer)."
                )
            self._stores.pop(name).close()
        self._saved[name] = rows
        self._salts[name] = salt
        self.changed = True


def _transfer() -> ModuleType:
    """Import what copies rows, and numba with it: only where there is a table."""
    from manyhands.embeddings import row_transfer

    return row_transfer
