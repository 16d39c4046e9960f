"""From positions to batches: the same samples, however and wherever they are gathered."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import Dataset, IterableDataset, Subset, TensorDataset

from manyhands.compute.feed import Feed, check_dataset, gather
from manyhands.control.messages import Portion
from manyhands.data import Arrays
from manyhands.errors import JobError
from manyhands.job import Job
from manyhands.ranges import Range

SAMPLES = 23


class Plain:
    """A minimal map-style dataset; each sample contains its index."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.full((3,), float(index)), index * 10


class Drawing(Plain):
    """Augmented with the generators of Python, NumPy and torch."""

    def __getitem__(self, index: int) -> tuple[Any, ...]:
        noise = [random.random(), float(np.random.rand()), float(torch.rand(()))]
        return torch.tensor(noise, dtype=torch.float64), index


def tensors() -> tuple[torch.Tensor, torch.Tensor]:
    numbers = torch.arange(SAMPLES)
    return numbers.float()[:, None].expand(-1, 3).contiguous(), numbers * 10


def share(job: Job, dataset: Any, *ranges: Range, epoch: int = 0, uniform: bool = False) -> Any:
    portion = Portion(1, epoch, SAMPLES, ranges)
    return Feed(job, dataset, device="cpu", uniform=uniform).share(portion)


def used(job: Job, dataset: Any, *ranges: Range, epoch: int = 0) -> list[int]:
    """The numbers of the samples of a portion, in order."""
    batches = share(job, dataset, *ranges, epoch=epoch).batches
    return [int(y) // 10 for (_, ys), _ in batches for y in ys]


def test_permutations_differ_by_epoch_and_repeat_by_seed(make_job: Any) -> None:
    whole = (0, SAMPLES)
    orders = [used(make_job(seed=5), Plain(), whole, epoch=epoch) for epoch in range(4)]
    assert all(sorted(order) == list(range(SAMPLES)) for order in orders)
    assert len({tuple(order) for order in orders}) == 4
    assert orders == [used(make_job(seed=5), Plain(), whole, epoch=epoch) for epoch in range(4)]
    assert orders[0] != used(make_job(seed=6), Plain(), whole)
    # However the batches are cut and whatever was read before.
    feed = Feed(make_job(seed=5), Plain(), device="cpu")
    for epoch in (2, 0, 2):
        batch, _ = feed.share(Portion(1, epoch, 9, ((3, 7), (9, 12)))).batches[0]
        assert (batch[1] // 10).tolist() == orders[epoch][3:7] + orders[epoch][9:12]


@pytest.mark.parametrize(
    "dataset", [Arrays(*tensors()), TensorDataset(*tensors()), Subset(Plain(), range(SAMPLES))]
)
def test_gathering_at_once_equals_gathering_one_by_one(make_job: Any, dataset: Any) -> None:
    indices = torch.tensor([4, 0, 22, 4])
    fast = gather(make_job(), dataset, indices, 0)
    slow = gather(make_job(), Plain(), indices, 0)
    for one, other in zip(fast, slow, strict=True):
        assert torch.equal(one, other)
        assert one.dtype == other.dtype


@pytest.mark.parametrize("dataset", [Arrays(*tensors()), TensorDataset(*tensors()), Plain()])
def test_a_jobs_own_collate_is_respected(make_job: Any, dataset: Any) -> None:
    job = make_job(collate=lambda self, samples: [int(y) for _, y in samples])
    assert gather(job, dataset, torch.tensor([2, 1]), 0) == [20, 10]


@pytest.mark.parametrize("base", [Arrays, TensorDataset])
def test_a_subclass_that_augments_is_not_bypassed(make_job: Any, base: Any) -> None:
    class Doubled(base):  # type: ignore[misc]
        def __getitem__(self, index: int) -> tuple[torch.Tensor, ...]:
            return tuple(2 * value for value in super().__getitem__(index))

    batch = gather(make_job(), Doubled(*tensors()), torch.tensor([3, 1]), 0)
    assert batch[1].tolist() == [60, 20]


def test_an_attribute_called_batch_is_not_a_way_to_gather(make_job: Any) -> None:
    class Odd(Plain):
        def __init__(self) -> None:
            self.batch = 32

    assert gather(make_job(), Odd(), torch.tensor([3]), 0)[1].tolist() == [30]


def test_a_dataset_with_getitems_is_called_once_per_batch(make_job: Any) -> None:
    asked = []

    class Many(Plain):
        def __getitems__(self, numbers: list[int]) -> list[Any]:
            asked.append(numbers)
            return [self[i] for i in numbers]

    assert gather(make_job(), Many(), torch.tensor([3, 1]), 0)[1].tolist() == [30, 10]
    assert asked == [[3, 1]]


def test_augmentation_depends_only_on_sample_and_epoch(make_job: Any) -> None:
    job = make_job()
    feed = Feed(job, Drawing(), device="cpu")
    first = feed.share(Portion(1, 0, 8, ((4, 8),))).batches[0][0][0]
    for other in (Portion(2, 0, 8, ((8, 12),)), Portion(3, 1, 8, ((4, 8),))):
        drawn = feed.share(other).batches[0][0][0]
        assert not (drawn == first).any()
    torch.rand(7), random.random(), np.random.rand()
    again = Feed(make_job(), Drawing(), device="cpu").share(Portion(9, 0, 8, ((4, 8),)))
    assert torch.equal(again.batches[0][0][0], first)
    other_seed = share(make_job(seed=1), Drawing(), (4, 8)).batches[0][0][0]
    assert not (other_seed == first).any()


@given(
    accumulate=st.integers(1, 9),
    pieces=st.lists(st.tuples(st.integers(0, 3), st.integers(1, 4)), min_size=1, max_size=3),
)
def test_micro_batches_cut_a_share_into_equal_parts(
    make_job: Any, accumulate: int, pieces: list[tuple[int, int]]
) -> None:
    ranges: list[Range] = []
    at = 0
    for gap, length in pieces:
        ranges.append((at + gap, at + gap + length))
        at += gap + length
    job = make_job(accumulate=accumulate)
    got = share(job, Arrays(*tensors()), *ranges)
    samples = sum(stop - start for start, stop in ranges)
    counts = [n for _, n in got.batches]
    assert (got.samples, sum(counts), len(counts)) == (samples, samples, min(accumulate, samples))
    assert max(counts) - min(counts) <= 1
    assert [len(batch[0]) for batch, _ in got.batches] == counts
    whole = used(make_job(), Plain(), (0, SAMPLES))
    wanted = [i for low, high in ranges for i in whole[low:high]]
    assert used(job, Plain(), *ranges) == wanted


def test_an_empty_share_is_one_sample_of_weight_zero(make_job: Any) -> None:
    for dataset in (Plain(), Arrays(*tensors())):
        got = share(make_job(accumulate=3), dataset)
        ((batch, count),) = got.batches
        assert (got.samples, got.total, count, len(batch[0])) == (0, SAMPLES, 0, 1)


@pytest.mark.parametrize("num_samples", [0, 1, 3, 4, 20])
def test_uniform_shares_have_as_many_micro_batches_as_the_job_says(
    make_job: Any, num_samples: int
) -> None:
    job, ranges = make_job(accumulate=4), ((0, num_samples),) if num_samples else ()
    plain = share(job, Plain(), *ranges)
    got = share(job, Plain(), *ranges, uniform=True)
    assert (got.samples, len(got.batches)) == (num_samples, 4)
    real = [(batch, count) for batch, count in got.batches if count]
    for (ours, count), (theirs, counts) in zip(real, plain.batches, strict=False):
        assert torch.equal(ours[0], theirs[0])
        assert count == counts
    assert [len(batch[0]) for batch, count in got.batches[len(real) :]] == [1] * (4 - len(real))


class Stream(IterableDataset):  # type: ignore[type-arg]
    def __iter__(self) -> Any:
        return iter(range(3))

    def __len__(self) -> int:
        return 3


class NoLength(Dataset):  # type: ignore[type-arg]
    def __getitem__(self, index: int) -> int:
        return index


@pytest.mark.parametrize(
    ("dataset", "says"),
    [
        (None, r"Mine.data\(\) must return a map-style .*; it returned None \(is a return missing"),
        (5, r"map-style dataset \(len\(\) and \[\]\); it returned int"),
        (iter([1, 2]), "it returned list_iterator"),
        (Stream(), "it returned Stream"),
        (NoLength(), "it returned NoLength"),
        ([], r"Mine.data\(\) returned a data set without samples"),
    ],
)
def test_the_wrong_dataset(make_job: Any, dataset: Any, says: str) -> None:
    with pytest.raises(JobError, match=says):
        check_dataset(make_job(), "data", dataset)


def test_a_list_is_a_dataset(make_job: Any) -> None:
    check_dataset(make_job(), "eval_data", [(1.0, 2)])
    batch = gather(make_job(), [(1.0, 2), (3.0, 4)], torch.tensor([1]), 0)
    assert [value.tolist() for value in batch] == [[3.0], [4]]


def test_a_share_has_its_part(make_job: Any) -> None:
    job = make_job()
    share = Feed(job, job.data(), device="cpu").share(Portion(3, 1, 8, ((4, 8),), part=2))
    assert (share.step, share.epoch, share.samples, share.total, share.part) == (3, 1, 4, 8, 2)
