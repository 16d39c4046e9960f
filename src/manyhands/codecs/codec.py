"""What numbers look like on the wire: the interface of a codec. The module does not import torch.

A codec is a frozen config, as a strategy is: its fields are its options in a spec such as
`allreduce + int8(chunk=512)`, and their docstrings are the options' help. It keeps nothing between calls: the
bytes depend on the numbers alone, so all workers decode the same from the same bytes.

`Plain` sends numbers as they are. It stands where no codec was asked for, so nobody has to ask whether there
is one.

To add one:

1. Write `codecs/NAME.py`, and add its class to `CODECS` in `codecs/registry.py`.
2. Add it to `CODED` in `tests/unit/codecs/test_codecs.py`, and a case to `CASES` in
   `tests/strategies/test_conformance.py`.
3. Write a page in `docs/strategies/`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from manyhands.pairs import Feature

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Codec(ABC):
    """How rows of float32 numbers become bytes. Each field is an option."""

    name: ClassVar[str]
    feature: ClassVar[Feature | None]
    """Its row in the table of what works together, with the strategies that it works with."""
    exact: ClassVar[bool] = False
    """If true, decoding returns the very numbers that were encoded."""
    sums_on_wire: ClassVar[bool] = False
    """If true, encoded numbers can be added up on their way, as an all-reduce does. Otherwise they have to be
    decoded first."""

    def check(self) -> None:
        """Raise SpecError, with a remedy, if an option has a value that it can't have."""
        return

    @abstractmethod
    def wire_bytes(self, numel: int) -> int:
        """Return the number of bytes of so many encoded numbers. Pure, without torch."""

    @abstractmethod
    def encode(self, numbers: Tensor) -> Tensor:
        """Encode each row of a float32 tensor by itself: (rows, numel) to uint8 of (rows, wire_bytes(numel)),
        on the same device. Numbers that are not finite must not become finite ones."""

    @abstractmethod
    def decode(self, encoded: Tensor, numel: int) -> Tensor:
        """Decode rows of so many numbers: the reverse of `encode`."""


@dataclass(frozen=True)
class Plain(Codec):
    """Numbers as they are."""

    name: ClassVar[str] = "plain"
    feature: ClassVar[Feature | None] = None
    exact: ClassVar[bool] = True
    sums_on_wire: ClassVar[bool] = True

    def wire_bytes(self, numel: int) -> int:
        return 4 * numel

    def encode(self, numbers: Tensor) -> Tensor:
        import torch

        rows, numel = numbers.shape
        return numbers.flatten().view(torch.uint8).view(rows, 4 * numel)

    def decode(self, encoded: Tensor, numel: int) -> Tensor:
        return float32_of(encoded).view(len(encoded), numel)


PLAIN = Plain()


def float32_of(encoded: Tensor) -> Tensor:
    """Return the numbers that these bytes are, as a flat copy: rows of bytes begin anywhere, and float32
    numbers at multiples of 4 bytes."""
    import torch

    return encoded.flatten().clone().view(torch.float32)
