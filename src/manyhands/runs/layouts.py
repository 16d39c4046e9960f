"""Tensors that are laid out over workers (torch's DTensor): whole for a checkpoint, and back.

A checkpoint has the whole model, in the shapes that the job gave it, so that it fits any layout, and none. To
make a tensor whole, all workers that have a part of it exchange their parts.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor


def is_laid_out(value: Any) -> bool:
    """Return whether it is a tensor of which this worker has a part only, or may have."""
    module = sys.modules.get(
        "torch.distributed.tensor"
    )  # else there is none; it takes long to import
    return module is not None and isinstance(value, module.DTensor)


def whole(tensor: Tensor) -> Tensor:
    """Return the whole tensor. If it is laid out, all workers of its mesh call this at the same time."""
    if not is_laid_out(tensor):
        return tensor
    gathered: Tensor = tensor.full_tensor()  # type: ignore[attr-defined]
    return gathered


def own_part(tensor: Tensor) -> Tensor:
    """Return this worker's part."""
    if not is_laid_out(tensor):
        return tensor
    part: Tensor = tensor.to_local()  # type: ignore[attr-defined]
    return part


def laid_out_as(value: Any, like: Any) -> Any:
    """Return a whole tensor in the layout of another. Each worker has the whole: nothing is sent."""
    if not is_laid_out(like) or not isinstance(value, Tensor) or value.shape != like.shape:
        return value
    from torch.distributed.tensor import distribute_tensor

    part = own_part(like)
    there = value.to(device=part.device, dtype=like.dtype if value.is_floating_point() else None)
    with torch.no_grad():
        return distribute_tensor(there, like.device_mesh, like.placements, src_data_rank=None)
