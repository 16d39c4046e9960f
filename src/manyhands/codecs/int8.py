"""8-bit integers: each chunk of numbers is divided by a scale of its own, and rounded to the nearest integer.

The scale of a chunk is its largest magnitude over 127, in float32. (Dettmers, 8-bit approximations for
parallelism in deep learning, 2016, has one scale for a whole tensor; a chunk that has one of its own does not
suffer from large numbers elsewhere.)

Error: at most half a scale, 1/254 of the largest magnitude in the chunk. Chunks whose largest magnitude is
below 1.5e-36 become zeros. A chunk with a number that is not finite becomes NaN as a whole.

Bytes: 1 + 4/chunk for each number of 4 bytes; 0.254 of plain with chunks of 256.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from manyhands.codecs.codec import Codec, float32_of
from manyhands.errors import SpecError
from manyhands.pairs import CODEC, Feature, register

if TYPE_CHECKING:
    from torch import Tensor

LEVELS = 127
SMALLEST = LEVELS * 2.0**-126
"""Below this the scale would be a denormal number, with few digits."""


@dataclass(frozen=True)
class Int8(Codec):
    name: ClassVar[str] = "int8"
    feature: ClassVar[Feature | None] = register(
        Feature(
            "int8",
            CODEC,
            "gradients as 8-bit integers",
            "`--strategy allreduce+int8`",
            works_with=("allreduce",),
        )
    )

    chunk: int = 256
    """How many numbers share a scale. Fewer: smaller errors, and more bytes."""

    def check(self) -> None:
        if not 16 <= self.chunk <= 65_536:
            raise SpecError(
                f"int8: chunk={self.chunk}; 16 to 65536 numbers can share a scale, such as chunk=256."
            )

    def wire_bytes(self, numel: int) -> int:
        return 4 * self._num_chunks(numel) + numel

    def encode(self, numbers: Tensor) -> Tensor:
        import torch

        chunks = self._chunks(numbers)
        memory = chunks.abs()
        largest = memory.amax(dim=-1)  # NaN if one of them is
        scales = torch.where(largest < SMALLEST, 0.0, largest / LEVELS)
        scales = torch.where(largest.isfinite(), scales, torch.nan)
        factors = torch.where(scales > 0, LEVELS / largest, 0.0)
        rounded = torch.mul(chunks, factors.unsqueeze(-1), out=memory).round_().to(torch.int8)
        rows, numel = numbers.shape
        parts = (
            scales.flatten().view(torch.uint8).view(rows, 4 * self._num_chunks(numel)),
            rounded.view(torch.uint8).flatten(1)[:, :numel],
        )
        return torch.cat(parts, dim=1)

    def decode(self, encoded: Tensor, numel: int) -> Tensor:
        import torch

        rows, count = len(encoded), self._num_chunks(numel)
        scales, integers = encoded.split((4 * count, numel), dim=1)
        chunks = self._chunks(integers.view(torch.int8)).to(torch.float32)
        chunks *= float32_of(scales).view(rows, count, 1)
        return chunks.flatten(1)[:, :numel]

    def _num_chunks(self, numel: int) -> int:
        return -(-numel // self.chunk)

    def _chunks(self, numbers: Tensor) -> Tensor:
        """Return rows as (rows, chunks, chunk); the last chunk is filled up with zeros."""
        import torch

        rows, numel = numbers.shape
        count = self._num_chunks(numel)
        filled = torch.nn.functional.pad(numbers, (0, count * self.chunk - numel))
        return filled.view(rows, count, self.chunk)
