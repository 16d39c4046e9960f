"""Tables in a model: modules that look rows up, and models that change rows themselves.

SparseEmbedding and SparseEmbeddingBag take the places of torch's. They have no parameters: a forward
gets the rows of the batch's distinct ids from wherever the strategy keeps them, as one leaf of the
autograd graph, whose gradient is all that a push carries.

A RowModel computes without autograd: it reads and changes rows in place, in one pass, as word2vec does.
Not bound to a training, a module keeps its rows to itself.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from manyhands.errors import JobError
from manyhands.tables.spec import Table

if TYPE_CHECKING:
    from numpy.typing import NDArray


class Access(Protocol):
    """Where a module gets its rows."""

    def pull(self, name: str, ids: Tensor, source: Tensor) -> Tensor:
        """The rows of distinct ids, of which some may be new. `source`: the ids as they were given."""

    def look(self, name: str, ids: Tensor) -> Tensor:
        """The same, and nothing is made or counted."""

    def note(self, name: str, ids: Tensor, rows: Tensor) -> None:
        """These rows are part of a graph: their gradient is wanted."""


class Rows(Protocol):
    """The rows of a table that a RowModel may change."""

    @property
    def ids(self) -> NDArray[np.int64] | None:
        """Those that are in reach, ascending, as the rows of the matrix; None: all, wherever `find` says."""

    @property
    def matrix(self) -> NDArray[np.float32]:
        """Rows under each other; others may change them at the same time."""

    @property
    def writers(self) -> int:
        """How many workers change these rows at the same time, this one among them."""

    def find(self, ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """Which rows of the matrix the ids have; new ids get one."""


class TableModule(nn.Module):
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
                f"{type(self).__name__}: what the table says can't be said beside it. "
                "Write  SparseEmbedding(table=table)."
            )
        self.table = table
        self.padding_idx = padding_idx
        self._name = ""
        self._access: Access | None = None

    def bind(self, name: str, access: Access) -> None:
        self._name, self._access = name, access

    def extra_repr(self) -> str:
        return self.table.describe()

    def _rows(self, ids: Tensor, source: Tensor) -> tuple[Tensor, Tensor]:
        """The rows of the distinct ids, and for each id the number of its row. `source`: the ids as they
        were given."""
        if ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
            raise JobError(f"{type(self).__name__} looks up whole numbers, and got {ids.dtype}.")
        if self._access is None:
            from manyhands.tables.held import Tables

            Tables.of(self, seed=torch.initial_seed())
        access = self._access
        assert access is not None
        distinct, places = torch.unique(ids.reshape(-1).to("cpu", torch.int64), return_inverse=True)
        padding = None
        if self.padding_idx is not None:
            place = int(torch.searchsorted(distinct, self.padding_idx))
            here = place < len(distinct) and int(distinct[place]) == self.padding_idx
            padding = place if here else None
        if torch.is_grad_enabled():
            rows = access.pull(self._name, distinct, source).to(ids.device).requires_grad_()
            access.note(self._name, distinct, rows)
        else:
            rows = access.look(self._name, distinct).to(ids.device)
        if padding is not None:
            kept = torch.ones(len(distinct), 1, device=ids.device)
            kept[padding] = 0.0
            return rows * kept, places.to(ids.device)
        return rows, places.to(ids.device)


class SparseEmbedding(TableModule):
    """As torch.nn.Embedding, with rows in a table: `SparseEmbedding(None, 64)` takes any 64-bit id."""

    def __init__(
        self,
        num_embeddings: int | None = None,
        embedding_dim: int | None = None,
        padding_idx: int | None = None,
        *,
        table: Table | None = None,
        **options: Any,
    ) -> None:
        """`table` is one that several modules share; otherwise `options` are those of mh.Table."""
        super().__init__(num_embeddings, embedding_dim, padding_idx, table, options)

    def forward(self, ids: Tensor) -> Tensor:
        rows, places = self._rows(ids, ids)
        return functional.embedding(places, rows).view(*ids.shape, self.table.dim)


class SparseEmbeddingBag(TableModule):
    """As torch.nn.EmbeddingBag, with rows in a table."""

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
        """Ids as [bags, ids a bag], or flat with the offset at which each bag begins."""
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
        rows, places = self._rows(flat, ids)
        if per_sample_weights is None and self.padding_idx is not None and self.mode == "mean":
            # The mean is over what is no padding.
            return self._mean_without_padding(rows, places, flat, offsets)
        weights = None if per_sample_weights is None else per_sample_weights.reshape(-1)
        return functional.embedding_bag(
            places, rows, offsets, mode=self.mode, per_sample_weights=weights
        )

    def _mean_without_padding(
        self, rows: Tensor, places: Tensor, flat: Tensor, offsets: Tensor
    ) -> Tensor:
        summed = functional.embedding_bag(places, rows, offsets, mode="sum")
        assert self.padding_idx is not None
        counted = flat.ne(self.padding_idx).to(rows.dtype)
        bag = torch.bucketize(torch.arange(len(flat), device=flat.device), offsets, right=True) - 1
        counts = torch.zeros(len(offsets), device=flat.device).index_add_(0, bag, counted)
        return summed / counts.clamp(min=1.0).unsqueeze(1)


class RowModel(nn.Module):
    """A model that is all tables, and changes their rows itself.

    Give `tables` a name for each table in `__init__`, and write `touch`. The rows are shared with
    whoever trains beside this worker, so only strategies that need no order can train it: `single`,
    and the parameter servers that do not wait for all.
    """

    tables: dict[str, Table]

    @abstractmethod
    def ids(self, batch: Any, *, seed: int) -> Mapping[str, NDArray[np.int64]]:
        """The ids of each table whose rows `touch` will want, with or without repetition."""

    @abstractmethod
    def touch(
        self, batch: Any, rows: Mapping[str, Rows], *, lr: float, seed: int
    ) -> tuple[float, float]:
        """One pass over the batch; (sum of the losses, what it was summed over)."""

    def forward(self, *inputs: Any) -> Any:
        raise JobError(f"{type(self).__name__} changes rows itself, and has no forward.")


def tables_of(model: nn.Module) -> dict[str, Table]:
    """The tables of a model by name: the path of the first module that has it."""
    found: dict[str, Table] = {}
    known: set[int] = set()
    for path, module in model.named_modules():
        if isinstance(module, RowModel):
            owned = {f"{path}.{name}".lstrip("."): t for name, t in module.tables.items()}
        elif isinstance(module, TableModule):
            owned = {path or "table": module.table}
        else:
            continue
        for name, table in owned.items():
            if id(table) not in known:
                known.add(id(table))
                found[name] = table
    return found


def bind(model: nn.Module, access: Access) -> None:
    """From now on the modules of a model get their rows there."""
    names = {id(table): name for name, table in tables_of(model).items()}
    for module in model.modules():
        if isinstance(module, TableModule):
            module.bind(names[id(module.table)], access)
