"""Blocks as messages: parameters, and the state of the optimizer for them. No pickle.

The first message of a block has the encoded state (runs/encoding.py); each of its tensors follows as a
message with a payload, in order. Empty tensors are not sent.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from manyhands.errors import ManyhandsError, ProtocolError
from manyhands.ps.block_store import BlockState, bytes_of
from manyhands.ps.blocks import BlockLayout
from manyhands.ps.protocol import TensorMessage
from manyhands.runs.encoding import TensorSpec, flatten, tensor_specs, unflatten

PARAMS = "="
"""Stands for the parameters themselves: no name that an optimizer could use."""

MALFORMED = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
)
"""Raised by a record that fits its annotations and makes no sense. RuntimeError: by torch, or a recursion."""
MAX_COPIES, SPARE_BYTES = 256, 64 << 20
"""A state that is larger than this many times the parameters, and some more, is none: L-BFGS keeps 200."""
TEXT_FACTOR = 32
"""Bytes of memory that a character of an encoded state may become."""


def max_state_bytes(layout: BlockLayout) -> int:
    """Return the limit for the state of a model's optimizer."""
    return MAX_COPIES * layout.num_bytes + SPARE_BYTES


def pack(
    number: int, block_state: BlockState, *, role: str = "own", params: bool = True
) -> Iterator[tuple[TensorMessage, memoryview | None]]:
    """Yield the messages of a block."""
    text, tensors = flatten({PARAMS: block_state.params if params else None, **block_state.state})
    yield TensorMessage(number, role, text), None
    for tensor in tensors:
        if tensor.numel():
            yield TensorMessage(number, role), bytes_of(tensor.cpu().contiguous())


class _PartialBlock:
    """A block whose first message has arrived."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._specs = tensor_specs(text)
        self.num_bytes = TEXT_FACTOR * len(text) + sum(spec.num_bytes for spec in self._specs)
        self._tensors: list[Tensor] = []
        self._skip_empty()

    def add(self, payload: memoryview) -> None:
        if self.complete:
            raise ProtocolError(f"a tensor of {payload.nbytes} bytes too many")
        self._tensors.append(self._next.tensor(payload))
        self._skip_empty()

    @property
    def complete(self) -> bool:
        return len(self._tensors) == len(self._specs)

    def values(self) -> dict[str, Any]:
        values = unflatten(self._text, self._tensors)
        if not isinstance(values, dict) or PARAMS not in values:
            raise ProtocolError("a block without parameters")
        return values

    @property
    def _next(self) -> TensorSpec:
        return self._specs[len(self._tensors)]

    def _skip_empty(self) -> None:
        while not self.complete and not self._next.num_bytes:
            self._tensors.append(torch.empty(self._next.shape, dtype=self._next.dtype))


class TensorMessages:
    """Collects blocks that arrive, by (role, number)."""

    def __init__(self, *, max_bytes: int | None = None) -> None:
        """`max_bytes`: take in no more than this."""
        self.complete: dict[tuple[str, int], BlockState] = {}
        self._partial: dict[tuple[str, int], _PartialBlock] = {}
        self._max_bytes = max_bytes
        self._sizes: dict[tuple[str, int], int] = {}
        self._num_bytes = 0

    def add(self, message: TensorMessage, payload: memoryview | None) -> tuple[str, int] | None:
        """Take in one message. Returns the key of the block that it completes, if any."""
        key = (message.role, message.block)
        try:
            return self._add(key, message.state, payload)
        except (ManyhandsError, *MALFORMED) as error:
            raise ProtocolError(f"block {key}: {error}") from error

    def _add(
        self, key: tuple[str, int], text: str | None, payload: memoryview | None
    ) -> tuple[str, int] | None:
        if text is not None:
            # A server whose connection broke sends the whole block again.
            partial = self._partial[key] = _PartialBlock(text)
            self._num_bytes += partial.num_bytes - self._sizes.get(key, 0)
            self._sizes[key] = partial.num_bytes
            if self._max_bytes is not None and self._num_bytes > self._max_bytes:
                raise ProtocolError(f"a state of over {self._max_bytes} bytes")
        if (text is None) == (payload is None) or key not in self._partial:
            raise ProtocolError("a message out of order")
        if payload is not None:
            self._partial[key].add(payload)
        if not self._partial[key].complete:
            return None
        values = self._partial.pop(key).values()
        params = values.pop(PARAMS)
        self.complete[key] = BlockState(torch.empty(0) if params is None else params, values)
        return key
