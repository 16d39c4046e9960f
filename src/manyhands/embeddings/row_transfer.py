"""Copies rows out of a table and into one, and deletes them: export, load, drop, evict.

Drop and evict build a new index beside the old one and switch to it by writing one word. A process killed in
between leaves either the old index or the new one. Afterwards all slots without an entry are free, including
those that a killed process leaked.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike, NDArray

from manyhands.embeddings import index as finding
from manyhands.embeddings.chunk import Floats, Ids, RowChunk, RowWeights
from manyhands.embeddings.layout import (
    FREE,
    FULL,
    GENERATION,
    LEVELS,
    NEXT,
    WAITING_LEVELS,
    entries_in,
)
from manyhands.embeddings.shards import shard_of
from manyhands.errors import JobError

if TYPE_CHECKING:
    from manyhands.embeddings.store import TableStore

KEPT_WHEN_FULL = 7 / 8
"""Fraction of rows that stay when a full table is evicted."""
_LOW = (1 << 32) - 1


def live(store: TableStore) -> Ids:
    """Return the slots of all ids with a row of their own.

    Rows that other workers make meanwhile may be missing; older rows are not.
    """
    t, layout = store.arrays, store.layout
    if not layout.hashed:
        return np.flatnonzero(t.metas[::2])
    begin = layout.index(int(t.head[GENERATION]))
    while True:
        known = int(t.head[NEXT])
        slots = np.empty(known + known // 8 + 64, dtype=np.int64)
        found = 0
        for offset, size in store.memory.extents(begin, t.index.nbytes):
            first = (offset - begin) // 8
            found = finding.slots_in(t.index, first, first + size // 8, slots, found)
        if found < slots.size:  # otherwise so many rows were made that the scan ended early
            return slots[:found]


def ids_of(store: TableStore, slots: Ids) -> Ids:
    return store.arrays.metas[2 * slots] if store.layout.hashed else slots


def export(
    store: TableStore,
    *,
    shards: Sequence[int] | None = None,
    of: int = 1,
    since: int | None = None,
) -> RowChunk:
    """Copy all rows, those of some shards (see `shard_of`), or only those touched after step `since`."""
    t, dim = store.arrays, store.spec.dim

    def in_shards(ids: Ids) -> NDArray[np.bool_]:
        return np.ones(ids.size, bool) if shards is None else np.isin(shard_of(ids, of), shards)

    slots, ids = _by_id(store)
    selected = in_shards(ids)
    if since is not None:
        selected &= t.marks[4 * slots + 3] > since
    slots, ids = slots[selected], ids[selected]
    waiting, counts = _waiting(store)
    selected = in_shards(waiting)
    shared = _shared(store)
    return RowChunk(
        ids=ids,
        rows=t.records[slots, :dim],
        state=_state(store, slots),
        counts=t.marks[4 * slots + 2].astype(np.int64),
        last_used=t.marks[4 * slots + 3].astype(np.int64),
        waiting_ids=waiting[selected],
        waiting_counts=counts[selected],
        shared=np.concatenate([t.records[shared, :dim], _state(store, shared)], axis=1),
    )


def weights(store: TableStore) -> RowWeights:
    """Copy all rows, without the state of the optimizer."""
    slots, ids = _by_id(store)
    return RowWeights(
        ids=ids,
        rows=store.rows[slots],
        shared=store.rows[_shared(store)],
        salt=int(store.init.salt),
    )


def _by_id(store: TableStore) -> tuple[Ids, Ids]:
    """Return the slots of all rows and their ids, by ascending id."""
    slots = live(store)
    ids = ids_of(store, slots)
    order = np.argsort(ids)
    return slots[order], ids[order]


def _shared(store: TableStore) -> Ids:
    """Return the slot of the row that new ids share, if it is in use."""
    used = store.layout.hashed and store.arrays.marks[2]
    return np.zeros(1 if used else 0, np.int64)


def load(store: TableStore, chunk: RowChunk) -> None:
    """Write the rows of a chunk, over rows with the same ids."""
    t, dim = store.arrays, store.spec.dim
    state = _state(store, np.empty(0, dtype=np.int64)).shape[1]
    if chunk.rows.shape[1:] != (dim,) or chunk.state.shape[1:] != (state,):
        raise JobError(
            f"These rows don't belong to the table {store.name!r}: they have "
            f"{chunk.rows.shape[1]} + {chunk.state.shape[1]} numbers (row + optimizer), the table has "
            f"{dim} + {state}. Resume with the Table that the job had."
        )
    slots = store.look_up(chunk.ids, finding.PUT)
    if slots.size and slots.min() < 0:
        raise JobError(
            f"The table {store.name!r} has room for {store.layout.capacity - 1:,} rows, and "
            f"{int((slots < 0).sum()):,} of those to load don't fit. Give it more max_bytes or more "
            "servers."
        )
    _put(store, slots, chunk.rows, chunk.state)
    t.marks[4 * slots + 2] = chunk.counts
    t.marks[4 * slots + 3] = chunk.last_used
    _put_waiting(store, chunk.waiting_ids, chunk.waiting_counts)
    if len(chunk.shared) and store.layout.hashed and not t.marks[2]:
        _put(store, np.zeros(1, dtype=np.int64), chunk.shared[:, :dim], chunk.shared[:, dim:])
        t.marks[2] = 1
    # Ids that shared a row keep sharing it, unless this table has more space.
    if store.layout.hashed and t.marks[2] and not _has_room(store):
        t.head[FULL] = 1


def drop(store: TableStore, ids: ArrayLike) -> int:
    """Delete rows, while no other process uses the table. Returns how many there were."""
    ids = np.asarray(ids, dtype=np.int64)
    gone = store.look_up(np.unique(ids), finding.LOOK)
    gone = gone[gone > 0] if store.layout.hashed else gone[gone >= 0]
    all_live = live(store)
    _keep(store, all_live[~np.isin(all_live, gone)], gone)
    waiting, counts = _waiting(store)
    _clear_waiting(store)
    others = ~np.isin(waiting, ids)
    _put_waiting(store, waiting[others], counts[others])
    return len(gone)


def evict(store: TableStore, now: int) -> int:
    """Delete rows as the spec says, and the counts of ids without a row. Returns how many rows went.

    No other process may use the table meanwhile. While the index is rebuilt, there are two.
    """
    t, spec = store.arrays, store.spec
    slots = live(store)
    ids = ids_of(store, slots)
    last = t.marks[4 * slots + 3].astype(np.int64)
    evicted = np.zeros(slots.size, dtype=np.bool_)
    if spec.evict_unused is not None:
        evicted |= now - last >= spec.evict_unused
    if spec.evict_below is not None:
        evicted |= t.marks[4 * slots + 2] < spec.evict_below
    if spec.when_full == "evict" and store.full:
        over = int((~evicted).sum()) - int(KEPT_WHEN_FULL * (store.layout.capacity - 1))
        stay = np.flatnonzero(~evicted)
        if over > 0:
            # By id where the step is the same, so that every run evicts the same rows.
            evicted[stay[np.lexsort((ids[stay], last[stay]))[:over]]] = True
    _keep(store, slots[~evicted], slots[evicted])
    _clear_waiting(store)
    return int(evicted.sum())


def _keep(store: TableStore, kept: Ids, gone: Ids) -> None:
    """Rebuild the index with these slots alone."""
    t, head = store.arrays, store.arrays.head
    if not store.layout.hashed:
        t.metas[2 * gone] = 0
        t.metas[2 * gone + 1] = 0
        return
    new = 1 - int(head[GENERATION])
    begin = store.layout.index(new)
    store.memory.free_pages(begin, t.index.nbytes)
    store.memory.allocate(
        store.name,
        store.layout.level_ranges(new, 0, int(head[LEVELS])),
        advice="Evict earlier: the index is rebuilt beside the old one.",
        brief=True,
    )
    fresh = store.memory.array(np.uint64, begin, t.index.size)
    assert finding.enter_all(t, fresh, kept), "an index of the same size has a place for each entry"
    head[GENERATION] = new
    store.memory.free_pages(store.layout.index(1 - new), t.index.nbytes)
    used = np.zeros(int(head[NEXT]), dtype=np.bool_)
    used[kept] = True
    used[0] = True
    head[FREE] = (int(head[FREE]) & ~_LOW) + (1 << 32)
    finding.give_slots(head, t.metas, t.marks, np.flatnonzero(~used)[::-1].copy())
    if _has_room(store):
        head[FULL] = 0


def _has_room(store: TableStore) -> bool:
    head = store.arrays.head
    return bool(head[FREE] & _LOW or head[NEXT] < store.layout.capacity)


def _waiting(store: TableStore) -> tuple[Ids, Ids]:
    """Return the ids that were looked up and have no row, ascending, and their counts."""
    t, layout = store.arrays, store.layout
    if not layout.hashed:
        ids = np.flatnonzero((t.metas[::2] == 0) & (t.marks[2::4] > 0))
        return ids, t.marks[4 * ids + 2].astype(np.int64)
    size = entries_in(int(t.head[WAITING_LEVELS])) if layout.waiting_levels else 0
    places = np.flatnonzero(t.waiting[:size])
    ids = (t.waiting[places] ^ finding.HIDDEN).view(np.int64)
    order = np.argsort(ids)
    ids, places = ids[order], places[order]
    rowless = store.look_up(ids, finding.LOOK) <= 0
    return ids[rowless], t.counts[places][rowless].astype(np.int64)


def _put_waiting(store: TableStore, ids: Ids, counts: Ids) -> None:
    t = store.arrays
    if not store.layout.hashed:
        rowless = t.metas[2 * ids] == 0
        t.marks[4 * ids[rowless] + 2] = counts[rowless]
        return
    at, most = 0, store.layout.waiting_levels
    while most and at < ids.size:
        at = finding.put_waiting(t, ids, counts, at, int(t.head[WAITING_LEVELS]) < most)
        if at < ids.size:
            store.grow_waiting()


def _clear_waiting(store: TableStore) -> None:
    t, at = store.arrays, store.layout.at
    if not store.layout.hashed:
        ids = np.flatnonzero(t.metas[::2] == 0)
        t.metas[2 * ids + 1] = 0
        return
    t.head[WAITING_LEVELS] = 0
    store.memory.free_pages(at.waiting_ids, at.records - at.waiting_ids)


def _state(store: TableStore, slots: Ids) -> Floats:
    """Copy the state of the optimizer for some slots: its slots, then its scalar."""
    t, dim, optimizer = store.arrays, store.spec.dim, store.spec.row_optimizer
    state: Floats = t.records[slots, dim : dim * (1 + optimizer.slots)]
    if optimizer.scalar:
        state = np.concatenate([state, t.scalars[slots, None]], axis=1)
    return state


def _put(store: TableStore, slots: Ids, rows: Floats, state: Floats) -> None:
    t, dim, optimizer = store.arrays, store.spec.dim, store.spec.row_optimizer
    t.records[slots, :dim] = rows
    t.records[slots, dim : dim * (1 + optimizer.slots)] = state[:, : dim * optimizer.slots]
    if optimizer.scalar:
        t.scalars[slots] = state[:, -1]
