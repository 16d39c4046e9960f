"""Delay compensation: the formula, against plain NumPy."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from server_states import filled, layout_for, make_train_state, noise, whole_store

from manyhands.ps.block_store import BlockState, BlockStore, FlatTensors
from manyhands.ps.compensation import Compensation


@pytest.fixture
def params() -> BlockStore:
    """Every second block of a model."""
    train_state = make_train_state("sgd")
    flat = filled(FlatTensors.private(layout_for(train_state)), train_state)
    materials = {n: BlockState(flat.block(n), {}) for n in range(0, len(flat.layout.blocks), 2)}
    return BlockStore(train_state, flat, materials, ticks=0)


def test_a_gradient_is_corrected_by_what_the_weights_have_moved_since(params: BlockStore) -> None:
    generator = torch.Generator().manual_seed(0)
    compensation = Compensation(0.3)
    then = [buffer.numpy().copy() for buffer in params.flat.buffers]
    compensation.remember("a", params)
    params.flat.copy_(noise(params.layout, generator))
    gradient = noise(params.layout, generator)
    before = [buffer.numpy().copy() for buffer in gradient.buffers]
    compensation.correct("a", gradient, params)
    for b, buffer in enumerate(gradient.buffers):
        moved = params.flat.buffers[b].numpy() - then[b]
        corrected = before[b] + 0.3 * before[b] * before[b] * moved
        wanted = before[b].copy()  # what this server does not hold is none of its business
        for span in params.spans:
            if span.buffer == b:
                wanted[span.start : span.stop] = corrected[span.start : span.stop]
        np.testing.assert_allclose(buffer.numpy(), wanted, rtol=1e-6, atol=1e-7)
        assert not np.allclose(wanted, before[b])
        assert not np.allclose(wanted, corrected)


def test_each_worker_is_compared_with_its_own_last_weights(params: BlockStore) -> None:
    generator = torch.Generator().manual_seed(1)
    compensation = Compensation(1.0)
    compensation.remember("a", params)
    compensation.remember("b", params)
    params.flat.copy_(noise(params.layout, generator))
    compensation.remember("b", params)
    gradient = noise(params.layout, generator)
    unmoved, moved = (FlatTensors.private(params.layout) for _ in range(2))
    unmoved.copy_(gradient)
    moved.copy_(gradient)
    compensation.correct("b", unmoved, params)
    compensation.correct("a", moved, params)
    assert all(torch.equal(a, b) for a, b in zip(unmoved.buffers, gradient.buffers, strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(moved.buffers, gradient.buffers, strict=True))


def test_gradients_of_unknown_workers_are_not_corrected() -> None:
    train_state = make_train_state("sgd")
    block_store = whole_store(
        train_state, filled(FlatTensors.private(layout_for(train_state)), train_state)
    )
    gradient = noise(block_store.layout, torch.Generator().manual_seed(2))
    before = gradient.buffers[0].clone()
    Compensation(1.0).correct("nobody", gradient, block_store)
    assert torch.equal(gradient.buffers[0], before)
