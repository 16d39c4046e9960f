"""Encodes a state with tensors without pickle: as plain values for a checkpoint, as JSON for a link.

    text, tensors = flatten(state)      # JSON, and the tensors that it refers to by index
    state = unflatten(text, tensors)

Mappings with any keys, lists, tuples, numbers, strings and None come back as they were. Any other type is
refused with the path to the value.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from manyhands.errors import JobError, ProtocolError

PAIRS, KIND, TENSOR, TUPLE = "~pairs", "~kind", "~tensor", "~tuple"
DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float64, torch.float32, torch.float16, torch.bfloat16,
        torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool,
        torch.complex64, torch.complex128,
    )
}  # fmt: skip


def to_pairs(value: Any) -> Any:
    """Replace mappings that JSON or torch.distributed.checkpoint would change by lists of pairs.

    JSON makes all keys strings. A checkpoint drops empty mappings, and takes integer keys (the milestones
    of MultiStepLR) for indices of a list. Counters and keys that begin with "~" become pairs too.
    """
    if isinstance(value, Mapping):
        plain = all(isinstance(key, str) and key[:1] != "~" for key in value)
        if value and plain and not isinstance(value, Counter):
            return {key: to_pairs(item) for key, item in value.items()}
        kind = "Counter" if isinstance(value, Counter) else "dict"
        return {KIND: kind, PAIRS: [[key, to_pairs(item)] for key, item in value.items()]}
    if isinstance(value, list | tuple) and not hasattr(value, "_fields"):
        return type(value)(to_pairs(item) for item in value)
    return value


def from_pairs(value: Any) -> Any:
    """Undo `to_pairs`."""
    if isinstance(value, Mapping):
        if PAIRS in value:
            pairs = {key: from_pairs(item) for key, item in value[PAIRS]}
            return Counter(pairs) if value[KIND] == "Counter" else pairs
        return {key: from_pairs(item) for key, item in value.items()}
    if isinstance(value, list | tuple) and not hasattr(value, "_fields"):
        return type(value)(from_pairs(item) for item in value)
    return value


def flatten(state: Any) -> tuple[str, list[Tensor]]:
    """Encode a state as JSON, and list its tensors in the order of their indices there."""
    tensors: list[Tensor] = []
    return json.dumps(_flatten(to_pairs(state), tensors, "state")), tensors


def unflatten(text: str, tensors: Sequence[Tensor]) -> Any:
    """Undo `flatten`."""
    return from_pairs(_unflatten(json.loads(text), tensors))


@dataclass(frozen=True)
class TensorSpec:
    """Type and shape of a tensor that is yet to arrive."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @classmethod
    def read(cls, record: Mapping[str, Any]) -> TensorSpec:
        """Check a record of another process. Allocates nothing."""
        name, shape = record.get("dtype"), record.get("shape")
        if not isinstance(name, str) or name not in DTYPES:
            raise ProtocolError(f"a tensor of type {name!r} can't be sent")
        if not isinstance(shape, list) or not all(type(n) is int and n >= 0 for n in shape):
            raise ProtocolError(f"a tensor of shape {shape!r}")
        return cls(DTYPES[name], tuple(shape))

    @property
    def num_bytes(self) -> int:
        return self.dtype.itemsize * math.prod(self.shape)

    def tensor(self, payload: memoryview) -> Tensor:
        """View bytes as this tensor."""
        if payload.nbytes != self.num_bytes:
            raise ProtocolError(f"a tensor of shape {self.shape} and {payload.nbytes} bytes")
        return torch.frombuffer(payload, dtype=self.dtype).reshape(self.shape)


def tensor_specs(text: str) -> list[TensorSpec]:
    """List the tensors that an encoded state refers to."""
    found = dict(_find_specs(json.loads(text)))
    if sorted(found) != list(range(len(found))):
        raise ProtocolError(f"tensors with the indices {sorted(found)[:10]}")
    return [found[index] for index in range(len(found))]


def empty_tensors(text: str, *, max_bytes: int | None = None) -> list[Tensor]:
    """Allocate the tensors that an encoded state refers to, unless all of them exceed `max_bytes`."""
    specs = tensor_specs(text)
    total = sum(spec.num_bytes for spec in specs)
    if max_bytes is not None and total > max_bytes:
        raise ProtocolError(f"a state of {total} bytes; at most {max_bytes} are allowed")
    return [torch.empty(spec.shape, dtype=spec.dtype) for spec in specs]


def _flatten(value: Any, tensors: list[Tensor], path: str) -> Any:
    match value:
        case Tensor():
            tensors.append(value)
            dtype = str(value.dtype).removeprefix("torch.")
            return {TENSOR: len(tensors) - 1, "dtype": dtype, "shape": list(value.shape)}
        case dict():
            return {key: _flatten(item, tensors, f"{path}.{key}") for key, item in value.items()}
        case None | bool() | int() | float() | str():
            return value
        case list() | tuple():
            items = [_flatten(item, tensors, f"{path}[{n}]") for n, item in enumerate(value)]
            return {TUPLE: items} if isinstance(value, tuple) else items
    raise JobError(
        f"{path} is {type(value).__name__} and can't be sent to another worker: only tensors, numbers, "
        "strings, and lists and mappings of them can."
    )


def _unflatten(value: Any, tensors: Sequence[Tensor]) -> Any:
    match value:
        case {"~tensor": int(index)}:
            return tensors[index]
        case {"~tuple": list(items)}:
            return tuple(_unflatten(item, tensors) for item in items)
        case dict():
            return {key: _unflatten(item, tensors) for key, item in value.items()}
        case list():
            return [_unflatten(item, tensors) for item in value]
    return value


def _find_specs(value: Any) -> Iterator[tuple[int, TensorSpec]]:
    match value:
        case {"~tensor": int(index)}:
            yield index, TensorSpec.read(value)
        case dict():
            for item in value.values():
                yield from _find_specs(item)
        case list():
            for item in value:
                yield from _find_specs(item)
