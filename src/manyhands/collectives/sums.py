"""Reductions in a fixed order, so that the same numbers give the same bits in every run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

Reduction = Literal["sum", "min", "max"]

_COMBINE: dict[Reduction, Callable[..., Any]] = {
    "sum": torch.add,
    "min": torch.minimum,
    "max": torch.maximum,
}


def reduce_in_order(parts: Sequence[Tensor], *, into: Tensor, op: Reduction = "sum") -> None:
    """Reduce tensors of one size, in their order. `into` may be the first of them."""
    if len(parts) == 1:
        into.copy_(parts[0])
        return
    combine = _COMBINE[op]
    combine(parts[0], parts[1], out=into)
    for part in parts[2:]:
        combine(into, part, out=into)


def add_in_order(parts: Sequence[Tensor], coefficients: Sequence[float], *, into: Tensor) -> None:
    """Add up tensors of one size, each times its coefficient, in their order."""
    if all(coefficient == 1.0 for coefficient in coefficients):
        reduce_in_order(parts, into=into)
        return
    torch.mul(parts[0], coefficients[0], out=into)
    for part, coefficient in zip(parts[1:], coefficients[1:], strict=True):
        into.add_(part, alpha=coefficient)
