"""Sums of encoded buffers, in a group of threads. test_reducer.py has real processes."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from manyhands.codecs.codec import PLAIN, Codec
from manyhands.codecs.int8 import Int8
from manyhands.collectives.buckets import part_of
from manyhands.collectives.compressed import CompressedExchange
from manyhands.collectives.group import Group
from manyhands.testing.thread_group import run_workers


def buffers(rank: int, sizes: list[int], *, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(rank)
    return [torch.randn(size, generator=generator).to(dtype) for size in sizes]


def summed(
    world: int, sizes: list[int], codec: Codec, *, dtype: torch.dtype = torch.float32
) -> list[list[Tensor]]:
    """Return the buffers of each worker after one exchange."""

    def work(group: Group) -> list[Tensor]:
        mine = buffers(group.rank, sizes, dtype=dtype)
        exchange = CompressedExchange(group, codec)
        for flat in mine:
            exchange.begin(flat)
        exchange.finish()
        return mine

    return run_workers(world, work)


@given(
    st.integers(1, 5),
    st.lists(st.integers(0, 70), max_size=3),
    st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
)
def test_all_workers_get_the_same_sum(world: int, sizes: list[int], dtype: torch.dtype) -> None:
    codec = Int8(chunk=16)
    results = summed(world, sizes, codec, dtype=dtype)
    again = summed(world, sizes, codec, dtype=dtype)
    inputs = [buffers(rank, sizes, dtype=dtype) for rank in range(world)]
    for index, size in enumerate(sizes):
        sums = results[0][index]
        for others in (*results, *again):
            assert torch.equal(others[index], sums)
        assert sums.dtype == dtype
        if size:
            mine = [each[index].double() for each in inputs]
            # Half a scale for each worker, and half of one for their sum.
            largest = sum(float(each.abs().max()) for each in mine)
            error = (sums.double() - sum(mine)).abs().max()
            assert error <= 2 * largest / 254 + 0.01 * largest * (dtype == torch.bfloat16) + 1e-6


def test_a_codec_without_loss_gives_the_sum_in_rank_order() -> None:
    first, second, third = (buffers(rank, [100])[0] for rank in range(3))
    for (result,) in summed(3, [100], PLAIN):
        assert torch.equal(result, first + second + third)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_on_one_worker_is_not_finite_on_all(bad: float) -> None:
    def work(group: Group) -> Tensor:
        flat = torch.ones(1000)
        if group.rank == 1:
            flat[777] = bad
        exchange = CompressedExchange(group, Int8())
        exchange.begin(flat)
        exchange.finish()
        return flat

    results = run_workers(3, work)
    for flat in results:
        assert not flat[777].isfinite()
        assert flat[:512].isfinite().all()
        assert torch.equal(flat.isfinite(), results[0].isfinite())


def test_an_exchange_serves_one_step_after_another() -> None:

    def work(group: Group) -> Tensor:
        exchange = CompressedExchange(group, Int8())
        for _ in range(2):
            flat = torch.full((300,), 127.0)
            exchange.begin(flat)
            exchange.finish()
        return flat

    assert all(torch.equal(each, torch.full((300,), 254.0)) for each in run_workers(2, work))


@pytest.mark.parametrize(("world", "numel"), [(2, 1000), (3, 1000), (4, 1001)])
def test_bytes_are_those_of_the_encoded_parts(world: int, numel: int) -> None:
    def work(group: Group) -> int:
        exchange = CompressedExchange(group, Int8())
        exchange.begin(torch.ones(numel))
        exchange.finish()
        return group.bytes_sent

    part_bytes = Int8().wire_bytes(part_of(numel, workers=world))
    assert run_workers(world, work) == [2 * (world - 1) * part_bytes] * world
