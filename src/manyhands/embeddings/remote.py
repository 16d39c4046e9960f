"""The tables of a model whose rows are at servers of other hosts: asked for by id, changed by what is pushed.

A pull asks each server for the distinct ids that it is asked for, and waits for all. Where nobody waits for
all workers anyway, rows are asked for one batch ahead, as far as they are foreseen, and may be kept for a
while. A RowModel gets copies of the rows of its batch, and what it has changed in them is pushed as
differences.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from torch import Tensor

from manyhands.embeddings.chunk import RowChunk, RowWeights
from manyhands.embeddings.local_tables import LocalTables
from manyhands.embeddings.prefetch import Prefetcher
from manyhands.embeddings.row_placement import RowPlacement
from manyhands.embeddings.sparse_grads import (
    SparseGrads,
    TableGrads,
    from_wire,
    num_bytes,
    pack_into,
    travelling,
)
from manyhands.errors import JobError
from manyhands.runs.table_files import KEYED

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from manyhands.embeddings.modules import RowModel, Rows


ROLE = "rows "
"""Of parcels that carry rows: this and the name of the table."""


class Servers(Protocol):
    """A client, as far as rows go."""

    homes: RowPlacement | None

    def rows(self, table: str, tag: int, ids: Mapping[str, memoryview]) -> None: ...
    def table_states(self, since: int | None = None) -> Arrived: ...
    def wait_for_rows(self, tag: int, servers: Sequence[str]) -> list[memoryview]: ...


class Carried(Protocol):
    state: dict[str, Any]


class Arrived(Protocol):
    """Rows by (role, shard)."""

    @property
    def complete(self) -> Mapping[tuple[str, int], Carried]: ...


class LocalRows(Protocol):
    """A server in this very process: asked without a message."""

    name: str

    def look_up(self, name: str, ids: NDArray[np.int64]) -> NDArray[np.float32]: ...
    def put(self, worker: str, slot: int, basket: TableGrads) -> None: ...


@dataclass(frozen=True)
class RowRequest:
    """Rows that are on their way."""

    tag: int
    ids: NDArray[np.int64]
    """Distinct, ascending."""
    places: Mapping[str, NDArray[np.int64]]
    """By server: which of the ids it was asked for."""
    here: tuple[NDArray[np.int64], NDArray[np.float32]] | None = None
    """Which of the ids are at the server that is near, and their rows."""


class RemoteTables(LocalTables):
    """As Tables; `servers` is set anew for each view."""

    def __init__(
        self, tables: LocalTables, *, adds: bool, bits: int = 32, age: int | None = None
    ) -> None:
        """`adds`: for a RowModel, which pushes differences. `bits`: of a number on the wire. `age`: steps
        that a row may be used for before it is asked for again; None: it has to be of the last step."""
        super().__init__(tables.specs, seed=tables.seed)
        self.stores.salts = tables.stores.salts
        self.in_place = adds
        self._bits = bits
        self._wire = travelling(tables.specs, adds=adds)
        self._kept: dict[str, RowCache] = {}
        if age is not None and not adds:
            self._kept = {name: RowCache(table.dim, age) for name, table in self._wire.items()}
        self._foresight = Prefetcher()
        self.servers: Servers | None = None
        self._near: LocalRows | None = None
        self._tags = 0
        self._ahead: dict[int, dict[str, RowRequest]] = {}
        self._coming: list[tuple[str, int, RowRequest]] = []
        """Rows that will be looked up, with their table and the step."""
        self._changed: list[TableGrads] = []

    def connect(self, servers: Servers, near: LocalRows | None) -> None:
        self.servers, self._near = servers, near
        self._ahead.clear()
        self._coming.clear()
        self._changed.clear()
        for kept in self._kept.values():
            kept.clear()
        self.forget()

    def _read(self, name: str, ids: Tensor, *, create: bool) -> Tensor:
        return torch.from_numpy(self._wait(name, self._ask(name, ids.numpy())))

    def pull(self, name: str, ids: Tensor, source: Tensor) -> Tensor:
        if name not in self._kept:
            return self.look(name, ids)
        self._foresight.learn(name, source, self.batch)
        return torch.from_numpy(self._read_kept(name, ids.numpy()))

    @property
    def foresees(self) -> bool:
        """Rows may be asked for before the step before is done."""
        return self.in_place or bool(self._kept)

    def expect(self, batch: Any, step: int) -> None:
        """Ask for the rows that will be looked up in the next batch."""
        assert self.servers is not None
        assert self.servers.homes is not None
        for name, foreseen in self._foresight.ids_in(batch).items():
            ids = self._kept[name].missing(foreseen.numpy(), step)
            if self._near is not None:  # what is at hand is read when it is needed
                ids = ids[~self.servers.homes.held_by(self._near.name, ids)]
            if len(ids):
                self._coming.append((name, step, self._ask(name, ids)))

    def _read_kept(self, name: str, ids: NDArray[np.int64]) -> NDArray[np.float32]:
        """Ask only for rows that are not here, or too old."""
        kept = self._kept[name]
        arrived = [c for c in self._coming if c[0] == name and c[1] <= self.now]
        for coming in arrived:
            self._coming.remove(coming)
            kept.put(coming[2].ids, self._wait(name, coming[2]), coming[1])
        rows, missing = kept.get(ids, self.now)
        if missing.any():
            rows[missing] = self._wait(name, self._ask(name, ids[missing]))
            kept.put(ids[missing], rows[missing], self.now)
        return rows

    def _ask(self, name: str, ids: NDArray[np.int64]) -> RowRequest:
        servers = self.servers
        assert servers is not None
        assert servers.homes is not None
        self._tags += 1
        near = self._near
        whom = servers.homes.asked(ids, near.name if near is not None else None)
        places = {
            server: np.flatnonzero(whom == i)
            for i, server in enumerate(servers.homes.servers)
            if (whom == i).any()
        }
        here = None
        if near is not None and (chosen := places.pop(near.name, None)) is not None:
            here = chosen, near.look_up(name, ids[chosen])
        asked = {
            server: np.ascontiguousarray(ids[chosen]).view(np.uint8).data
            for server, chosen in places.items()
        }
        servers.rows(name, self._tags, asked)
        return RowRequest(self._tags, ids, places, here)

    def _wait(self, name: str, asked: RowRequest) -> NDArray[np.float32]:
        assert self.servers is not None
        if asked.here is not None and not asked.places:
            return asked.here[1]
        rows = np.empty((len(asked.ids), self._wire[name].dim), np.float32)
        if asked.here is not None:
            rows[asked.here[0]] = asked.here[1]
        heard = self.servers.wait_for_rows(asked.tag, list(asked.places))
        for chosen, payload in zip(asked.places.values(), heard, strict=True):
            rows[chosen] = from_wire(payload, self._wire[name].dim, self._bits)
        return rows

    def state_dict(self, since: int | None = None) -> dict[str, Any]:
        assert self.servers is not None
        tensor_messages = self.servers.table_states(since)
        return {
            name: _one_of(
                [
                    m.state
                    for (role, _), m in tensor_messages.complete.items()
                    if role == ROLE + name
                ]
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
        """Ask for the rows of a batch that will be trained on soon."""
        self._ahead[seed] = self._ask_all(model, batch, seed)

    def _ask_all(self, model: RowModel, batch: Any, seed: int) -> dict[str, RowRequest]:
        wanted = model.ids(batch, seed=seed)
        return {name: self._ask(name, _distinct(ids)) for name, ids in wanted.items()}

    @contextmanager
    def lend(self, model: RowModel, batch: Any, seed: int) -> Iterator[Mapping[str, Rows]]:
        asked = self._ahead.pop(seed, None) or self._ask_all(model, batch, seed)
        before = {name: self._wait(name, each) for name, each in asked.items()}
        rows = {
            name: CopiedRows(asked[name].ids, before[name][:, : self.specs[name].dim].copy())
            for name in asked
        }
        yield rows
        changed = {name: _changed(before[name], each) for name, each in rows.items()}
        self._changed.append(changed)

    def take(self) -> dict[str, SparseGrads]:
        changed, self._changed = self._changed, []
        found = super().take()
        for name in self.specs:
            parts = [basket[name] for basket in changed if name in basket]
            if parts:
                found[name] = self._merged(parts)
        return found

    def _merged(self, parts: Sequence[SparseGrads]) -> SparseGrads:
        if len(parts) == 1:
            return parts[0]
        ids = np.concatenate([part.ids for part in parts])
        grads = np.concatenate([part.grads for part in parts])
        order = np.argsort(ids, kind="stable")
        starts = np.flatnonzero(np.diff(ids[order], prepend=ids[order][:1] - 1))
        return SparseGrads(ids[order][starts], np.add.reduceat(grads[order], starts, axis=0))

    def give(self, worker: str, slot: int, basket: TableGrads) -> dict[str, memoryview]:
        """To each server what it holds of a basket: at once to the one that is near, to others as the
        bytes that are to travel with the push."""
        assert self.servers is not None
        assert self.servers.homes is not None
        homes, told = self.servers.homes, {}
        for server in homes.servers:
            mine = {name: s.part(homes.held_by(server, s.ids)) for name, s in basket.items()}
            if self._near is not None and server == self._near.name:
                self._near.put(worker, slot, mine)
                continue
            memory = memoryview(bytearray(num_bytes(mine, self._wire, bits=self._bits)))
            pack_into(memory, mine, self._wire, bits=self._bits)
            told[server] = memory
        return told


class RowCache:
    """Rows that were fetched lately, by ascending id."""

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
        """The rows of ids, and which of them are missing."""
        rows = np.empty((len(ids), self._dim), np.float32)
        places, here = self._find(ids, now)
        rows[here] = self._rows[places[here]]
        return rows, ~here

    def missing(self, ids: NDArray[np.int64], now: int) -> NDArray[np.int64]:
        """Those of ids whose rows are not here, or too old by then."""
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


class CopiedRows:
    """Rows that were fetched, and will be pushed as far as they have changed."""

    def __init__(self, ids: NDArray[np.int64], matrix: NDArray[np.float32]) -> None:
        self.ids = ids
        self.matrix = matrix
        self.writers = 1

    def find(self, ids: NDArray[np.int64]) -> NDArray[np.int64]:
        return np.searchsorted(self.ids, ids)


def _distinct(ids: NDArray[np.int64]) -> NDArray[np.int64]:
    """Ascending; mostly they are."""
    return ids if (ids[1:] > ids[:-1]).all() else np.unique(ids)


def _changed(before: NDArray[np.float32], rows: CopiedRows) -> SparseGrads:
    """What was made of rows, and what travels along with them."""
    from manyhands.embeddings.kernels import changes

    ids = np.empty(
        len(before) + 1, np.int64
    )  # one more: written to before it is known to be for nothing
    given = np.empty((len(before) + 1, before.shape[1]), np.float32)
    count = changes(rows.ids, before, rows.matrix, ids, given)
    return SparseGrads(ids[:count], given[:count])


def _one_of(parts: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Chunks of several shards as one, by ascending id."""
    whole = {key: torch.cat([part[key] for part in parts]) for key in parts[0]}
    whole["shared"] = parts[0]["shared"]  # each server has one of its own
    for by, keys in KEYED.items():
        order = torch.argsort(whole[by])
        whole |= {key: whole[key][order] for key in keys}
    return whole
