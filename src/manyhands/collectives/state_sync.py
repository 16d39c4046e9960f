"""Gives all workers of a view the same weights: those of the most advanced worker.

Each worker announces the last step in its weights, and whether it has been in a view before. A worker is at
most one step behind another, because no update is made before all gradients are there; a new worker has
nothing. If all are equal, nothing is sent. If only new workers lack the state, they may get it while the
others train (state_transfer.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from manyhands.collectives.group import Group
from manyhands.compute.train_state import TrainState
from manyhands.contract import Learner
from manyhands.runs.dense import dense_state, load_dense_state
from manyhands.runs.encoding import empty_tensors, flatten, unflatten
from manyhands.runs.saver import gather_state, put_state

BATCH_BYTES = 64 << 20
"""Bytes of a state that are sent at once."""


@dataclass(frozen=True)
class SyncResult:
    version: int
    """The last step that is in the weights."""
    new: tuple[int, ...] = ()
    """Ranks of new workers that still lack the state."""
    source: int = 0
    """The rank that has the state."""


def agree(
    group: Group,
    train_state: TrainState,
    learner: Learner | None,
    *,
    version: int,
    agreed: bool,
    tables: bool,
    may_wait: bool = False,
) -> SyncResult:
    """Bring all workers to the state of the most advanced one, that of the learner included. `learner`: None,
    if each worker holds a state of its own and keeps it.

    If `tables` is true, they are a part of it, not in memory that all workers share. If `may_wait` is true
    and only new workers lack the state, nothing is sent: that can be done while the others train.
    """
    ranks = group.gather_numbers([int(agreed), version])
    best = max(ranks)
    source = ranks.index(best)
    if not best[0]:
        # The first view: optimizers and schedules start equal, and so do models if they use the seed.
        state = send_state(dense_state(train_state.model), group, source)
        if group.rank != source:
            load_dense_state(train_state.model, state)
        if tables and train_state.tables.specs:
            _agree_on_rows(group, train_state, source)
    elif may_wait and all(each == best for each in ranks if each[0]):
        new = tuple(rank for rank, each in enumerate(ranks) if not each[0])
        return SyncResult(best[1], new, source)
    elif any(each != best for each in ranks):
        state = {}
        if group.rank == source:
            state = gather_state(train_state, learner.snapshot() if learner else {})
            if tables:
                state["tables"] = train_state.tables.state_dict()
        state = send_state(state, group, source)
        if group.rank != source:
            put_state(state, train_state, learner, tables=tables)
    return SyncResult(best[1])


def _agree_on_rows(group: Group, train_state: TrainState, source: int) -> None:
    """Make rows equal. In a run all workers load the same; a user's own loop may load them in one worker."""
    tables = train_state.tables
    prints = group.gather_numbers([tables.stores.fingerprint()])
    if len(set(prints)) == 1:
        return
    state = {}
    if group.rank == source:
        state = {"tables": tables.state_dict(), "salts": tables.stores.salts}
    state = send_state(state, group, source)
    if group.rank != source:
        tables.stores.salts = state["salts"]
        tables.load_state_dict(state["tables"])


def send_state(state: Any, group: Group, source: int) -> Any:
    """Return the source's state, on all workers."""
    text, tensors = flatten(state)
    encoded = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
    (size,) = group.gather_numbers([len(encoded)])[source]
    if group.rank == source:
        _send_all([encoded], group, source)
        _send_all(tensors, group, source)
        return state
    encoded = torch.empty(size, dtype=torch.uint8)
    _send_all([encoded], group, source)
    text = bytes(encoded.numpy()).decode()
    tensors = empty_tensors(text)
    _send_all(tensors, group, source)
    return unflatten(text, tensors)


def _send_all(tensors: Sequence[Tensor], group: Group, source: int) -> None:
    """Copy the source's tensors into those of all other workers."""
    for batch in batches(tensors):
        flat = torch.cat([tensor.detach().reshape(-1).view(torch.uint8) for tensor in batch])
        there = flat.to(group.device)
        group.broadcast(there, source=source)
        if group.rank != source:
            pour(there.cpu(), batch)


def pour(flat: Tensor, tensors: Sequence[Tensor]) -> None:
    """Copy the bytes of all tensors into them."""
    sizes = [tensor.numel() * tensor.element_size() for tensor in tensors]
    for tensor, part in zip(tensors, flat.split(sizes), strict=True):
        tensor.view(-1).view(torch.uint8).copy_(part)


def batches(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Yield the tensors that are not empty, in groups that are sent at once."""
    batch: list[Tensor] = []
    size = 0
    for tensor in tensors:
        if not tensor.numel():
            continue
        num_bytes = tensor.numel() * tensor.element_size()
        if batch and size + num_bytes > BATCH_BYTES:
            yield batch
            batch, size = [], 0
        batch.append(tensor)
        size += num_bytes
    if batch:
        yield batch
