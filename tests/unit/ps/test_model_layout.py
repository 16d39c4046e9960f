"""Flat memory, private or shared, and the optimizer state of its blocks."""

from __future__ import annotations

import copy

import pytest
import torch
from server_states import EVERY_KIND, filled, layout_for, make_train_state, noise
from torch import nn

from manyhands.ps.block_store import FlatTensors, bytes_of
from manyhands.ps.blocks import (
    MIN_BLOCK_BYTES,
    MIN_BLOCKS,
    BlockLayout,
    FlatParameter,
    order_needed,
)
from manyhands.ps.model_layout import block_state, layout_of, piece_state, pieces_of

MIXED = BlockLayout.of(
    [
        FlatParameter("a", 100, 4, dtype="float32"),
        FlatParameter("b", 33, 2, dtype="bfloat16"),
        FlatParameter("c", 7, 8, dtype="float64"),
        FlatParameter("d", 50, 4, group=1, dtype="float32"),
    ],
    block_bytes=128,
)


def test_writes_to_shared_memory_are_read_by_others() -> None:
    mine = FlatTensors.shared(MIXED, label="test")
    assert mine.segment is not None
    theirs = FlatTensors.attached(MIXED, mine.segment.address)
    for number, flat in enumerate((mine, theirs)):
        other = (theirs, mine)[number]
        for piece in MIXED.pieces:
            flat.piece(piece.name).fill_(number + 1.5)
            assert (other.piece(piece.name) == number + 1.5).all()
        flat.set_mark(70 + number)
        assert other.mark == 70 + number
    for flat in (mine, theirs):
        flat.close()


def test_the_mark_is_separate_from_the_numbers() -> None:
    for flat in (FlatTensors.shared(MIXED, label="test"), FlatTensors.private(MIXED)):
        assert flat.mark == 0
        flat.set_mark((1 << 62) + 1)
        assert flat.mark == (1 << 62) + 1
        assert all((buffer == 0).all() for buffer in flat.buffers)
        for buffer in flat.buffers:
            buffer.fill_(-1)
        assert flat.mark == (1 << 62) + 1
        flat.close()


def test_blocks_and_pieces_are_views_of_the_same_memory() -> None:
    flat = FlatTensors.private(MIXED)
    for block in MIXED.blocks:
        flat.block(block.number).fill_(block.number + 1)
    for piece in MIXED.pieces:
        held = [b.number + 1 for b in MIXED.blocks_with(piece.name)]
        assert sorted({int(x) for x in flat.piece(piece.name)}) == held
    other = FlatTensors.private(MIXED)
    other.copy_(flat)
    flat.zero_()
    assert all((buffer == 0).all() for buffer in flat.buffers)
    assert int(other.block(1)[0]) == 2


def test_the_norm_covers_all_buffers_and_does_not_overflow_in_half_precision() -> None:
    flat = FlatTensors.private(MIXED)
    for piece in MIXED.pieces:
        flat.piece(piece.name).fill_(2.0)
    assert flat.norm() == pytest.approx((4 * (100 + 33 + 7 + 50)) ** 0.5, rel=1e-6)
    for dtype in ("float16", "bfloat16"):
        half = FlatTensors.private(BlockLayout.of([FlatParameter("h", 1001, 2, dtype=dtype)]))
        half.piece("h").fill_(3e4)
        wanted = float(half.buffers[0].double().norm())
        assert half.norm() == pytest.approx(wanted, rel=1e-5), dtype


def test_bytes_are_the_memory_itself() -> None:
    tensor = torch.zeros(2, 3, dtype=torch.bfloat16)
    view = bytes_of(tensor[1])
    assert view.nbytes == 6
    view[:2] = b"\x80\x3f"
    assert tensor[1, 0] == 1.0


class Sparse(torch.optim.SGD):
    """A subclass may do anything: it gets whole tensors."""


def test_a_layout_depends_on_the_model_and_its_optimizer_alone() -> None:
    model = nn.Sequential(nn.Linear(600, 700), nn.Linear(700, 9))
    small = layout_of(model, torch.optim.SGD(model.parameters(), lr=0.1))
    sizes = [block.num_bytes for block in small.blocks]
    total = sum(p.numel() * 4 for p in model.parameters())
    assert len(sizes) > 20, "1.7 MB for eight servers and more"
    assert min(sizes) >= MIN_BLOCK_BYTES / 2
    assert len(sizes) <= min(MIN_BLOCKS, total // MIN_BLOCK_BYTES + 1)
    twin = copy.deepcopy(model)
    assert layout_of(twin, torch.optim.Adam(twin.parameters())).digest == small.digest
    whole = layout_of(model, Sparse(model.parameters(), lr=0.1))
    assert [whole.shape_of(block) for block in whole.blocks] == [
        tuple(p.shape) for p in model.parameters()
    ]
    assert [small.shape_of(block) for block in small.blocks] == [(b.numel,) for b in small.blocks]


def test_frozen_parameters_are_not_served() -> None:
    """A server's weight decay would change them."""
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    model[0].requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.1)
    assert list(pieces_of(model, optimizer)) == ["1.weight", "1.bias"]
    assert [piece.name for piece in layout_of(model, optimizer).pieces] == ["1.weight", "1.bias"]


def test_scalar_and_empty_parameters() -> None:
    model = nn.ParameterDict(
        {
            "scalar": nn.Parameter(torch.tensor(3.0)),
            "none": nn.Parameter(torch.zeros(0, 4)),
            "matrix": nn.Parameter(torch.ones(2, 5)),
        }
    )
    optimizer = Sparse(model.parameters(), lr=0.1)
    layout = layout_of(model, optimizer)
    assert sorted(layout.shape_of(block) for block in layout.blocks) == [(), (2, 5)]
    flat = FlatTensors.private(layout)
    for name, parameter in pieces_of(model, optimizer).items():
        flat.piece(name).copy_(parameter.detach().reshape(-1))
    assert sorted(float(flat.block(b.number).sum()) for b in layout.blocks) == [3.0, 10.0]
    assert len(order_needed(layout)) == 2


@pytest.mark.parametrize("name", EVERY_KIND)
def test_optimizer_state_of_parameters_maps_to_blocks_and_back(name: str) -> None:
    train_state = make_train_state(name)
    layout = layout_for(train_state)
    pieces = pieces_of(train_state.model, train_state.optimizer)
    gradient = noise(layout, torch.Generator().manual_seed(1))
    for piece, parameter in pieces.items():
        parameter.grad = gradient.piece(piece).view_as(parameter)
    train_state.optimizer.step()
    states = {piece: train_state.optimizer.state[p] for piece, p in pieces.items()}
    blocks = {b.number: block_state(layout, b, states) for b in layout.blocks}
    for block in layout.blocks:
        for value in blocks[block.number].values():
            if not layout.whole_tensors and torch.is_tensor(value) and value.dim():
                assert value.shape == (block.numel,)
    for piece, parameter in pieces.items():
        back = piece_state(layout, piece, parameter.shape, blocks)
        assert back.keys() == states[piece].keys()
        for key, value in states[piece].items():
            assert torch.equal(torch.as_tensor(back[key]), torch.as_tensor(value)), (piece, key)
            assert torch.as_tensor(back[key]).shape == torch.as_tensor(value).shape


def test_there_is_no_optimizer_state_before_the_first_step() -> None:
    train_state = make_train_state("adam")
    layout = layout_for(train_state)
    filled(FlatTensors.private(layout), train_state)
    assert all(block_state(layout, block, {}) == {} for block in layout.blocks)
    assert piece_state(layout, layout.pieces[0].name, (11, 9), {}) == {}
