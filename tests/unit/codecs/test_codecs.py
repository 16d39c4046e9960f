"""The laws of codecs: sizes, rows, errors, and what happens to numbers that are not finite."""

from __future__ import annotations

import math
import subprocess
import sys

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor

from manyhands.codecs.codec import PLAIN, Codec
from manyhands.codecs.int8 import SMALLEST, Int8
from manyhands.codecs.registry import CODECS, PLANNED
from manyhands.errors import SpecError

CODED: list[Codec] = [PLAIN, Int8(), Int8(chunk=16)]
HUGE = 2.0**127
"""Half of the largest float32. Rounding may turn the very largest into infinity."""

coded = pytest.mark.parametrize("codec", CODED, ids=repr)
usual = st.floats(-1e3, 1e3, width=32)
finite = usual | st.floats(-HUGE, HUGE, width=32)


def rows_of(numbers: st.SearchStrategy[float]) -> st.SearchStrategy[Tensor]:
    """Draw tensors of one to three rows, of 0 to 40 numbers each."""

    def tensors(size: tuple[int, int]) -> st.SearchStrategy[Tensor]:
        rows, numel = size
        drawn = st.lists(numbers, min_size=rows * numel, max_size=rows * numel)
        return drawn.map(lambda each: torch.tensor(each, dtype=torch.float32).view(rows, numel))

    return st.tuples(st.integers(1, 3), st.integers(0, 40)).flatmap(tensors)


def decoded(codec: Codec, numbers: Tensor) -> Tensor:
    return codec.decode(codec.encode(numbers), numbers.shape[1])


@coded
@given(numbers=rows_of(finite))
def test_encoded_rows_have_the_size_that_was_promised(codec: Codec, numbers: Tensor) -> None:
    encoded = codec.encode(numbers)
    assert encoded.dtype == torch.uint8
    assert encoded.shape == (len(numbers), codec.wire_bytes(numbers.shape[1]))
    again = codec.decode(encoded, numbers.shape[1])
    assert again.dtype == torch.float32
    assert again.shape == numbers.shape


@coded
@given(numbers=rows_of(finite))
def test_each_row_is_encoded_by_itself_and_always_to_the_same_bytes(
    codec: Codec, numbers: Tensor
) -> None:
    before = numbers.clone()
    encoded = codec.encode(numbers)
    assert torch.equal(numbers, before)
    for row, alone in zip(encoded, numbers.split(1), strict=True):
        assert torch.equal(row, codec.encode(alone)[0])
        part = codec.decode(row.view(1, -1), numbers.shape[1])  # of another storage offset
        assert torch.equal(part, decoded(codec, alone))


@coded
@given(numbers=rows_of(finite), data=st.data())
def test_what_is_not_finite_does_not_become_finite(
    codec: Codec, numbers: Tensor, data: st.DataObject
) -> None:
    assume(numbers.numel())
    at = data.draw(st.integers(0, numbers.numel() - 1))
    numbers.view(-1)[at] = data.draw(st.sampled_from([math.nan, math.inf, -math.inf]))
    assert not decoded(codec, numbers).flatten()[at].isfinite()


@coded
def test_zero_and_nothing(codec: Codec) -> None:
    assert torch.equal(decoded(codec, torch.zeros(2, 100)), torch.zeros(2, 100))
    assert codec.wire_bytes(0) == 0
    assert codec.encode(torch.zeros(3, 0)).shape == (3, 0)


@coded
def test_more_numbers_are_never_fewer_bytes(codec: Codec) -> None:
    sizes = [codec.wire_bytes(numel) for numel in range(1000)]
    assert sizes == sorted(sizes)


@given(rows_of(finite))
def test_an_exact_codec_returns_what_it_was_given(numbers: Tensor) -> None:
    for codec in CODED:
        if codec.exact:
            assert torch.equal(decoded(codec, numbers), numbers)


# int8 -----------------------------------------------------------------------------------------------


@given(st.lists(st.lists(st.integers(-127, 127), min_size=15, max_size=15), min_size=1, max_size=4))
def test_whole_numbers_up_to_127_are_exact(chunks: list[list[int]]) -> None:
    numbers = torch.tensor([[-127, *chunk] for chunk in chunks], dtype=torch.float32).view(1, -1)
    assert torch.equal(decoded(Int8(chunk=16), numbers), numbers)


@given(rows_of(finite), st.sampled_from([16, 20, 256]))
def test_the_error_is_half_a_scale_of_the_chunk(numbers: Tensor, chunk: int) -> None:
    errors = (decoded(Int8(chunk=chunk), numbers).double() - numbers.double()).abs()
    for start in range(0, numbers.shape[1], chunk):
        part = slice(start, start + chunk)
        largest = numbers[:, part].abs().amax(dim=1, keepdim=True).double()
        assert (errors[:, part] <= (largest / 127 * 0.50001).clamp(min=SMALLEST)).all()


@given(st.floats(-HUGE, HUGE, width=32).filter(lambda x: not 0 < abs(x) < SMALLEST))
def test_one_number_is_kept_to_the_precision_of_float32(number: float) -> None:
    numbers = torch.tensor([[number]])
    torch.testing.assert_close(decoded(Int8(), numbers), numbers, rtol=3e-7, atol=0)


@given(st.lists(st.floats(-SMALLEST / 2, SMALLEST / 2, width=32), min_size=1, max_size=20))
def test_tiny_chunks_become_zeros(numbers: list[float]) -> None:
    assert not decoded(Int8(), torch.tensor([numbers])).any()


def test_a_chunk_with_nan_spoils_no_other() -> None:
    numbers = torch.ones(1, 48)
    numbers[0, 20] = math.nan
    assert decoded(Int8(chunk=16), numbers).isnan()[0].tolist() == [
        16 <= index < 32 for index in range(48)
    ]


@pytest.mark.parametrize("chunk", [0, -5, 15, 65_537])
def test_impossible_chunks_are_refused(chunk: int) -> None:
    with pytest.raises(SpecError, match=f"chunk={chunk}; 16 to 65536 .* chunk=256"):
        Int8(chunk=chunk).check()


def test_int8_is_about_a_quarter_of_float32() -> None:
    assert Int8().wire_bytes(1 << 20) / PLAIN.wire_bytes(1 << 20) == 0.25 + 1 / 256


def test_codecs_have_names_and_rows_and_need_no_torch_before_they_encode() -> None:
    for name, cls in CODECS.items():
        assert cls.name == name
        assert cls.feature is not None
        assert cls.feature.name == name
        assert name not in PLANNED
    assert set(PLANNED.values()) <= set(CODECS)
    code = (
        "import sys\n"
        "from manyhands.codecs.registry import CODECS\n"
        "[cls().wire_bytes(1000) for cls in CODECS.values()]\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
