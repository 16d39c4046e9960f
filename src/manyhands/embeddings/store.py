"""A table in memory: rows by id, used by many processes and threads of a host at once, without locks.

    store = TableStore.create("users", Table(64), seed=7)
    store = TableStore.attach("users", Table(64), address)    # in another process
    slots = store.find(ids, create=True, now=step)            # makes missing rows
    store.gather(slots, out, ids)
    ids, grads = merge(ids, grads)                            # each id once
    store.update(store.find(ids, create=False), grads, lr=0.1, now=step)

A row never moves, so a slot stays valid until `evict` or `drop` (row_transfer.py). Rows are read and written
without synchronization (Hogwild): a reader may see half of an update, but never another row. A process may be
killed at any instruction: no other process waits for it, and no id gets two rows.

Cost: see layout.py for memory; find, gather and update each touch the cache lines of a row once.
"""

from __future__ import annotations

import hashlib
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from manyhands.embeddings import index as finding
from manyhands.embeddings import kernels, row_transfer
from manyhands.embeddings.chunk import Floats, Ids
from manyhands.embeddings.index import IndexArrays
from manyhands.embeddings.kernels import RowInit
from manyhands.embeddings.layout import (
    CAPACITY,
    DIGEST,
    EXTENDED_AT,
    FULL,
    GENERATION,
    HEADER_BYTES,
    LEVELS,
    MAGIC,
    MAGIC_WORD,
    NEXT,
    READY,
    SALT,
    WAITING_LEVELS,
    WAITING_MOST,
    TableLayout,
    entries_in,
    levels_for,
)
from manyhands.embeddings.memory import Memory, available_bytes, total_bytes
from manyhands.embeddings.parsing import show_bytes
from manyhands.embeddings.spec import META_BYTES, Table, check_name, salt_of
from manyhands.errors import JobError, LinkError, UsageError
from manyhands.transport.shm import Segment

SHARED = 0
"""Slot of the row that new ids share when a hashed table is full."""
SPREAD_FROM = 64 << 20
"""Size from which a part of a table takes memory only for its own rows; finding them takes longer."""
_SHARED_ID = -(1 << 63)
"""The id whose initial row the shared row begins with."""


class TableStore:
    """One table. All methods may be called by any number of processes at once."""

    def __init__(self, name: str, spec: Table, layout: TableLayout, memory: Memory) -> None:
        """Use `create` or `attach`."""
        self.name = name
        self.spec = spec
        self.layout = layout
        self.memory = memory
        self.shared = True
        self._head = memory.array(np.int64, 0, HEADER_BYTES // 8)
        at, width, slots = layout.at, spec.width, layout.capacity
        metas = memory.array(np.int64, at.metas, META_BYTES // 8 * slots)
        scalars = slots if spec.row_optimizer.scalar else 0
        entries, waiting = entries_in(layout.levels), entries_in(layout.waiting_levels)
        self._generations = tuple(
            IndexArrays(
                head=self._head,
                index=memory.array(np.uint64, layout.index(generation), entries),
                levels=layout.levels,
                metas=metas,
                marks=metas.view(np.uint32),
                records=memory.array(np.float32, at.records, width * slots).reshape(-1, width),
                scalars=memory.array(np.float32, at.scalars, scalars),
                waiting=memory.array(np.uint64, at.waiting_ids, waiting),
                counts=memory.array(np.uint32, at.waiting_counts, waiting),
            )
            for generation in (0, 1)
        )

    @classmethod
    def create(
        cls,
        name: str,
        spec: Table,
        *,
        seed: int,
        salt: int | None = None,
        shared: bool = True,
        spread: bool = False,
    ) -> TableStore:
        """Create a table without rows. Raises a JobError if the host has no memory for it.

        `salt`: what initial rows are made from; by default it follows from the seed and the name. `spread`:
        if true, other hosts hold the other rows, so a large table takes memory only for its own.
        """
        check_name(name)
        spread = spread and spec.rows is not None and spec.rows * spec.bytes_per_row() > SPREAD_FROM
        limit = total_bytes() if spec.limit is None else spec.limit
        layout = TableLayout.within(spec, limit, spread=spread)
        least = 2 if layout.hashed else 1
        if layout.capacity < least:
            raise JobError(
                f"The table {name!r} is too small: not one row of {spec.bytes_per_row()} bytes and its "
                f"index fit into max_bytes={spec.limit}. Give it 1MiB or more."
            )
        if not layout.hashed and layout.most_bytes > (spare := available_bytes()):
            raise JobError(
                f"The table {name!r} does not fit: {spec.rows:,} rows of {spec.bytes_per_row()} bytes "
                f"are {show_bytes(layout.most_bytes)}, and this host can spare {show_bytes(spare)}. "
                "Spread it over more servers, choose a smaller dim or rowwise_adagrad, or leave rows "
                "out: then only the rows in use take memory."
            )
        memory = Memory(Segment.create(layout.at.end, label=f"manyhands-table-{name[:50]}"))
        store = cls(name, spec, layout, memory)
        store.shared = shared
        try:
            store._begin(salt_of(name, seed) if salt is None else salt)
        except BaseException:
            store.close()
            raise
        return store

    @classmethod
    def attach(cls, name: str, spec: Table, address: str) -> TableStore:
        """Open the table of another process of this host. The spec must be the same."""
        memory = Memory(Segment.attach(address))
        head = memory.array(np.int64, 0, HEADER_BYTES // 8)
        if head[MAGIC_WORD] != MAGIC:
            memory.close()
            raise LinkError(f"{address} is shared memory, but no table.")
        if head[DIGEST] != _digest(name, spec):
            memory.close()
            raise UsageError(
                f"The table at {address} differs from {name!r} in this process "
                f"({spec.describe()}): all processes of a run must have the same job."
            )
        layout = TableLayout(spec, int(head[CAPACITY]), int(head[WAITING_MOST]))
        return cls(name, spec, layout, memory)

    @property
    def address(self) -> str:
        """The address for `attach` in another process of this host; a private table has none."""
        if not self.shared:
            raise UsageError(
                f"The table {self.name!r} is private to its process; create it with shared=True."
            )
        return self.memory.segment.address

    def close(self) -> None:
        """Close the table in this process. It can't grow here any more, and no process can attach to this
        address."""
        self.memory.close()

    def find(self, ids: ArrayLike, *, create: bool, now: int = 0) -> Ids:
        """Return the slot of each id, -1 for an id without a row. Ids may repeat.

        With `create`, each id is counted once more, is marked as used at step `now`, and gets a row if it
        is admitted. In a full table with when_full="share", new ids get slot 0, the shared row.
        """
        return self.look_up(ids, finding.SEE if create else finding.LOOK, now)

    def look_up(self, ids: ArrayLike, mode: int, now: int = 0) -> Ids:
        """Like `find`, in one of the modes of index.py."""
        numbers = _ids(ids)
        self.check(numbers)
        slots = np.empty(numbers.size, dtype=np.int64)
        admit_after = self.spec.admit_after
        if not self.layout.hashed:
            finding.find_fixed(self.arrays, numbers, slots, mode, now, admit_after, self.init)
            return slots
        at = 0
        while True:
            waits = int(self._head[WAITING_LEVELS]) < self.layout.waiting_levels
            at, reason = finding.find(
                self.arrays, numbers, at, slots, mode, now, admit_after, waits, self.init
            )
            if reason == finding.NO_ROOM:
                self._grow()
            elif reason == finding.NO_WAITING_ROOM:
                self.grow_waiting()
            else:
                return slots

    @property
    def rows(self) -> Floats:
        """View of all rows, [capacity, dim], with gaps between them. Rows never move."""
        return self.arrays.records[:, : self.spec.dim]

    @property
    def records(self) -> Floats:
        """All records, [capacity, width], contiguous: each row is followed by the state of its optimizer."""
        return self.arrays.records

    def gather(self, slots: Ids, out: Floats, ids: ArrayLike) -> Floats:
        """Set out[i] to the row of slots[i], or to the initial row of ids[i] if that is -1. Returns `out`."""
        numbers = _ids(ids)
        assert out.shape[0] == slots.size, "one row for each slot"
        assert out.shape[1] >= self.spec.dim, "the row, and columns for the caller"
        assert numbers.size == slots.size, "one id for each slot"
        slots = np.ascontiguousarray(slots)
        kernels.gather(self.records, self._flat, slots, numbers, out, self.init)
        return out

    def update(self, slots: Ids, grads: Floats, *, lr: float, now: int) -> None:
        """Step the optimizer on each row; -1 is skipped. Repeated slots are stepped one after the other."""
        assert grads.shape == (slots.size, self.spec.dim), "one gradient for each slot"
        kind = self.spec.row_optimizer
        rate, keep = np.float32(lr), np.float32(1.0 - lr * kind.weight_decay)
        arguments = (*self._rows(slots, grads), rate, keep, now)
        eps, scalars = np.float32(kind.eps), self.arrays.scalars
        if kind.name == "sgd":
            kernels.update_sgd(*arguments)
        elif kind.name == "momentum":
            kernels.update_momentum(*arguments, np.float32(kind.beta))
        elif kind.name == "adagrad":
            kernels.update_adagrad(*arguments, eps)
        elif kind.name == "rowwise_adagrad":
            kernels.update_rowwise(*arguments, eps, scalars)
        else:
            kernels.update_adam(*arguments, eps, scalars, kind.betas, self._corrections)

    def add_differences(
        self, slots: Ids, differences: Floats, versions: Floats, *, modulo: int, now: int
    ) -> None:
        """Add differences to rows, whatever the optimizer; -1 is skipped. The last column of `differences`
        is the version of the row when it was read; others may have changed it since."""
        rows = self._rows(slots, differences)
        kernels.add_differences(*rows, versions, np.float32(modulo), now)

    def _rows(self, slots: Ids, changes: Floats) -> tuple[Any, ...]:
        """Return the first arguments of every kernel that changes rows."""
        slots, changes = np.ascontiguousarray(slots), np.ascontiguousarray(changes, np.float32)
        return self.records, self._flat, self.spec.dim, self.arrays.marks, slots, changes

    def check(self, ids: ArrayLike) -> None:
        """Raise a JobError for ids that are out of range."""
        numbers, rows = _ids(ids), self.spec.rows
        if rows is not None and numbers.size and (numbers.min() < 0 or numbers.max() >= rows):
            wrong = int(numbers[(numbers < 0) | (numbers >= rows)][0])
            raise JobError(
                f"The table {self.name!r} has no id {wrong}: Table(rows={rows}) has 0 to {rows - 1}. "
                "Give it more rows, or leave rows out for any 64-bit id."
            )

    def ids(self) -> Ids:
        """Return the ids with a row of their own, ascending. Scans the index."""
        return np.sort(row_transfer.ids_of(self, row_transfer.live(self)))

    @property
    def nbytes(self) -> int:
        """Bytes allocated for rows, optimizer, counters and index."""
        return self.memory.used

    @property
    def full(self) -> bool:
        """If true, an id was refused a row of its own since the last evict, because the table was full."""
        return bool(self._head[FULL])

    # For other modules of this package.

    @property
    def arrays(self) -> IndexArrays:
        return self._generations[int(self._head[GENERATION])]

    @cached_property
    def init(self) -> RowInit:
        return kernels.row_init(self.spec, self._head[SALT : SALT + 1].view(np.uint64)[0])

    def grow_waiting(self) -> None:
        """Allocate one more level for waiting ids."""
        have = int(self._head[WAITING_LEVELS])
        self.memory.allocate(
            self.name,
            self.layout.waiting_ranges(have),
            advice="Evict more often: that drops the counts of ids without a row.",
        )
        finding.raise_word(self._head, WAITING_LEVELS, have + 1)

    def _grow(self) -> None:
        """Allocate more slots, or mark the table as full."""
        head, layout = self._head, self.layout
        ready = int(head[READY])
        if ready >= layout.capacity:
            if self.spec.limit is None or self.spec.when_full == "error":
                raise JobError(
                    f"The table {self.name!r} is full: it has {layout.capacity - 1:,} rows of "
                    f"{self.spec.bytes_per_row()} bytes in {show_bytes(self.nbytes)}. "
                    "Give it more max_bytes or more servers, or Table(when_full='share')."
                )
            head[FULL] = 1
            return
        target = layout.ready_after(ready)
        have, levels = int(head[LEVELS]), levels_for(target, filled=EXTENDED_AT)
        self.memory.allocate(
            self.name,
            [
                *layout.slot_ranges(ready, target),
                *layout.level_ranges(int(head[GENERATION]), have, levels),
            ],
            advice="Give the table max_bytes, more servers, a smaller dim, or evict rows.",
        )
        # In this order: a process that sees a slot as ready finds its memory and its part of the index.
        finding.raise_word(head, LEVELS, levels)
        finding.raise_word(head, READY, target)

    def _begin(self, salt: int) -> None:
        head, layout = self._head, self.layout
        self.memory.allocate(self.name, [(0, HEADER_BYTES)], advice="End other programs.")
        head[CAPACITY], head[WAITING_MOST] = layout.capacity, layout.waiting_levels
        head[SALT : SALT + 1].view(np.uint64)[0] = salt
        head[DIGEST] = _digest(self.name, self.spec)
        if layout.hashed:
            head[NEXT] = SHARED + 1
            self._grow()
            arrays = self.arrays
            kernels.make_record(arrays.records, arrays.scalars, SHARED, _SHARED_ID, self.init)
        else:
            whole = layout.slot_ranges(0, layout.capacity)
            self.memory.allocate(self.name, whole, advice="Spread it over more servers.")
            head[READY] = head[NEXT] = layout.capacity
        head[MAGIC_WORD] = MAGIC

    @cached_property
    def _flat(self) -> Floats:
        return self.records.reshape(-1)

    @cached_property
    def _corrections(self) -> Any:
        return kernels.adam_corrections(self.spec.row_optimizer.betas)


def unique(ids: ArrayLike) -> tuple[Ids, Ids]:
    """Return each id once, in the order of first occurrence, and for each given id its index among them."""
    numbers = _ids(ids)
    fresh = np.empty(numbers.size, dtype=np.int64)
    inverse = np.empty(numbers.size, dtype=np.int64)
    return fresh[: kernels.unique(numbers, fresh, inverse)], inverse


def merge(ids: ArrayLike, grads: Floats) -> tuple[Ids, Floats]:
    """Return each id once, in the order of first occurrence, with its gradients added in the order given."""
    fresh, inverse = unique(ids)
    sums = np.empty((fresh.size, grads.shape[1]), dtype=np.float32)
    grads = np.ascontiguousarray(grads, dtype=np.float32)
    kernels.add_rows(inverse, grads, sums, fresh.size)
    return fresh, sums


def _ids(ids: ArrayLike) -> Ids:
    numbers = np.asarray(ids)
    if numbers.dtype != np.int64:
        assert numbers.size == 0 or numbers.dtype.kind in "iu", "ids are whole numbers"
        numbers = numbers.astype(np.int64)
    return np.ascontiguousarray(numbers.reshape(-1))


def _digest(name: str, spec: Table) -> int:
    text = f"{name}/{spec.digest}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1
