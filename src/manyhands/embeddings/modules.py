"""Modules with sparse tables: embeddings that look rows up, and models that change rows themselves.

SparseEmbedding and SparseEmbeddingBag replace torch's. They have no parameters: a forward pass gets the
rows of the distinct ids of the batch from wherever the strategy keeps them, as one leaf of the autograd
graph. Only the gradient of that leaf is pushed.

A RowModel computes without autograd: it reads and changes rows in place, in one pass, as word2vec does. A
module that is not bound to a run has its own rows, which are updated in the backward pass.

A state dict has for each table

    PATH.ids      int64 [n], ascending
    PATH.rows     float32 [n, dim]
    PATH.salt     what the initial row of any other id is made from
    PATH.shared   the row that new ids share, where the table is full

Modules that share a table all save it, as the same tensors, like tied weights in torch.
"""

from __future__ import annotations

import weakref
from abc import abstractmethod
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from manyhands.embeddings.chunk import RowWeights
from manyhands.embeddings.spec import Table, salt_of
from manyhands.errors import JobError, closest
from manyhands.runs.dense import rows_wanted

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from manyhands.embeddings.local_tables import LocalTables

ALONE = "table"
"""Name of a table whose module is not bound to a run."""
ANCHOR = "manyhands_anchor"
"""Name of the only parameter of a model that consists of tables."""


class Rows(Protocol):
    """The rows of a table that a RowModel may change."""

    @property
    def ids(self) -> NDArray[np.int64] | None:
        """The available ids, ascending, in the order of the matrix. None: all; `find` tells where each is."""

    @property
    def matrix(self) -> NDArray[np.float32]:
        """The rows. Other workers may change them at the same time."""

    @property
    def writers(self) -> int:
        """Number of workers that change these rows at the same time, including this one."""

    def find(self, ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the indices of ids in the matrix. New ids get a row."""


@dataclass(frozen=True)
class Bound:
    """The source of one of a module's tables."""

    access: LocalTables
    name: str
    """Name of the table in `access`."""


class TableHolder(nn.Module):
    """A module with tables, whose rows are part of its state."""

    def __init__(self) -> None:
        super().__init__()
        self._bound: dict[str, Bound] = {}

    def own_tables(self) -> dict[str, Table]:
        """Return the tables by their name in this module; the empty string if there is only one."""
        raise NotImplementedError

    def bind(self, names: Mapping[int, str], access: LocalTables) -> None:
        """Bind all tables to a source. `names`: by `id(table)`."""
        self._bound = {
            own: Bound(access, names[id(table)]) for own, table in self.own_tables().items()
        }

    def bound(self, own: str) -> Bound | None:
        """Return the source of a table, or None if it was never bound, loaded or trained."""
        return self._bound.get(own)

    def bind_alone(self, own: str) -> Bound:
        """Bind a table to rows of its own, which other modules with the same table share."""
        if own not in self._bound:
            self._bound[own] = Bound(_alone(self.own_tables()[own]), ALONE)
        return self._bound[own]

    def known(self, own: str) -> Bound:
        """Return the source of a table. Raises a JobError if it was never bound, loaded or trained."""
        bound = self.bound(own)
        if bound is None:
            raise JobError(
                f"{type(self).__name__} has no rows: it was never trained, loaded or part of a run, and has "
                'only initial numbers. Load a trained model with  mh.load("runs/NAME"),  or give '
                "model.load_state_dict(...)  a state dict that has the rows."
            )
        return bound

    def _save_to_state_dict(
        self, destination: dict[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if rows_wanted():
            for own, table in self.own_tables().items():
                at = _below(prefix, own)
                for key, tensor in self._tensors(own, table, destination, at).items():
                    destination[at + key] = tensor

    def _tensors(
        self, own: str, table: Table, destination: dict[str, Any], at: str
    ) -> dict[str, Tensor]:
        bound = self.bound(own)
        if bound is None:
            salt = salt_of(ALONE, torch.initial_seed())
            return _to_tensors(RowWeights.none(table.dim, salt))
        before = _Written.of(bound.access, destination).paths.setdefault(bound.name, at)
        if before + "ids" in destination:
            return {key: destination[before + key] for key in KEYS if before + key in destination}
        return _to_tensors(bound.access.weights(bound.name))

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str, *rest: Any) -> None:
        super()._load_from_state_dict(state_dict, prefix, *rest)
        _, strict, missing_keys, unexpected_keys, error_msgs = rest
        if not rows_wanted():
            return
        for own, table in self.own_tables().items():
            at = _below(prefix, own)
            ours = {at + key for key in KEYS}
            unexpected_keys[:] = [key for key in unexpected_keys if key not in ours]
            missing = [at + key for key in ("ids", "rows") if at + key not in state_dict]
            missing_keys += missing if strict else []
            if missing:
                continue
            found = {key: state_dict[at + key] for key in KEYS if at + key in state_dict}
            if problem := _problem(found, table):
                error_msgs.append(f"the rows of {at.rstrip('.') or 'the table'}: {problem}.")
                continue
            bound = self.bind_alone(own)
            bound.access.put_weights(bound.name, _to_weights(found, table))


KEYS = ("ids", "rows", "salt", "shared")
"""Keys of a table in a state dict."""


class _Written:
    """Paths of tables in the state dict that is being made."""

    def __init__(self, destination: dict[str, Any]) -> None:
        self.paths: dict[str, str] = {}
        self._destination: Callable[[], Any] = lambda: None
        with suppress(TypeError):  # a plain dict has no weak references
            self._destination = weakref.ref(destination)

    @classmethod
    def of(cls, access: LocalTables, destination: dict[str, Any]) -> _Written:
        written = _written.get(access)
        if written is None or written._destination() is not destination:
            written = _written[access] = cls(destination)
        return written


_written: weakref.WeakKeyDictionary[LocalTables, _Written] = weakref.WeakKeyDictionary()
_trained_alone: weakref.WeakValueDictionary[int, LocalTables] = weakref.WeakValueDictionary()
"""By `id(table)`; the entry keeps the table alive."""


def _alone(table: Table) -> LocalTables:
    from manyhands.embeddings.local_tables import OwnTables

    access = _trained_alone.get(id(table))
    if access is None:
        access = OwnTables({ALONE: table}, seed=torch.initial_seed())
        _trained_alone[id(table)] = access
    return access


def _below(prefix: str, own: str) -> str:
    return f"{prefix}{own}." if own else prefix


def _to_tensors(weights: RowWeights) -> dict[str, Tensor]:
    tensors = {
        "ids": torch.from_numpy(weights.ids),
        "rows": torch.from_numpy(weights.rows),
        "salt": torch.tensor(np.uint64(weights.salt).astype(np.int64)),
    }
    return tensors | ({"shared": torch.from_numpy(weights.shared)} if len(weights.shared) else {})


def _problem(found: Mapping[str, Any], table: Table) -> str:
    """Return why these can't be rows of the table, or an empty string."""
    if not all(isinstance(value, Tensor) for value in found.values()):
        return "ids, rows, salt and shared must be tensors"
    ids, rows = found["ids"], found["rows"]
    if ids.dim() != 1 or ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
        return (
            f"ids must be whole numbers in one dimension, and are {ids.dtype} of {list(ids.shape)}"
        )
    wanted = [len(ids), table.dim]
    if list(rows.shape) != wanted or not rows.is_floating_point():
        return f"rows must be floats of shape {wanted}, and are {rows.dtype} of {list(rows.shape)}"
    if "shared" in found and list(found["shared"].shape) != [1, table.dim]:
        return f"shared must have the shape {[1, table.dim]}, and has {list(found['shared'].shape)}"
    if len(ids) and table.rows is not None and not 0 <= ids.min() <= ids.max() < table.rows:
        return f"ids must be 0 to {table.rows - 1}, and are {int(ids.min())} to {int(ids.max())}"
    if len(torch.unique(ids)) != len(ids):
        return "an id occurs more than once"
    return ""


def _to_weights(found: Mapping[str, Tensor], table: Table) -> RowWeights:
    """Copy the tensors, as load_state_dict does."""
    order = torch.argsort(found["ids"].cpu())
    shared = found.get("shared", torch.empty(0, table.dim))
    salt = salt_of(ALONE, torch.initial_seed())
    if "salt" in found:
        salt = int(np.int64(found["salt"].item()).astype(np.uint64))
    return RowWeights(
        ids=found["ids"].cpu().to(torch.int64)[order].numpy(),
        rows=found["rows"].detach().cpu().to(torch.float32)[order].numpy(),
        shared=shared.detach().to("cpu", torch.float32, copy=True).numpy(),
        salt=salt,
    )


class TableModule(TableHolder):
    """A module with a table."""

    def __init__(
        self,
        num_embeddings: int | None,
        embedding_dim: int | None,
        padding_idx: int | None,
        table: Table | None,
        options: Mapping[str, Any],
    ) -> None:
        super().__init__()
        if table is None:
            if embedding_dim is None:
                raise JobError(f"{type(self).__name__} needs embedding_dim, or a table.")
            table = Table(dim=embedding_dim, rows=num_embeddings, **options)
        elif embedding_dim is not None or num_embeddings is not None or options:
            raise JobError(
                f"{type(self).__name__}: give either a table, or its options. "
                "Write  SparseEmbedding(table=table)."
            )
        self.table = table
        self.padding_idx = padding_idx

    def own_tables(self) -> dict[str, Table]:
        return {"": self.table}

    def extra_repr(self) -> str:
        return self.table.describe()

    def _rows(self, ids: Tensor, source: Tensor) -> tuple[Tensor, Tensor]:
        """Return the rows of the distinct ids, and for each id the index of its row. `source`: the ids as
        they were given."""
        if ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
            raise JobError(f"{type(self).__name__} looks up whole numbers, and got {ids.dtype}.")
        training = torch.is_grad_enabled()
        bound = self.bind_alone("") if training and self.training else self.known("")
        access, name = bound.access, bound.name
        distinct, inverse = torch.unique(
            ids.reshape(-1).to("cpu", torch.int64), return_inverse=True
        )
        if training:
            rows = access.pull(name, distinct, source).to(ids.device).requires_grad_()
            access.note(name, distinct, rows)
        else:
            rows = access.look(name, distinct).to(ids.device)
        if self.padding_idx is not None and (padding := distinct == self.padding_idx).any():
            rows = rows * (~padding).to(ids.device, rows.dtype).unsqueeze(1)
        return rows, inverse.to(ids.device)


class SparseEmbedding(TableModule):
    """Like torch.nn.Embedding, with rows in a table: `SparseEmbedding(None, 64)` takes any 64-bit id."""

    def __init__(
        self,
        num_embeddings: int | None = None,
        embedding_dim: int | None = None,
        padding_idx: int | None = None,
        *,
        table: Table | None = None,
        **options: Any,
    ) -> None:
        """`table`: a table that several modules share. Otherwise `options` are those of mh.Table."""
        super().__init__(num_embeddings, embedding_dim, padding_idx, table, options)

    def forward(self, ids: Tensor) -> Tensor:
        rows, inverse = self._rows(ids, ids)
        return functional.embedding(inverse, rows).view(*ids.shape, self.table.dim)


class SparseEmbeddingBag(TableModule):
    """Like torch.nn.EmbeddingBag, with rows in a table."""

    def __init__(
        self,
        num_embeddings: int | None = None,
        embedding_dim: int | None = None,
        *,
        mode: str = "mean",
        padding_idx: int | None = None,
        table: Table | None = None,
        **options: Any,
    ) -> None:
        if mode not in ("sum", "mean"):
            raise JobError(f"SparseEmbeddingBag: mode {mode!r} is none of sum, mean.")
        super().__init__(num_embeddings, embedding_dim, padding_idx, table, options)
        self.mode = mode

    def forward(
        self, ids: Tensor, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None
    ) -> Tensor:
        """Reduce each bag. Ids are [bags, ids per bag], or flat with the offset at which each bag begins."""
        if per_sample_weights is not None and self.mode != "sum":
            raise JobError("SparseEmbeddingBag: per_sample_weights are for mode='sum'.")
        if ids.dim() == 2:
            if offsets is not None:
                raise JobError("SparseEmbeddingBag: offsets are for flat ids.")
            offsets = torch.arange(0, ids.numel(), ids.shape[1], device=ids.device)
        elif ids.dim() != 1 or offsets is None:
            raise JobError(
                "SparseEmbeddingBag takes ids as [bags, ids a bag], or flat with offsets; it got "
                f"ids of shape {tuple(ids.shape)} {'with' if offsets is not None else 'without'} offsets."
            )
        flat = ids.reshape(-1)
        rows, inverse = self._rows(flat, ids)
        if per_sample_weights is None and self.padding_idx is not None and self.mode == "mean":
            # The mean excludes padding.
            return self._mean_without_padding(rows, inverse, flat, offsets)
        weights = None if per_sample_weights is None else per_sample_weights.reshape(-1)
        return functional.embedding_bag(
            inverse, rows, offsets, mode=self.mode, per_sample_weights=weights
        )

    def _mean_without_padding(
        self, rows: Tensor, inverse: Tensor, flat: Tensor, offsets: Tensor
    ) -> Tensor:
        summed = functional.embedding_bag(inverse, rows, offsets, mode="sum")
        assert self.padding_idx is not None
        counted = flat.ne(self.padding_idx).to(rows.dtype)
        bag = torch.bucketize(torch.arange(len(flat), device=flat.device), offsets, right=True) - 1
        counts = torch.zeros(len(offsets), device=flat.device).index_add_(0, bag, counted)
        return summed / counts.clamp(min=1.0).unsqueeze(1)


class RowModel(TableHolder):
    """A model that consists of tables and changes their rows itself.

    Set `tables` in `__init__`, by name, and implement `ids` and `touch`. Other workers change the same rows
    at the same time, so only strategies without synchronous updates can train it: `single`, and the
    asynchronous parameter servers.
    """

    tables: dict[str, Table]

    def own_tables(self) -> dict[str, Table]:
        return self.tables

    @abstractmethod
    def ids(self, batch: Any, *, seed: int) -> Mapping[str, NDArray[np.int64]]:
        """Return the ids of each table that `touch` will need. Ids may repeat."""

    @abstractmethod
    def touch(
        self, batch: Any, rows: Mapping[str, Rows], *, lr: float, seed: int
    ) -> tuple[float, float]:
        """Train on a batch. Returns (sum of the losses, number of terms)."""

    def look_up(self, table: str, ids: Tensor) -> Tensor:
        """Return the rows of ids of a table. Makes no rows and counts nothing."""
        if table not in self.tables:
            raise JobError(
                f"{type(self).__name__} has no table {table!r}{closest(table, self.tables)} "
                f"It has: {', '.join(self.tables)}."
            )
        bound = self.known(table)
        return bound.access.look(bound.name, ids.reshape(-1).to("cpu", torch.int64))

    def forward(self, *inputs: Any) -> Any:
        raise JobError(f"{type(self).__name__} changes rows itself, and has no forward.")


def tables_of(model: nn.Module) -> dict[str, Table]:
    """Return the tables of a model by name: the path of the first module that has the table."""
    found: dict[str, Table] = {}
    known: set[int] = set()
    for path, module in model.named_modules():
        if not isinstance(module, TableHolder):
            continue
        for own, table in module.own_tables().items():
            if id(table) not in known:
                known.add(id(table))
                found[".".join(filter(None, (path, own))) or ALONE] = table
    return found


def bind(model: nn.Module, access: LocalTables) -> None:
    """Set the source of rows of all modules of a model."""
    names = {id(table): name for name, table in tables_of(model).items()}
    for module in model.modules():
        if isinstance(module, TableHolder):
            module.bind(names, access)


def add_anchor(model: nn.Module) -> None:
    """Give a model that consists of tables one parameter, which stays 0: optimizers, schedules and gradient
    exchange need one."""
    model.register_parameter(ANCHOR, nn.Parameter(torch.zeros(1)))
