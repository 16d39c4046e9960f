"""The tables of a model as its worker uses them: looks rows up, collects their gradients, steps them.

The rows are in the memory of this host (table_stores.py). Modules record each lookup here; `take` returns
the gradients of all lookups since the last step, each id once.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from manyhands.embeddings.chunk import RowWeights, untrained
from manyhands.embeddings.modules import RowModel, TableHolder, bind, tables_of
from manyhands.embeddings.sparse_grads import SparseGrads, merged
from manyhands.embeddings.spec import Table
from manyhands.embeddings.table_stores import TableStores

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from manyhands.embeddings.modules import Rows
    from manyhands.embeddings.store import TableStore


class LocalTables:
    def __init__(self, specs: Mapping[str, Table], *, seed: int) -> None:
        self.specs = dict(specs)
        self.stores = TableStores(specs, seed=seed)
        self.now = 0
        """The current step; rows that are looked up are marked as used at it."""
        self.batch: Any = None
        """The batch of the current forward pass."""
        self.writers = 1
        """Number of workers that change these rows at the same time."""
        self.in_place = False
        """If true, a RowModel changes rows in place, and nothing tells which ones."""
        self.makes_on_pull = True
        """If true, a lookup makes missing rows and counts ids; otherwise an update does."""
        self._lookups: list[tuple[str, Tensor, Tensor]] = []
        """Table, ids and rows of each lookup since the last step."""
        self._touched: dict[str, TouchedRows] = {}

    @classmethod
    def of(cls, model: nn.Module, *, seed: int) -> LocalTables:
        """Collect the tables of a model and bind its modules to them, with the rows that it has loaded
        or trained before. A model without tables gets an object without specs, which does nothing."""
        tables = cls(tables_of(model), seed=seed)
        tables.in_place = isinstance(model, RowModel)
        tables._take_over(model)
        bind(model, tables)
        return tables

    def _take_over(self, model: nn.Module) -> None:
        names = {id(table): name for name, table in self.specs.items()}
        done: set[str] = set()
        for module in model.modules():
            if not isinstance(module, TableHolder):
                continue
            for own, table in module.own_tables().items():
                bound, name = module.bound(own), names[id(table)]
                if bound is not None and name not in done and bound.access.stores.changed:
                    done.add(name)
                    whole = bound.access.stores.whole(bound.name)
                    self.stores.put_whole(name, *whole)

    # Lookups ------------------------------------------------------------------------------------

    def pull(self, name: str, ids: Tensor, source: Tensor) -> Tensor:
        """Return the rows of distinct ids; some of them may be new. `source`: the ids as the model gave
        them."""
        return self._read(name, ids, create=self.makes_on_pull)

    def look(self, name: str, ids: Tensor) -> Tensor:
        """Pull rows without making or counting any."""
        return self._read(name, ids, create=False)

    def _read(self, name: str, ids: Tensor, *, create: bool) -> Tensor:
        store, numbers = self.stores.store(name), ids.numpy()
        rows = np.empty((len(numbers), self.specs[name].dim), np.float32)
        store.gather(store.find(numbers, create=create, now=self.now), rows, numbers)
        return torch.from_numpy(rows)

    def rows(self) -> dict[str, TouchedRows]:
        """Return the rows that a RowModel changes; the same objects until the tables move."""
        self.stores.changed = True
        for name in self.specs:
            touched, store = self._touched.get(name), self.stores.store(name)
            if touched is None or touched.store is not store:
                self._touched[name] = TouchedRows(store, self)
        return self._touched

    @contextmanager
    def lend(self, model: RowModel, batch: Any, seed: int) -> Iterator[Mapping[str, Rows]]:
        """Yield the rows that a RowModel may change during the context."""
        yield self.rows()

    # Gradients ----------------------------------------------------------------------------------

    def note(self, name: str, ids: Tensor, rows: Tensor) -> None:
        """Record rows that are part of a graph, to collect their gradient."""
        self._lookups.append((name, ids, rows))

    def forget(self) -> None:
        """Drop the lookups of a step that failed."""
        self._lookups.clear()

    def take(self) -> dict[str, SparseGrads]:
        """Return the gradients of all lookups since the last call, each id once."""
        lookups, self._lookups = self._lookups, []
        found: dict[str, list[SparseGrads]] = {}
        for name, ids, rows in lookups:
            if rows.grad is not None:
                grads = rows.grad.detach().to("cpu", torch.float32).contiguous().numpy()
                found.setdefault(name, []).append(SparseGrads(ids.numpy(), grads))
        return {name: merged(parts) for name, parts in found.items()}

    def step(self, lr: float, base_lr: float, now: int) -> None:
        """Update the rows by the gradients of this worker alone."""
        if grads := self.take():
            self.stores.apply([grads], [1.0], lr=lr, base_lr=base_lr, now=now)
        self.stores.evict_periodically(now)

    # State --------------------------------------------------------------------------------------

    @property
    def incremental(self) -> bool:
        """If true, a checkpoint may save only the rows touched since the last one: the store knows which
        they are, and no row is evicted."""
        return not self.in_place and not self.stores.evicting

    def state_dict(self, since: int | None = None) -> dict[str, Any]:
        return self.stores.state_dict(since)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.stores.load_state_dict(state)

    def weights(self, name: str) -> RowWeights:
        """Copy all rows of a table."""
        return self.stores.weights(name)

    def put_weights(self, name: str, weights: RowWeights) -> None:
        """Replace all rows of a table. Its optimizer starts anew."""
        chunk = untrained(weights, self.specs[name], now=self.now)
        self.stores.put_whole(name, chunk, weights.salt)

    def __getstate__(self) -> dict[str, Any]:
        """Copy the rows, wherever they are, for copy.deepcopy and pickle."""
        stores = TableStores(self.specs, seed=self.stores.seed)
        for name in self.specs:
            stores.put_whole(name, *self.stores.whole(name))
        stores.changed = self.stores.changed
        return {**vars(self), "stores": stores, "_lookups": [], "_touched": {}, "batch": None}


class OwnTables(LocalTables):
    """The tables of a model in the user's own loop. It has no step for them, so rows learn in backward."""

    def note(self, name: str, ids: Tensor, rows: Tensor) -> None:
        rows.register_post_accumulate_grad_hook(lambda leaf: self._learn(name, ids, leaf))

    def _learn(self, name: str, ids: Tensor, leaf: Tensor) -> None:
        grads, leaf.grad = leaf.grad, None
        lr = self.specs[name].lr
        if grads is None:
            return
        if lr is None:
            warnings.warn(
                f"A table ({self.specs[name].describe()}) does not learn: in your own loop it can't know the "
                "learning rate. Give it one, as  mh.SparseEmbedding(None, 64, lr=0.05),  or train the model "
                "with  mh.join()  or  manyhands train.",
                stacklevel=2,
            )
            return
        self.now += 1
        found = SparseGrads(ids.numpy(), grads.to("cpu", torch.float32).contiguous().numpy())
        self.stores.apply([{name: found}], [1.0], lr=lr, base_lr=lr, now=self.now)


class TouchedRows:
    """The rows of a table in place."""

    def __init__(self, store: TableStore, tables: LocalTables) -> None:
        self.store = store
        self.ids = None
        self.matrix = store.rows
        self._tables = tables

    @property
    def writers(self) -> int:
        return self._tables.writers

    def find(self, ids: NDArray[np.int64]) -> NDArray[np.int64]:
        return self.store.find(ids, create=True, now=self._tables.now)
