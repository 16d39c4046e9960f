"""What a model will look up in the next batch, learnt from what it looked up in the last.

A model mostly looks up what it was given: a tensor of the batch, or some columns of it. So which piece of
which tensor of a batch was looked up in which table is noted, and of the next batch the same pieces are
asked for before its turn comes. It is only a guess: what else is looked up is asked for when it is, and
what is not was asked for in vain. Ids that the model computes are not foreseen.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class SampleSlice:
    """Of a tensor whose first dimension is the samples."""

    tensor: int
    """Which one of the batch, in the order in which they are found there."""
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    """Of the tensor, but for its first dimension: another batch has to be built alike."""
    inner: tuple[int, ...]
    inner_strides: tuple[int, ...]
    offset: int

    def of(self, tensor: Tensor) -> Tensor | None:
        """The same piece of a tensor of another batch."""
        if tuple(tensor.shape[1:]) != self.shape or tensor.stride()[1:] != self.strides:
            return None
        return tensor.as_strided(
            (len(tensor), *self.inner),
            (tensor.stride(0), *self.inner_strides),
            tensor.storage_offset() + self.offset,
        )


class Prefetcher:
    def __init__(self) -> None:
        self._pieces: dict[str, set[SampleSlice]] = {}

    def learn(self, name: str, ids: Tensor, batch: Any) -> None:
        """These ids were looked up in a table while this batch was trained on."""
        for number, tensor in enumerate(tensors_of(batch)):
            if _within(ids, tensor):
                piece = SampleSlice(
                    number,
                    tuple(tensor.shape[1:]),
                    tensor.stride()[1:],
                    tuple(ids.shape[1:]),
                    ids.stride()[1:],
                    int(ids.storage_offset() - tensor.storage_offset()),
                )
                self._pieces.setdefault(name, set()).add(piece)
                return

    def ids_in(self, batch: Any) -> dict[str, Tensor]:
        """By table the ids, distinct and ascending, that will be looked up in this batch."""
        tensors = list(tensors_of(batch))
        found: dict[str, Tensor] = {}
        for name, pieces in self._pieces.items():
            parts = [p.of(tensors[p.tensor]) for p in pieces if p.tensor < len(tensors)]
            flat = [part.reshape(-1) for part in parts if part is not None]
            if flat:
                found[name] = torch.unique(torch.cat(flat).to("cpu", torch.int64))
        return found


def _within(ids: Tensor, tensor: Tensor) -> bool:
    """Whether some ids are all samples' part of a tensor, and not a copy of it."""
    return (
        ids.dim() > 0
        and tensor.dim() > 0
        and ids.dtype == tensor.dtype
        and ids.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()
        and len(ids) == len(tensor) > 0
        and ids.stride(0) == tensor.stride(0)
        and ids.storage_offset() >= tensor.storage_offset()
    )


def tensors_of(batch: Any) -> Iterator[Tensor]:
    if isinstance(batch, Tensor):
        yield batch
    elif isinstance(batch, Mapping):
        for value in batch.values():
            yield from tensors_of(value)
    elif isinstance(batch, Sequence) and not isinstance(batch, str | bytes):
        for value in batch:
            yield from tensors_of(value)
