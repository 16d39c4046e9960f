"""A state with tensors in it as one text and a list of tensors, to be sent without pickle.

    text, tensors = flatten(state)
    state = rebuild(text, tensors)

Mappings with any keys, lists, tuples, numbers, strings and None come back as they were; anything else is
refused with the path to it.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from manyhands.errors import JobError, ProtocolError

_TENSOR, _PAIRS, _COUNTER, _TUPLE = "~tensor", "~pairs", "~counter", "~tuple"


def flatten(state: Any) -> tuple[str, list[Tensor]]:
    tensors: list[Tensor] = []
    return json.dumps(_flat(state, tensors, "state")), tensors


def rebuild(text: str, tensors: Sequence[Tensor]) -> Any:
    return _built(json.loads(text), tensors)


def blanks(text: str, *, most_bytes: int | None = None) -> list[Tensor]:
    """Tensors of the right kinds and sizes, to be filled. Nothing is allocated for more than `most_bytes`."""
    found: dict[int, tuple[torch.dtype, list[int]]] = {}
    _find_blanks(json.loads(text), found)
    if most_bytes is not None:
        sizes = [dtype.itemsize * math.prod(shape) for dtype, shape in found.values()]
        if sum(sizes) > most_bytes or any(
            side < 0 for _, shape in found.values() for side in shape
        ):
            raise ProtocolError(
                f"a state of {sum(sizes)} bytes, and at most {most_bytes} make sense"
            )
    return [
        torch.empty(shape, dtype=dtype)
        for dtype, shape in map(found.__getitem__, range(len(found)))
    ]


def _flat(value: Any, tensors: list[Tensor], path: str) -> Any:
    match value:
        case Tensor():
            tensors.append(value)
            dtype = str(value.dtype).removeprefix("torch.")
            return {_TENSOR: len(tensors) - 1, "dtype": dtype, "shape": list(value.shape)}
        case Mapping():
            if type(value) is dict and all(isinstance(k, str) and k[:1] != "~" for k in value):
                return {key: _flat(item, tensors, f"{path}.{key}") for key, item in value.items()}
            kind = _COUNTER if isinstance(value, Counter) else _PAIRS
            return {kind: [[k, _flat(item, tensors, f"{path}.{k}")] for k, item in value.items()]}
        case None | bool() | int() | float() | str():
            return value
        case list() | tuple():
            items = [_flat(item, tensors, f"{path}[{n}]") for n, item in enumerate(value)]
            return {_TUPLE: items} if isinstance(value, tuple) else items
    raise JobError(
        f"{path} is {type(value).__name__} and can't be sent to another worker: only tensors, numbers, "
        "strings, and lists and mappings of them can."
    )


def _built(value: Any, tensors: Sequence[Tensor]) -> Any:
    match value:
        case {"~tensor": int(number)}:
            return tensors[number]
        case {"~pairs": list(pairs)}:
            return {key: _built(item, tensors) for key, item in pairs}
        case {"~counter": list(pairs)}:
            return Counter({key: _built(item, tensors) for key, item in pairs})
        case {"~tuple": list(items)}:
            return tuple(_built(item, tensors) for item in items)
        case dict():
            return {key: _built(item, tensors) for key, item in value.items()}
        case list():
            return [_built(item, tensors) for item in value]
    return value


def _find_blanks(value: Any, found: dict[int, tuple[torch.dtype, list[int]]]) -> None:
    match value:
        case {"~tensor": int(number), "dtype": str(dtype), "shape": list(shape)}:
            found[number] = getattr(torch, dtype), shape
        case dict():
            for item in value.values():
                _find_blanks(item, found)
        case list():
            for item in value:
                _find_blanks(item, found)
