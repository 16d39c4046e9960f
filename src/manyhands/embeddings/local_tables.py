"""The tables of one model, as one process reaches them: rows out, gradients in.

In one process, or inside a host, a table is whole and in reach: its Store is private memory or shared.
What the modules of the model have looked up since the last step is noted here, and given away as one
basket: each id once, its gradients added up.
"""

from __future__ import annotations

import warnings
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from manyhands.embeddings.chunk import RowChunk, RowWeights, fitted, untrained
from manyhands.embeddings.modules import RowModel, TableHolder, bind, tables_of
from manyhands.embeddings.shards import shard_of
from manyhands.embeddings.sparse_grads import Basket, SparseGrads, together
from manyhands.embeddings.spec import Table, salt_of
from manyhands.embeddings.undo import UndoLog
from manyhands.errors import JobError
from manyhands.runs.table_files import SavedTable

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from manyhands.embeddings.modules import Rows
    from manyhands.embeddings.store import TableStore

EVICT_EVERY = 100
"""Steps between two looks at which rows may go."""


@dataclass
class _Noted:
    name: str
    ids: Tensor
    rows: Tensor


@dataclass(frozen=True)
class Pending:
    """Rows for a table that is not made yet: where it will be is not known, and others may make it."""

    source: RowChunk | SavedTable | Mapping[str, Tensor]
    spec: Table | None = None
    """Given if the table's optimizer may be another than that of the source."""
    anew: bool = False
    """If true, a training begins with these rows, and only they count."""

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


class LocalTables:
    def __init__(self, specs: Mapping[str, Table], *, seed: int) -> None:
        self.specs = dict(specs)
        self.now = 0
        """The step that is being done: what is looked up is used now."""
        self.batch: Any = None
        """What is being trained on."""
        self.writers = 1
        """Workers that change these very rows at the same time."""
        self.in_place = False
        """A RowModel changes rows without a word."""
        self.makes_on_pull = True
        """Rows are made, and sights counted, when they are looked up; otherwise when they are changed."""
        self.spread = False
        """This process will have a part of the rows."""
        self.seed = seed
        self.changed = False
        """Rows were loaded or trained."""
        self._salts: dict[str, int] = {}
        """Of tables whose initial rows are not made from the seed and their name: loaded ones."""
        self._stores: dict[str, TableStore] = {}
        self._saved: dict[str, Pending] = {}
        self._noted: list[_Noted] = []
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
        for module in model.modules():
            if not isinstance(module, TableHolder):
                continue
            for own, table in module.own_tables().items():
                bound = module.bound(own)
                if bound is None or not isinstance(bound.access, LocalTables):
                    continue
                if bound.access.changed and names[id(table)] not in self._saved:
                    chunk, salt = bound.access.whole(bound.name)
                    self._put(names[id(table)], Pending(chunk), salt)

    # Where the rows are -------------------------------------------------------------------------

    def store(self, name: str) -> TableStore:
        """Private memory, unless it was shared before its first use."""
        if name not in self._stores:
            self._make(name, shared=False)
        return self._stores[name]

    def share(self) -> dict[str, str]:
        """Put all tables into memory that others of this host can attach; where they are."""
        for name in self.specs:
            self._make(name, shared=True)
        return {name: store.address for name, store in self._stores.items()}

    def attach(self, addresses: Mapping[str, str]) -> None:
        """Use the tables that another process of this host has shared."""
        from manyhands.embeddings.store import TableStore

        # Whoever shares them may be gone: what is here is given up only when all of theirs are.
        theirs = {n: TableStore.attach(n, table, addresses[n]) for n, table in self.specs.items()}
        self.close()
        self._saved.clear()
        self._stores.update(theirs)

    def addresses(self) -> dict[str, str]:
        """Where others can attach what this process uses."""
        return {name: store.address for name, store in self._stores.items()}

    def _make(self, name: str, *, shared: bool) -> None:
        from manyhands.embeddings.store import TableStore  # and numba: not where there is no table

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
            store.load(saved.chunk())
        if before is not None:
            store.load(before.export())
            before.close()
        self._stores[name] = store

    def close(self) -> None:
        for store in self._stores.values():
            store.close()
        self._stores.clear()

    # Rows out -----------------------------------------------------------------------------------

    def pull(self, name: str, ids: Tensor, source: Tensor) -> Tensor:
        return self._read(name, ids, create=self.makes_on_pull)

    def look(self, name: str, ids: Tensor) -> Tensor:
        return self._read(name, ids, create=False)

    def _read(self, name: str, ids: Tensor, *, create: bool) -> Tensor:
        store, numbers = self.store(name), ids.numpy()
        rows = np.empty((len(numbers), self.specs[name].dim), np.float32)
        store.gather(store.find(numbers, create=create, now=self.now), rows, numbers)
        return torch.from_numpy(rows)

    def rows(self) -> dict[str, TouchedRows]:
        """For a RowModel. The same ones, as long as the tables are where they are."""
        self.changed = True
        for name in self.specs:
            touched = self._touched.get(name)
            if touched is None or touched.store is not self.store(name):
                self._touched[name] = TouchedRows(self.store(name), self)
        return self._touched

    @contextmanager
    def lend(self, model: RowModel, batch: Any, seed: int) -> Iterator[Mapping[str, Rows]]:
        """The rows that a RowModel may change, while it does."""
        yield self.rows()

    # Gradients in -------------------------------------------------------------------------------

    def note(self, name: str, ids: Tensor, rows: Tensor) -> None:
        self._noted.append(_Noted(name, ids, rows))

    def forget(self) -> None:
        """What was looked up so far was for nothing."""
        self._noted.clear()

    def take(self) -> dict[str, SparseGrads]:
        """The gradients of all that was looked up since the last time; each id once."""
        noted, self._noted = self._noted, []
        found: dict[str, list[SparseGrads]] = {}
        for each in noted:
            if each.rows.grad is not None:
                grads = each.rows.grad.detach().to("cpu", torch.float32).contiguous().numpy()
                found.setdefault(each.name, []).append(SparseGrads(each.ids.numpy(), grads))
        return {name: self._one(name, parts) for name, parts in found.items()}

    def _one(self, name: str, parts: Sequence[SparseGrads]) -> SparseGrads:
        if len(parts) == 1:
            return parts[0]  # distinct already
        ids = np.concatenate([part.ids for part in parts])
        grads = np.concatenate([part.grads for part in parts])
        return SparseGrads(*self.store(name).merge(ids, grads))

    def step(self, lr: float, base_lr: float, now: int) -> None:
        """What was looked up is all there is: change its rows."""
        if grads := self.take():
            self.apply([grads], [1.0], lr=lr, base_lr=base_lr, now=now)
        self.evict_now_and_then(now)

    def apply(
        self,
        baskets: Sequence[Basket],
        coefficients: Sequence[float],
        *,
        lr: float,
        base_lr: float,
        now: int,
        mine: tuple[int, int] | None = None,
        undo: tuple[UndoLog, int] | None = None,
        make: bool = False,
    ) -> None:
        """Change the rows by baskets that are added up first. `lr` is the job's now, `base_lr` the one
        it began with. `mine`, (number, of how many): only the ids that fall to one of several.
        `undo`: where the rows are kept as they were, and the version that they will have. `make`: the
        ids count as seen now, and get rows, as looking them up has made none."""
        self.changed = True
        if mine is not None and mine[1] > 1:
            number, count = mine
            baskets = [
                {name: s.part(shard_of(s.ids, count) == number) for name, s in basket.items()}
                for basket in baskets
            ]
        merges = {name: self.store(name).merge for name in self.specs}
        summed = together(baskets, coefficients, merges)
        slots = {name: np.empty(0, np.int64) for name in self.specs}
        for name, sparse in summed.items():
            slots[name] = self.store(name).find(sparse.ids, create=make, now=now)
        if undo is not None:
            changed = {name: found[found >= 0] for name, found in slots.items()}
            log, version = undo
            log.begin(version, changed, self._stores)
        for name, sparse in summed.items():
            own = self.specs[name].lr
            rate = lr if own is None else own * (lr / base_lr if base_lr else 1.0)
            grads = np.ascontiguousarray(sparse.grads)
            self.store(name).update(slots[name], grads, lr=rate, now=now)
        if undo is not None:
            undo[0].end()

    @property
    def evicting(self) -> list[str]:
        """The tables that drop rows."""
        return [
            name
            for name, table in self.specs.items()
            if table.evict_unused or table.evict_below or table.when_full == "evict"
        ]

    def evict_now_and_then(self, now: int) -> None:
        if now % EVICT_EVERY == 0:
            self.evict(now)

    def evict(self, now: int) -> None:
        """Drop what the tables say may go, while nobody else touches them."""
        for name in self.evicting:
            self.store(name).evict(now)

    def restore(self, undo: UndoLog) -> None:
        """Put back what an update has changed."""
        undo.restore({name: self.store(name) for name in self.specs})

    # Saved --------------------------------------------------------------------------------------

    @property
    def incremental(self) -> bool:
        """Whether rows that were touched since a step can be told from others, and none goes."""
        return not self.in_place and not self.evicting

    def state_dict(self, since: int | None = None) -> dict[str, Any]:
        """All rows as tensors, or those touched after a step. Nobody may change them meanwhile."""
        return {
            name: {key: torch.from_numpy(array) for key, array in vars(chunk).items()}
            for name in self.specs
            for chunk in [self.store(name).export(since=since)]
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        missing, strange = self.specs.keys() - state.keys(), state.keys() - self.specs.keys()
        if missing or strange:
            raise KeyError(
                f"it has the tables {', '.join(sorted(state)) or 'none'}, and the job has "
                f"{', '.join(sorted(self.specs)) or 'none'}"
            )
        self.close()
        # Not before it is known where they will be: in a cluster one process alone needs them.
        self._saved = {name: Pending(given) for name, given in state.items()}
        self.changed = True

    def load_rows(self, state: Mapping[str, Any], *, anew: bool) -> None:
        """As load_state_dict, for tables whose optimizers may be others. `anew`: these rows are where a
        training begins, and nothing else counts."""
        for name, given in state.items():
            self._put(name, Pending(given, self.specs[name], anew=anew), self.salt(name))

    # As part of a model's state dict ------------------------------------------------------------

    def weights(self, name: str) -> RowWeights:
        """All rows of a table as they are now, without its optimizer's numbers."""
        if name in self._stores:
            return self._stores[name].weights()
        if name in self._saved:
            return self._read_saved(name).without_optimizer(self.salt(name))
        none = np.empty((0, self.specs[name].dim), np.float32)
        return RowWeights(np.empty(0, np.int64), none, none, self.salt(name))

    def put_weights(self, name: str, weights: RowWeights) -> None:
        """Let these be all rows of a table. Its optimizer begins anew."""
        chunk = untrained(weights, self.specs[name], now=self.now)
        self._put(name, Pending(chunk), weights.salt)

    def whole(self, name: str) -> tuple[RowChunk, int]:
        """All rows of a table with all that belongs to them, and its salt."""
        if name in self._stores:
            chunk = self._stores[name].export()
        elif name in self._saved:
            chunk = self._read_saved(name)
        else:
            chunk = untrained(self.weights(name), self.specs[name], now=self.now)
        return chunk, self.salt(name)

    def _read_saved(self, name: str) -> RowChunk:
        chunk = self._saved[name].chunk()
        self._saved[name] = Pending(chunk)  # it will be wanted again
        return chunk

    def salt(self, name: str) -> int:
        """What initial rows of a table are made from."""
        return self._salts.get(name, salt_of(name, self.seed))

    @property
    def salts(self) -> dict[str, int]:
        return {name: self.salt(name) for name in self.specs}

    @salts.setter
    def salts(self, salts: Mapping[str, int]) -> None:
        self._salts = dict(salts)

    def fingerprint(self) -> int:
        """The same for two processes with the same rows. 32 bits."""
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

    def __getstate__(self) -> dict[str, Any]:
        """For copy.deepcopy and pickle: the rows, wherever they are."""
        saved = {name: Pending(self.whole(name)[0]) for name in self.specs}
        return {
            **vars(self),
            "_stores": {},
            "_saved": saved,
            "_noted": [],
            "_touched": {},
            "batch": None,
        }


class OwnTables(LocalTables):
    """The tables of a model in a loop of the user's own: nobody steps them, so rows learn in the backward."""

    def note(self, name: str, ids: Tensor, rows: Tensor) -> None:
        rows.register_post_accumulate_grad_hook(lambda leaf: self._learn(name, ids, leaf))

    def _learn(self, name: str, ids: Tensor, leaf: Tensor) -> None:
        grads, leaf.grad = leaf.grad, None
        lr = self.specs[name].lr
        if grads is None:
            return
        if lr is None:
            warnings.warn(
                f"A table ({self.specs[name].describe()}) does not learn: a loop of your own has no learning "
                "rate that it could follow. Give it one, as  mh.SparseEmbedding(None, 64, lr=0.05),  or let "
                "mh.join()  or  manyhands train  train the model.",
                stacklevel=2,
            )
            return
        self.now += 1
        found = SparseGrads(ids.numpy(), grads.to("cpu", torch.float32).contiguous().numpy())
        self.apply([{name: found}], [1.0], lr=lr, base_lr=lr, now=self.now)


class TouchedRows:
    """The rows of a table in place."""

    def __init__(self, store: TableStore, tables: LocalTables) -> None:
        self.store = store
        self._tables = tables

    @property
    def ids(self) -> None:
        """All are in reach."""
        return None

    @property
    def matrix(self) -> NDArray[np.float32]:
        return self.store.rows

    @property
    def writers(self) -> int:
        return self._tables.writers

    def find(self, ids: NDArray[np.int64]) -> NDArray[np.int64]:
        return self.store.find(ids, create=True, now=self._tables.now)
