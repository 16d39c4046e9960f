"""`Arrays`: a map-style dataset over tensors in memory.

Sample i is the tuple of row i of every tensor. In contrast to torch's TensorDataset it has
`gather(indices)`: the whole batch comes from one `index_select` per tensor, without a Python loop over
samples and without collating. A training loop uses `gather` if a dataset has it; any other reader, such as
torch's DataLoader, sees an ordinary dataset.

Cost: one copy of the batch, and nothing besides the tensors themselves.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.utils.data import Dataset

from manyhands.errors import UsageError


class Arrays(Dataset[tuple[Tensor, ...]]):
    """Tensors of equal length, one row per sample: `Arrays(images, labels)`."""

    def __init__(self, *tensors: Tensor) -> None:
        _check(tensors)
        self.tensors = tensors

    def __len__(self) -> int:
        return len(self.tensors[0])

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        return tuple(tensor[index] for tensor in self.tensors)

    def __getitems__(self, indices: Sequence[int]) -> list[tuple[Tensor, ...]]:
        """Return samples as a list. DataLoader calls this once per batch, before it collates."""
        return list(zip(*self.gather(torch.as_tensor(indices, dtype=torch.int64)), strict=True))

    def gather(self, indices: Tensor) -> tuple[Tensor, ...]:
        """Return the rows at `indices` (one-dimensional, integers) of every tensor, in that order."""
        return tuple(tensor.index_select(0, indices.to(tensor.device)) for tensor in self.tensors)

    def __repr__(self) -> str:
        rows = ", ".join(
            f"{str(tensor.dtype).removeprefix('torch.')}{tuple(tensor.shape[1:])}"
            for tensor in self.tensors
        )
        return f"Arrays({len(self)} samples of {rows})"


def _check(tensors: tuple[Tensor, ...]) -> None:
    if not tensors:
        raise UsageError("Arrays() was given no tensor. Give one or more: Arrays(images, labels).")
    for position, tensor in enumerate(tensors):
        if not isinstance(tensor, Tensor):
            raise UsageError(
                f"Arrays: argument {position} is a {type(tensor).__name__}, and must be a "
                "torch.Tensor: wrap it in torch.as_tensor(...)."
            )
        if tensor.dim() == 0:
            raise UsageError(
                f"Arrays: argument {position} is a single number, and must have one row a sample: "
                "a tensor with at least one dimension."
            )
    lengths = [len(tensor) for tensor in tensors]
    if len(set(lengths)) > 1:
        raise UsageError(
            f"Arrays: the tensors have {', '.join(map(str, lengths))} rows, and must all have the "
            "same number: one row a sample."
        )
