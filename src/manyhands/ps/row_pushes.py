"""A worker's gradients of table rows on their way to the rows: one class for each way.

RemoteRows    gradients are sent to the servers that hold the rows
SharedRows    gradients are put into shared memory, for servers that apply a whole round of them
OwnRows       the worker applies its gradients to rows in shared memory itself
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING

from torch import Tensor

from manyhands.embeddings.modules import RowModel
from manyhands.embeddings.sparse_grads import SharedGrads
from manyhands.ps.remote_tables import RemoteTables

if TYPE_CHECKING:
    from manyhands.compute.feed import Share
    from manyhands.compute.train_state import TrainState
    from manyhands.ps.node import PsNode


class RowPushes(ABC):
    def __init__(self, train_state: TrainState) -> None:
        self.addresses: list[str] = []
        """Addresses of the gradients in shared memory, one for each slot."""
        self._train_state = train_state

    @abstractmethod
    def push(
        self, share: Share, slot: int, weight: float | Tensor, lr: float
    ) -> Mapping[str, memoryview] | None:
        """Take the gradients of a step. Returns what is sent with its push, by server."""


class RemoteRows(RowPushes):
    def __init__(self, train_state: TrainState, worker: str) -> None:
        super().__init__(train_state)
        self._worker = worker

    def push(
        self, share: Share, slot: int, weight: float | Tensor, lr: float
    ) -> Mapping[str, memoryview] | None:
        tables = self._train_state.tables
        assert isinstance(tables, RemoteTables)
        return tables.give(self._worker, slot, tables.take())


class SharedRows(RowPushes):
    def __init__(self, train_state: TrainState, num_slots: int) -> None:
        super().__init__(train_state)
        self._grads = [SharedGrads.create(train_state.tables.specs) for _ in range(num_slots)]
        self.addresses = [grads.address for grads in self._grads]

    def push(self, share: Share, slot: int, weight: float | Tensor, lr: float) -> None:
        self._grads[slot].put(self._train_state.tables.take())


class OwnRows(RowPushes):
    def push(self, share: Share, slot: int, weight: float | Tensor, lr: float) -> None:
        state = self._train_state
        grads = state.tables.take()
        if grads and share.samples:
            # The gradient is a part of the mean over the batch, as the servers would apply it (rows.py).
            factor = 1.0
            if state.weight is not None:  # it was not divided by the weight of the batch
                factor = share.samples / share.total / float(weight)
            state.tables.stores.apply(
                [grads], [factor], lr=lr, base_lr=state.base_lr, now=share.step
            )


def row_pushes(node: PsNode) -> RowPushes | None:
    """Choose the way for this run; None if the model has no tables."""
    model = node.train_state.model
    if not node.train_state.tables.specs:
        return None
    assert not (isinstance(model, RowModel) and node.mode.rounds), (
        "there are no gradients to add up"
    )
    return node.transport.row_pushes()
