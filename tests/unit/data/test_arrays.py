from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from manyhands.data import Arrays
from manyhands.errors import UsageError


def ten() -> Arrays:
    return Arrays(torch.arange(20.0).reshape(10, 2), torch.arange(10))


def test_a_sample_is_a_tuple_of_rows():
    row, label = ten()[3]
    assert row.tolist() == [6.0, 7.0]
    assert label.item() == 3
    assert len(ten()) == 10


def test_iteration_ends_at_the_last_sample():
    assert [label.item() for _, label in ten()] == list(range(10))


@given(st.lists(st.integers(0, 9), max_size=30))
def test_a_batch_keeps_the_requested_order_and_repeats(indices: list[int]):
    data = ten()
    rows, labels = data.gather(torch.tensor(indices, dtype=torch.int64))
    assert labels.tolist() == indices
    assert rows.tolist() == [data[i][0].tolist() for i in indices]


def test_a_batch_is_a_copy_so_that_training_cannot_change_the_data():
    data = ten()
    data.gather(torch.tensor([0, 1]))[0].zero_()
    assert data[1][0].tolist() == [2.0, 3.0]


def test_an_index_outside_is_refused():
    with pytest.raises(IndexError):
        ten()[10]
    with pytest.raises((IndexError, RuntimeError)):
        ten().gather(torch.tensor([10]))


@pytest.mark.parametrize("processes", [0, 1])
def test_a_dataloader_reads_it_as_any_dataset(processes: int):
    context = "spawn" if processes else None
    loader = DataLoader(
        ten(),
        batch_size=4,
        num_workers=processes,
        multiprocessing_context=context,
        timeout=30 if processes else 0,
    )
    batches = list(loader)
    assert [labels.tolist() for _, labels in batches] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert torch.cat([rows for rows, _ in batches]).equal(ten().tensors[0])


def test_a_dataloader_calls_once_per_batch():
    class Counting(Arrays):
        asked = 0

        def gather(self, indices: torch.Tensor) -> tuple[torch.Tensor, ...]:
            self.asked += 1
            return super().gather(indices)

    data = Counting(torch.arange(10))
    assert len(list(DataLoader(data, batch_size=5))) == 2
    assert data.asked == 2


def test_repr_shows_the_contents():
    assert repr(ten()) == "Arrays(10 samples of float32(2,), int64())"


def test_unequal_lengths_are_refused_with_the_lengths():
    with pytest.raises(UsageError, match=r"10, 9 rows.*same number"):
        Arrays(torch.zeros(10, 2), torch.zeros(9))


def test_no_tensor_is_refused_with_what_to_type():
    with pytest.raises(UsageError, match=r"Arrays\(images, labels\)"):
        Arrays()


def test_other_types_than_tensors_are_refused_with_the_remedy():
    with pytest.raises(UsageError, match=r"argument 1 is a ndarray.*torch\.as_tensor"):
        Arrays(torch.zeros(3), np.zeros(3))


def test_a_single_number_is_refused():
    with pytest.raises(UsageError, match="argument 0 is a single number"):
        Arrays(torch.tensor(1.0))
