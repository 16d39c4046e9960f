"""Maps a model's parameters and their optimizer state to blocks and back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from manyhands.compute.param_groups import is_elementwise
from manyhands.ps.blocks import MIN_BLOCKS, Block, BlockLayout, FlatParameter


def pieces_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, nn.Parameter]:
    """Return the trained parameters by name, in the optimizer's order. Without frozen ones: weight decay on a
    server would change them."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    listed = [p for group in optimizer.param_groups for p in group["params"]]
    return {names[id(p)]: p for p in listed if p.requires_grad}


def layout_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> BlockLayout:
    """Return the layout of a model. It depends only on the model and its optimizer, so all processes
    agree."""
    group_of = {id(p): index for index, g in enumerate(optimizer.param_groups) for p in g["params"]}
    pieces = [
        FlatParameter(
            name,
            p.numel(),
            p.element_size(),
            group_of[id(p)],
            str(p.dtype).removeprefix("torch."),
            tuple(p.shape),
        )
        for name, p in pieces_of(model, optimizer).items()
    ]
    whole = not is_elementwise(optimizer)
    return BlockLayout.of(pieces, whole_tensors=whole, min_blocks=MIN_BLOCKS)


def block_state(
    layout: BlockLayout, block: Block, states: Mapping[str, Mapping[str, Any]]
) -> dict[str, Any]:
    """Return the optimizer state of a block, from that of each parameter."""
    whole: dict[str, Any] = {}
    if layout.whole_tensors:
        (only,) = layout.pieces_in(block)
        return {
            k: v.cpu() if isinstance(v, Tensor) else v for k, v in states.get(only.name, {}).items()
        }
    for piece in layout.pieces_in(block):
        slot = layout.slots[piece.name]
        low, high = max(slot.start, block.start), min(slot.stop, block.stop)
        for key, value in states.get(piece.name, {}).items():
            if not isinstance(value, Tensor) or value.dim() == 0 or value.numel() != piece.numel:
                whole.setdefault(key, value.cpu() if isinstance(value, Tensor) else value)
                continue
            target = whole.setdefault(key, torch.zeros(block.numel, dtype=value.dtype))
            target[low - block.start : high - block.start] = value.reshape(-1)[
                low - slot.start : high - slot.start
            ].cpu()
    return whole


def piece_state(
    layout: BlockLayout, name: str, shape: Sequence[int], states: Mapping[int, Mapping[str, Any]]
) -> dict[str, Any]:
    """Return the optimizer state of a parameter, from that of its blocks."""
    if layout.whole_tensors:
        return {
            k: v
            for block in layout.blocks_with(name)
            for k, v in states.get(block.number, {}).items()
        }
    slot = layout.slots[name]
    parts = []
    for block in layout.blocks_with(name):
        low, high = max(slot.start, block.start), min(slot.stop, block.stop)
        parts.append(
            {
                key: value.reshape(-1)[low - block.start : high - block.start]
                if isinstance(value, Tensor) and value.dim() > 0
                else value
                for key, value in states.get(block.number, {}).items()
            }
        )
    return join_state(parts, shape)


def join_state(pieces: Sequence[Mapping[str, Any]], shape: Sequence[int]) -> dict[str, Any]:
    """Return the state of a parameter, in its own shape, from that of its consecutive pieces."""
    if not pieces or not pieces[0]:
        return {}
    joined: dict[str, Any] = {}
    for name, first in pieces[0].items():
        if isinstance(first, Tensor) and first.dim() > 0:
            joined[name] = torch.cat([piece[name].reshape(-1) for piece in pieces]).view(*shape)
        else:
            joined[name] = first.clone() if isinstance(first, Tensor) else first
    return joined
