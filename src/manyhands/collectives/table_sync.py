"""Sparse tables beside an all-reduce of the dense gradients.

ReplicatedTables: every worker has all rows. The gradients of the rows that a batch touched go to all
workers, are summed in rank order, and each worker makes the same update: that of `single`, up to the order of
sums. Each worker sends (n-1) times the bytes of the largest worker's ids and gradients in a step.

SharedTables: the workers of a host share one copy of the rows. Each worker applies its own gradients as soon
as it has them: nothing is sent and no worker waits, while the dense part stays synchronous (the hybrid form).
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod

import torch
from torch import Tensor

from manyhands.collectives.group import Group
from manyhands.compute.train_state import TrainState
from manyhands.embeddings.modules import RowModel
from manyhands.embeddings.sparse_grads import num_bytes, pack_into, unpack
from manyhands.embeddings.table_stores import EVICT_EVERY
from manyhands.hosts.view import View


class TableSync(ABC):
    def __init__(self, train_state: TrainState, view: View, group: Group) -> None:
        self._train_state = train_state
        self._tables = train_state.tables
        self._world = view.world
        self._group = group

    @abstractmethod
    def step(self, lr: float, now: int) -> None:
        """Apply the gradients of this step to the rows."""

    def _gather(self, mine: Tensor) -> list[Tensor]:
        """Gather the bytes of all workers, in rank order."""
        return [part.cpu() for part in self._group.gather_uneven(mine.to(self._group.device))]


class ReplicatedTables(TableSync):
    def __init__(self, train_state: TrainState, view: View, group: Group) -> None:
        super().__init__(train_state, view, group)
        assert not isinstance(train_state.model, RowModel), "there are no gradients to add up"

    def step(self, lr: float, now: int) -> None:
        grads = self._tables.take()
        mine = torch.empty(num_bytes(grads, self._tables.specs), dtype=torch.uint8)
        pack_into(mine.numpy().data, grads, self._tables.specs)
        parts = self._gather(mine)
        all_grads = [unpack(part.numpy().data, self._tables.specs) for part in parts]
        ones, base_lr = [1.0] * self._world, self._train_state.base_lr
        self._tables.stores.apply(all_grads, ones, lr=lr, base_lr=base_lr, now=now, make=True)
        self._tables.stores.evict_periodically(now)


class SharedTables(TableSync):
    def __init__(self, train_state: TrainState, view: View, group: Group) -> None:
        super().__init__(train_state, view, group)
        assert view.one_host, "memory is shared inside one host"
        self._share_tables()
        self._tables.writers = view.world

    def step(self, lr: float, now: int) -> None:
        stores, base_lr = self._tables.stores, self._train_state.base_lr
        stores.apply([self._tables.take()], [1.0], lr=lr, base_lr=base_lr, now=now)
        if stores.evicting and now % EVICT_EVERY == 0:
            self._group.barrier()  # all others wait while the first worker evicts
            if self._group.rank == 0:
                stores.evict(now)
            self._group.barrier()

    def _share_tables(self) -> None:
        """Share the first worker's tables with the others."""
        first = self._group.rank == 0
        addresses = json.dumps(self._tables.stores.share()) if first else ""
        parts = self._gather(torch.tensor(list(addresses.encode()), dtype=torch.uint8))
        if not first:
            self._tables.stores.attach(json.loads(bytes(parts[0].numpy())))
        self._group.barrier()  # the first must be alive while the others attach
