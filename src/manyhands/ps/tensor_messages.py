"""Blocks on their way: parameters and what an optimizer remembers of them, as messages. No pickle.

One frame for each tensor, with its name, type and shape in the head; numbers and None in the head alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from manyhands.errors import LinkError
from manyhands.ps.block_store import BlockState
from manyhands.ps.memory import bytes_of

PARAMS = "="
"""Stands for the parameters themselves: no name that an optimizer could use."""
TYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float64, torch.float32, torch.float16, torch.bfloat16,
        torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool,
        torch.complex64, torch.complex128,
    )
}  # fmt: skip


def pack(
    kind: str, number: int, block_state: BlockState, *, role: str = "own", params: bool = True
) -> Iterator[tuple[dict[str, Any], memoryview | None]]:
    """The messages that carry a block, the last one marked."""
    values: dict[str, Any] = {PARAMS: block_state.params if params else None, **block_state.state}
    for i, (name, value) in enumerate(values.items()):
        head = {"k": kind, "n": number, "role": role, "name": name, "last": i == len(values) - 1}
        if not isinstance(value, Tensor):
            yield {**head, "value": value}, None
            continue
        tensor = value.detach().cpu().contiguous()
        dtype = str(tensor.dtype).removeprefix("torch.")
        # A scalar has no bytes of its own to look at: as a vector of one it has.
        payload = bytes_of(tensor.reshape(-1)) if tensor.numel() else None
        yield {**head, "dtype": dtype, "shape": list(tensor.shape)}, payload


class TensorMessages:
    """Blocks that arrive, by (role, number)."""

    def __init__(self) -> None:
        self.complete: dict[tuple[str, int], BlockState] = {}
        self._partial: dict[tuple[str, int], dict[str, Any]] = {}

    def add(self, head: Mapping[str, Any], payload: memoryview | None) -> tuple[str, int] | None:
        """Take in one message; the block that is complete with it, if one is."""
        key = (str(head["role"]), int(head["n"]))
        values = self._partial.setdefault(key, {})
        values[str(head["name"])] = _value(head, payload)
        if not head["last"]:
            return None
        del self._partial[key]
        params = values.pop(PARAMS)
        self.complete[key] = BlockState(torch.empty(0) if params is None else params, values)
        return key


def _value(head: Mapping[str, Any], payload: memoryview | None) -> Any:
    if "dtype" not in head:
        return head["value"]
    dtype, shape = TYPES.get(str(head["dtype"])), head["shape"]
    if dtype is None:
        raise LinkError(f"a tensor of type {head['dtype']!r} can't travel")
    num_bytes = 0 if payload is None else payload.nbytes
    whole = isinstance(shape, list) and all(type(n) is int and n >= 0 for n in shape)
    if not whole or math.prod(shape) * dtype.itemsize != num_bytes:
        raise LinkError(f"a tensor of shape {shape!r} and {num_bytes} bytes of {head['dtype']}")
    if not payload:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(payload, dtype=dtype).reshape(shape)
