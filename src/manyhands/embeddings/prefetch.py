"""Predicts what a model will look up in the next batch from what it looked up in the last one.

Most lookups are of a tensor of the batch, or of some of its columns. The prefetcher records which slice of
which tensor was looked up in which table, and returns the same slices of the next batch, so that their rows
can be requested ahead. It is a guess: other rows are requested when they are looked up, and rows that are not
looked up were requested in vain. Ids that the model computes are not predicted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves


@dataclass(frozen=True)
class SampleSlice:
    """A slice of a tensor whose first dimension is the samples."""

    tensor: int
    """Index of the tensor in the batch, in the order of `tensors_of`."""
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    """Of the tensor, without its first dimension. Another batch must have the same."""
    inner: tuple[int, ...]
    inner_strides: tuple[int, ...]
    offset: int

    def of(self, tensor: Tensor) -> Tensor | None:
        """Return the same slice of a tensor of another batch."""
        if tuple(tensor.shape[1:]) != self.shape or tensor.stride()[1:] != self.strides:
            return None
        return tensor.as_strided(
            (len(tensor), *self.inner),
            (tensor.stride(0), *self.inner_strides),
            tensor.storage_offset() + self.offset,
        )


class Prefetcher:
    def __init__(self) -> None:
        self._slices: dict[str, set[SampleSlice]] = {}

    def learn(self, name: str, ids: Tensor, batch: Any) -> None:
        """Record that these ids were looked up in a table in the forward pass of this batch."""
        for number, tensor in enumerate(tensors_of(batch)):
            if _is_slice(ids, tensor):
                slice_ = SampleSlice(
                    number,
                    tuple(tensor.shape[1:]),
                    tensor.stride()[1:],
                    tuple(ids.shape[1:]),
                    ids.stride()[1:],
                    int(ids.storage_offset() - tensor.storage_offset()),
                )
                self._slices.setdefault(name, set()).add(slice_)
                return

    def ids_in(self, batch: Any) -> dict[str, Tensor]:
        """Return by table the ids that will be looked up in this batch, distinct and ascending."""
        tensors = tensors_of(batch)
        found: dict[str, Tensor] = {}
        for name, slices in self._slices.items():
            parts = [p.of(tensors[p.tensor]) for p in slices if p.tensor < len(tensors)]
            flat = [part.reshape(-1) for part in parts if part is not None]
            if flat:
                found[name] = torch.unique(torch.cat(flat).to("cpu", torch.int64))
        return found


def _is_slice(ids: Tensor, tensor: Tensor) -> bool:
    """Return whether ids are a slice of a tensor over all its samples, and not a copy."""
    return (
        ids.dim() > 0
        and tensor.dim() > 0
        and ids.dtype == tensor.dtype
        and ids.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()
        and len(ids) == len(tensor) > 0
        and ids.stride(0) == tensor.stride(0)
        and ids.storage_offset() >= tensor.storage_offset()
    )


def tensors_of(batch: Any) -> list[Tensor]:
    """Return the tensors in nested dicts, lists and tuples."""
    return [leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)]
