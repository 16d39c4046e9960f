"""The tables of a model whose rows are at parameter servers of other hosts: pulled by id, changed by pushes.

A pull requests distinct ids from their servers and waits for all answers. In asynchronous modes, rows are
requested one batch ahead as far as they can be predicted, and may be cached for some steps. A RowModel gets
copies of the rows of its batch; what it changes in them is pushed as differences.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from manyhands.embeddings.chunk import RowChunk, RowWeights
from manyhands.embeddings.local_tables import LocalTables
from manyhands.embeddings.prefetch import Prefetcher
from manyhands.embeddings.sparse_grads import (
    SparseGrads,
    TableGrads,
    from_wire,
    merged,
    num_bytes,
    pack_into,
    wire_specs,
)
from manyhands.errors import JobError
from manyhands.ps.rows import ROLE
from manyhands.runs.table_files import KEYED

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from manyhands.embeddings.modules import RowModel, Rows
    from manyhands.embeddings.row_placement import RowPlacement
    from manyhands.ps.requests import ServerRequests
    from manyhands.ps.rows import ColocatedRows


@dataclass(frozen=True)
class RowRequest:
    """Rows that were requested."""

    tag: int
    ids: NDArray[np.int64]
    """Distinct, ascending."""
    places: Mapping[str, NDArray[np.int64]]
    """By server: indices of the ids that were requested from it."""
    here: tuple[NDArray[np.int64], NDArray[np.float32]] | None = None
    """Indices of the ids at the local server, and their rows."""


class RemoteTables(LocalTables):
    """Tables at servers. `servers` changes with each view."""

    def __init__(
        self, tables: LocalTables, *, adds: bool, bits: int = 32, age: int | None = None
    ) -> None:
        """`adds`: for a RowModel, which pushes differences. `bits`: of each number on the wire. `age`: steps
        for which a row may be cached; None: rows are always requested."""
        super().__init__(tables.specs, seed=tables.stores.seed)
        self.stores.salts = tables.stores.salts
        self.in_place = adds
        self._bits = bits
        self._wire = wire_specs(tables.specs, adds=adds)
        self._caches: dict[str, RowCache] = {}
        if age is not None and not adds:
            self._caches = {name: RowCache(table.dim, age) for name, table in self._wire.items()}
        self._prefetcher = Prefetcher()
        self.servers: ServerRequests
        self._local: ColocatedRows | None = None
        self._last_tag = 0
        self._requested_batches: dict[int, dict[str, RowRequest]] = {}
        self._requested: list[tuple[str, int, RowRequest]] = []
        """Requested rows that will be looked up, with their table and step."""
        self._changed: list[TableGrads] = []

    def connect(self, servers: ServerRequests, local: ColocatedRows | None) -> None:
        self.servers, self._local = servers, local
        self._requested_batches.clear()
        self._requested.clear()
        self._changed.clear()
        for cache in self._caches.values():
            cache.clear()
        self.forget()

    @property
    def _placement(self) -> RowPlacement:
        assert self.servers.row_placement is not None, "the view has begun"
        return self.servers.row_placement

    def _read(self, name: str, ids: Tensor, *, create: bool) -> Tensor:
        return torch.from_numpy(self._wait(name, self._request(name, ids.numpy())))

    def pull(self, name: str, ids: Tensor, source: Tensor) -> Tensor:
        if name not in self._caches:
            return self.look(name, ids)
        self._prefetcher.learn(name, source, self.batch)
        return torch.from_numpy(self._read_cached(name, ids.numpy()))

    @property
    def foresees(self) -> bool:
        """If true, rows may be requested before the previous step is done."""
        return self.in_place or bool(self._caches)

    def expect(self, batch: Any, step: int) -> None:
        """Request the rows that the next batch is predicted to look up."""
        for name, predicted in self._prefetcher.ids_in(batch).items():
            ids = self._caches[name].missing(predicted.numpy(), step)
            if self._local is not None:  # local rows are read when they are needed
                ids = ids[~self._placement.held_by(self._local.name, ids)]
            if len(ids):
                self._requested.append((name, step, self._request(name, ids)))

    def _read_cached(self, name: str, ids: NDArray[np.int64]) -> NDArray[np.float32]:
        """Request only rows that are not cached, or too old."""
        cache = self._caches[name]
        arrived = [c for c in self._requested if c[0] == name and c[1] <= self.now]
        for each in arrived:
            self._requested.remove(each)
            cache.put(each[2].ids, self._wait(name, each[2]), each[1])
        rows, missing = cache.get(ids, self.now)
        if missing.any():
            rows[missing] = self._wait(name, self._request(name, ids[missing]))
            cache.put(ids[missing], rows[missing], self.now)
        return rows

    def _request(self, name: str, ids: NDArray[np.int64]) -> RowRequest:
        self._last_tag += 1
        local, placement = self._local, self._placement
        server_of = placement.server_of(ids, local.name if local is not None else None)
        places = {
            server: np.flatnonzero(server_of == i)
            for i, server in enumerate(placement.servers)
            if (server_of == i).any()
        }
        here = None
        if local is not None and (indices := places.pop(local.name, None)) is not None:
            here = indices, local.look_up(name, ids[indices])
        request = {
            server: np.ascontiguousarray(ids[indices]).view(np.uint8).data
            for server, indices in places.items()
        }
        self.servers.rows(name, self._last_tag, request)
        return RowRequest(self._last_tag, ids, places, here)

    def _wait(self, name: str, request: RowRequest) -> NDArray[np.float32]:
        if request.here is not None and not request.places:
            return request.here[1]
        rows = np.empty((len(request.ids), self._wire[name].dim), np.float32)
        if request.here is not None:
            rows[request.here[0]] = request.here[1]
        payloads = self.servers.wait_for_rows(request.tag, list(request.places))
        for indices, payload in zip(request.places.values(), payloads, strict=True):
            rows[indices] = from_wire(payload, self._wire[name].dim, self._bits)
        return rows

    def state_dict(self, since: int | None = None) -> dict[str, Any]:
        states = self.servers.table_states(since)
        return {
            name: _concatenate(
                [m.state for (role, _), m in states.complete.items() if role == ROLE + name]
            )
            for name in self.specs
        }

    def weights(self, name: str) -> RowWeights:
        state = {key: tensor.numpy() for key, tensor in self.state_dict()[name].items()}
        return RowChunk(**state).without_optimizer(self.stores.salt(name))

    def put_weights(self, name: str, weights: RowWeights) -> None:
        raise JobError(
            f"The rows of the table {name!r} are at the parameter servers by now. Load them in the job's "
            "model(), or start with  manyhands train JOB --init-from RUN."
        )

    # For a RowModel -----------------------------------------------------------------------------

    def ahead(self, model: RowModel, batch: Any, seed: int) -> None:
        """Request the rows of the next batch."""
        self._requested_batches[seed] = self._request_all(model, batch, seed)

    def _request_all(self, model: RowModel, batch: Any, seed: int) -> dict[str, RowRequest]:
        needed = model.ids(batch, seed=seed)
        return {name: self._request(name, _distinct(ids)) for name, ids in needed.items()}

    @contextmanager
    def lend(self, model: RowModel, batch: Any, seed: int) -> Iterator[Mapping[str, Rows]]:
        request = self._requested_batches.pop(seed, None) or self._request_all(model, batch, seed)
        before = {name: self._wait(name, each) for name, each in request.items()}
        rows = {
            name: CopiedRows(request[name].ids, before[name][:, : self.specs[name].dim].copy())
            for name in request
        }
        yield rows
        changed = {name: _changed(before[name], each) for name, each in rows.items()}
        self._changed.append(changed)

    def take(self) -> dict[str, SparseGrads]:
        changed, self._changed = self._changed, []
        found = super().take()
        for name in self.specs:
            parts = [grads[name] for grads in changed if name in grads]
            if parts:
                found[name] = merged(parts)
        return found

    def give(self, worker: str, slot: int, grads: TableGrads) -> dict[str, memoryview]:
        """Split gradients by server. Those of the local server are put there at once; for the others,
        returns the bytes to send with the push."""
        placement, payloads = self._placement, {}
        for server in placement.servers:
            selected = {name: s.part(placement.held_by(server, s.ids)) for name, s in grads.items()}
            if self._local is not None and server == self._local.name:
                self._local.put(worker, slot, selected)
                continue
            memory = memoryview(bytearray(num_bytes(selected, self._wire, bits=self._bits)))
            pack_into(memory, selected, self._wire, bits=self._bits)
            payloads[server] = memory
        return payloads


class RowCache:
    """Recently fetched rows, by ascending id."""

    def __init__(self, dim: int, age: int) -> None:
        self._dim, self._age = dim, age
        self.clear()

    def clear(self) -> None:
        self._ids = np.empty(0, np.int64)
        self._rows = np.empty((0, self._dim), np.float32)
        self._since = np.empty(0, np.int64)

    def get(
        self, ids: NDArray[np.int64], now: int
    ) -> tuple[NDArray[np.float32], NDArray[np.bool_]]:
        """Return the rows of ids, and a mask of those that are missing."""
        rows = np.empty((len(ids), self._dim), np.float32)
        places, here = self._find(ids, now)
        rows[here] = self._rows[places[here]]
        return rows, ~here

    def missing(self, ids: NDArray[np.int64], now: int) -> NDArray[np.int64]:
        """Return the ids whose rows are not cached, or too old by then."""
        return ids[~self._find(ids, now)[1]]

    def _find(
        self, ids: NDArray[np.int64], now: int
    ) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        if not len(self._ids):
            return np.zeros(len(ids), np.int64), np.zeros(len(ids), bool)
        places = np.minimum(np.searchsorted(self._ids, ids), len(self._ids) - 1)
        return places, (self._ids[places] == ids) & (now - self._since[places] <= self._age)

    def put(self, ids: NDArray[np.int64], rows: NDArray[np.float32], now: int) -> None:
        stays = (now - self._since <= self._age) & ~np.isin(self._ids, ids)
        every = np.concatenate([self._ids[stays], ids])
        order = np.argsort(every, kind="stable")
        self._ids = every[order]
        self._rows = np.concatenate([self._rows[stays], rows])[order]
        self._since = np.concatenate([self._since[stays], np.full(len(ids), now)])[order]


@dataclass(frozen=True)
class CopiedRows:
    """Copies of rows. Those that change will be pushed."""

    ids: NDArray[np.int64]
    matrix: NDArray[np.float32]
    writers: int = 1

    def find(self, ids: NDArray[np.int64]) -> NDArray[np.int64]:
        return np.searchsorted(self.ids, ids)


def _distinct(ids: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return distinct ids, ascending; usually they are already."""
    return ids if (ids[1:] > ids[:-1]).all() else np.unique(ids)


def _changed(before: NDArray[np.float32], rows: CopiedRows) -> SparseGrads:
    """Return the differences of the changed rows, with the further columns of `before`."""
    from manyhands.embeddings.kernels import changes

    # One more than rows: an entry is written before it is known whether the row changed.
    ids = np.empty(len(before) + 1, np.int64)
    differences = np.empty((len(before) + 1, before.shape[1]), np.float32)
    count = changes(rows.ids, before, rows.matrix, ids, differences)
    return SparseGrads(ids[:count], differences[:count])


def _concatenate(parts: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Concatenate chunks of several shards, by ascending id."""
    whole = {key: torch.cat([part[key] for part in parts]) for key in parts[0]}
    whole["shared"] = parts[0]["shared"]  # each server has its own; take one
    for by, keys in KEYED.items():
        order = torch.argsort(whole[by])
        whole |= {key: whole[key][order] for key in keys}
    return whole
