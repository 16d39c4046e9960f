"""Collects the facts that costs are computed from (costs.py) from the model and optimizer that a worker has
built."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from manyhands.compute.param_groups import is_elementwise, like, settings_in
from manyhands.compute.train_state import TrainState
from manyhands.costs import ModelSize, ParameterSize, TableSize
from manyhands.embeddings.modules import RowModel


def model_size(
    train_state: TrainState, rows_per_sample: Mapping[str, float] | None = None
) -> ModelSize:
    """Return the facts about a model and its optimizer. `rows_per_sample`: distinct rows that a sample looks
    up, by table, where that is known."""
    model, optimizer = train_state.model, train_state.optimizer
    places = [
        (id(parameter), number)
        for number, group in enumerate(optimizer.param_groups)
        for parameter in group["params"]
        if parameter.requires_grad
    ]
    where = {key: (number, place) for place, (key, number) in enumerate(places)}
    states: dict[tuple[Any, ...], int | None] = {}
    parameters = []
    for name, parameter in model.named_parameters():
        group, place = where.get(id(parameter), (-1, -1))
        shape, state_bytes = tuple(parameter.shape), None
        if group >= 0:
            key = (shape, parameter.dtype, group)
            if key not in states:
                states[key] = optimizer_bytes(optimizer, parameter, group)
            state_bytes = states[key]
        dtype = str(parameter.dtype).removeprefix("torch.")
        parameters.append(
            ParameterSize(name, shape, dtype, parameter.element_size(), group, place, state_bytes)
        )
    buffers: dict[str, int] = {}
    for buffer in model.buffers():
        dtype = str(buffer.dtype).removeprefix("torch.")
        buffers[dtype] = buffers.get(dtype, 0) + buffer.numel() * buffer.element_size()
    tables = tuple(
        TableSize(name, t.dim, t.bytes_per_row(), t.rows, (rows_per_sample or {}).get(name))
        for name, t in train_state.tables.specs.items()
    )
    return ModelSize(
        tuple(parameters),
        buffers,
        tables,
        elementwise=is_elementwise(optimizer),
        clips=train_state.clip_norm is not None,
        weighted=train_state.weight is not None,
        changes_rows=isinstance(model, RowModel),
    )


def optimizer_bytes(optimizer: Optimizer, parameter: Tensor, group: int) -> int | None:
    """Return the bytes of an optimizer's state for a parameter: from a step of a copy of the optimizer, on a
    tensor of that shape without memory. None if its step reads numbers, which such a tensor does not have."""
    meta = nn.Parameter(torch.empty_like(parameter, device="meta"))
    meta.grad = torch.empty_like(meta)
    try:
        settings = settings_in(optimizer.param_groups[group]) | {"params": [meta]}
        copy = like(optimizer, [settings], foreach=None, fused=None)
        for each in copy.param_groups:
            each |= {key: None for key in ("foreach", "fused") if key in each}
        copy.step()
    except Exception:  # any class, with any step
        return None
    tensors = [value for value in copy.state[meta].values() if isinstance(value, Tensor)]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
