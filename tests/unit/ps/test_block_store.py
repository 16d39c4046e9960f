"""Block stores: a model cut into blocks trains like the whole one, and blocks can move between stores."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from server_states import (
    EVERY_KIND,
    OPTIMIZERS,
    assert_same,
    filled,
    layout_for,
    make_train_state,
    noise,
    whole_store,
)
from torch import nn

from manyhands.compute.train_state import TrainState
from manyhands.ps.block_store import (
    BlockState,
    BlockStore,
    FlatTensors,
    add_up,
    squared_norm,
)
from manyhands.ps.blocks import BlockLayout, FlatParameter
from manyhands.ps.model_layout import block_state, pieces_of
from manyhands.ps.spans import spans_of


def dealt(count: int, among: int, seed: int) -> list[list[int]]:
    """Blocks to holdings, at random: some may get none."""
    chance = random.Random(seed)
    hands: list[list[int]] = [[] for _ in range(among)]
    for number in range(count):
        hands[chance.randrange(among)].append(number)
    return hands


def split(
    train_state: TrainState, flat: FlatTensors, hands: Iterable[list[int]]
) -> list[BlockStore]:
    return [
        BlockStore(train_state, flat, {n: BlockState(flat.block(n), {}) for n in hand}, ticks=0)
        for hand in hands
    ]


# Runs -------------------------------------------------------------------------------------------

layouts = st.builds(
    lambda sizes, whole: BlockLayout.of(
        [FlatParameter(f"p{i}", n, 4, group=i % 2) for i, n in enumerate(sizes)],
        block_bytes=256,
        whole_tensors=whole,
    ),
    st.lists(st.integers(0, 400), min_size=1, max_size=6),
    st.booleans(),
)


@given(layouts, st.sampled_from([None, 1, 300, 1000]), st.integers(0, 999))
def test_spans_have_all_blocks_in_order_and_respect_the_limit(
    layout: BlockLayout, max_bytes: int | None, seed: int
) -> None:
    numbers = dealt(len(layout.blocks), 2, seed)[0]
    spans = spans_of(layout, reversed(numbers), max_bytes=max_bytes)
    assert [block.number for span in spans for block in span.blocks] == numbers
    for span in spans:
        assert (span.start, span.stop) == (span.blocks[0].start, span.blocks[-1].stop)
        assert span.numel == sum(block.numel for block in span.blocks), "no gap inside"
        assert {block.buffer for block in span.blocks} == {span.buffer}
        if len(span.blocks) > 1:
            assert not layout.whole_tensors
            assert max_bytes is None or sum(b.num_bytes for b in span.blocks) <= max_bytes
    if max_bytes is None and not layout.whole_tensors:
        ends = {(span.buffer, span.stop) for span in spans}
        assert not any((span.buffer, span.start) in ends for span in spans), (
            "as long as they can be"
        )


# Training ---------------------------------------------------------------------------------------


def plain_step(
    train_state: TrainState, gradient: FlatTensors, *, lr_scale: float, tick: bool
) -> None:
    """What a person's own loop does."""
    for name, parameter in pieces_of(train_state.model, train_state.optimizer).items():
        parameter.grad = gradient.piece(name).view_as(parameter).clone()
    rates = [group["lr"] for group in train_state.optimizer.param_groups]
    for group in train_state.optimizer.param_groups:
        group["lr"] *= lr_scale
    train_state.optimizer.step()
    for group, rate in zip(train_state.optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    if tick:
        assert train_state.scheduler is not None
        train_state.scheduler.step()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_model_in_blocks_trains_like_the_whole_model(name: str) -> None:
    train_state, plain = make_train_state(name), make_train_state(name)
    layout = layout_for(train_state)
    flat = filled(FlatTensors.private(layout), train_state)
    block_stores = split(train_state, flat, dealt(len(layout.blocks), 3, seed=1))
    generator = torch.Generator().manual_seed(7)
    ticks = 0
    for step in range(6):
        gradient, scale = noise(layout, generator), (1.0, 0.25)[step % 2]
        ticks += step % 3 != 1  # a part of a batch moves the weights, not the schedule
        for block_store in block_stores:
            block_store.apply(gradient, lr_scale=scale, ticks=ticks)
        plain_step(plain, gradient, lr_scale=scale, tick=step % 3 != 1)
    for piece, parameter in pieces_of(plain.model, plain.optimizer).items():
        wanted = parameter.detach().reshape(-1)
        torch.testing.assert_close(flat.piece(piece), wanted, rtol=1e-5, atol=1e-6)
    rates = [group["lr"] for group in plain.optimizer.param_groups]
    for block_store in block_stores:
        assert [g["lr"] for g in block_store._optimizer.optimizer.param_groups] == rates


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_results_do_not_depend_on_which_store_has_which_block(name: str) -> None:
    train_state = make_train_state(name)
    layout = layout_for(train_state)
    flats = [filled(FlatTensors.private(layout), train_state) for _ in range(2)]
    whole = whole_store(train_state, flats[0])
    parts = split(train_state, flats[1], dealt(len(layout.blocks), 4, seed=2))
    generator = torch.Generator().manual_seed(3)
    for step in range(1, 5):
        gradient = noise(layout, generator)
        for block_store in (whole, *parts):
            block_store.apply(gradient, lr_scale=0.5, ticks=step)
    for block_store in parts:
        for number in block_store.numbers:
            assert_same(block_store.take(number), whole.take(number), f"block {number}")


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_block_trains_on_unchanged_after_a_move_to_another_store(name: str) -> None:
    train_state = make_train_state(name)
    layout = layout_for(train_state)
    generator = torch.Generator().manual_seed(5)
    first = [noise(layout, generator) for _ in range(3)]
    then = [noise(layout, generator) for _ in range(3)]
    whole = whole_store(train_state, filled(FlatTensors.private(layout), train_state))
    for ticks, gradient in enumerate(first, start=1):
        whole.apply(gradient, lr_scale=1.0, ticks=ticks)
        assert train_state.scheduler is not None
        train_state.scheduler.step()  # whoever builds the new holdings is as far with the schedule
    moved = []
    for hand in dealt(len(layout.blocks), 3, seed=9):
        states = {number: copy.deepcopy(whole.take(number)) for number in hand}
        moved.append(BlockStore(train_state, FlatTensors.private(layout), states, ticks=3))
    for ticks, gradient in enumerate(then, start=4):
        for block_store in (whole, *moved):
            block_store.apply(gradient, lr_scale=0.7, ticks=ticks)
    for block_store in moved:
        for number in block_store.numbers:
            assert number in block_store
            assert_same(block_store.take(number), whole.take(number), f"block {number}")
    assert sum(len(block_store.numbers) for block_store in moved) == len(layout.blocks)


def test_a_store_copies_the_state_that_it_is_made_from() -> None:
    train_state = make_train_state("adam")
    layout = layout_for(train_state)
    old = whole_store(train_state, filled(FlatTensors.private(layout), train_state))
    generator = torch.Generator().manual_seed(1)
    old.apply(noise(layout, generator), lr_scale=1.0, ticks=1)
    states = {number: old.take(number) for number in old.numbers}
    before = copy.deepcopy(states)
    new = BlockStore(train_state, FlatTensors.private(layout), states, ticks=1)
    new.apply(noise(layout, generator), lr_scale=1.0, ticks=2)
    for number in old.numbers:
        assert_same(old.take(number), before[number], "the old one stays as it was")


def test_a_store_without_blocks_follows_the_schedule_without_a_warning() -> None:
    """A server may have no block at all: fewer blocks than servers."""
    train_state = make_train_state("sgd")
    block_store = BlockStore(train_state, FlatTensors.private(layout_for(train_state)), {}, ticks=0)
    for ticks in (1, 2):
        block_store.apply(FlatTensors.private(block_store.layout), lr_scale=0.5, ticks=ticks)
    assert block_store.spans == []
    assert block_store._optimizer.optimizer.param_groups[0]["lr"] == pytest.approx(0.1 / 3)


@pytest.mark.parametrize("name", EVERY_KIND)
def test_optimizer_state_of_a_checkpoint_is_loaded_into_blocks(name: str) -> None:
    """Training that stopped with whole parameters continues in blocks."""
    train_state, plain = (
        make_train_state(name, scheduled=False),
        make_train_state(name, scheduled=False),
    )
    layout = layout_for(train_state)
    generator = torch.Generator().manual_seed(2)
    first, second = noise(layout, generator), noise(layout, generator)
    for each in (train_state, plain):
        plain_step(each, first, lr_scale=1.0, tick=False)
    pieces = pieces_of(train_state.model, train_state.optimizer)
    states = {piece: train_state.optimizer.state.get(p, {}) for piece, p in pieces.items()}
    flat = filled(FlatTensors.private(layout), train_state)
    states = {
        b.number: BlockState(flat.block(b.number), block_state(layout, b, states))
        for b in layout.blocks
    }
    BlockStore(train_state, flat, states, ticks=0).apply(second, lr_scale=1.0, ticks=0)
    plain_step(plain, second, lr_scale=1.0, tick=False)
    for piece, parameter in pieces_of(plain.model, plain.optimizer).items():
        wanted = parameter.detach().reshape(-1)
        torch.testing.assert_close(flat.piece(piece), wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("unused", [0, 1])
def test_blocks_without_state_do_not_affect_their_neighbours(unused: int) -> None:
    """A parameter that no gradient has reached has no state in a checkpoint."""
    model = nn.ParameterList([nn.Parameter(torch.ones(64)), nn.Parameter(torch.ones(64))])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    train_state = TrainState(model, optimizer, loss=lambda model, batch: batch)
    layout = layout_for(train_state, block_bytes=256)
    assert [len(span.blocks) for span in spans_of(layout, range(2))] == [2]
    flat = filled(FlatTensors.private(layout), train_state)
    used = 1 - unused
    states: list[dict[str, torch.Tensor]] = [{}, {}]
    states[used] = {"momentum_buffer": torch.full((64,), 3.0)}
    states = {n: BlockState(flat.block(n), states[n]) for n in (0, 1)}
    block_store = BlockStore(train_state, flat, states, ticks=0)
    assert torch.equal(block_store.take(used).state["momentum_buffer"], torch.full((64,), 3.0))
    block_store.apply(FlatTensors.private(layout), lr_scale=1.0, ticks=0)
    torch.testing.assert_close(flat.block(used), torch.full((64,), 1 - 0.1 * 0.9 * 3.0))
    assert torch.equal(flat.block(unused), torch.ones(64))


# Sums -------------------------------------------------------------------------------------------


@given(
    st.lists(st.sampled_from([1.0, 0.5, 0.25, 1 / 3]), min_size=1, max_size=4), st.integers(0, 99)
)
def test_sums_add_sources_times_coefficients_in_order(coefficients: list[float], seed: int) -> None:
    layout = BlockLayout.of([FlatParameter("a", 100, 4, dtype="float32")], block_bytes=128)
    generator = torch.Generator().manual_seed(seed)
    sources = [noise(layout, generator) for _ in coefficients]
    mine = dealt(len(layout.blocks), 2, seed)[0]
    sums = FlatTensors.private(layout)
    sums.buffers[0].fill_(9.0)
    spans = spans_of(layout, mine)
    add_up(sums, spans, sources, coefficients)
    wanted = torch.zeros(100)
    for source, coefficient in zip(sources, coefficients, strict=True):
        wanted = wanted + source.buffers[0] * coefficient
    for block in layout.blocks:
        got = sums.block(block.number)
        if block.number in mine:
            torch.testing.assert_close(got, wanted[block.start : block.stop])
        else:
            assert (got == 9.0).all(), "what is another's stays untouched"
    known = sum(float(span.of(sums).double().square().sum()) for span in spans)
    assert squared_norm(sums, spans) == pytest.approx(known)
