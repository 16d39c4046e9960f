"""The state of a model without the rows of its sparse tables.

`model.state_dict()` has the rows too, as its user expects. Checkpoints and new workers get the rows
separately, with the state of the table's optimizer: once per host, and only what has changed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from torch import nn

from manyhands.runs.layouts import laid_out_as

_without_rows: ContextVar[bool] = ContextVar("without_rows", default=False)


def rows_wanted() -> bool:
    """Return whether modules with tables write rows to state dicts, and expect rows in them."""
    return not _without_rows.get()


def dense_state(model: nn.Module) -> dict[str, Any]:
    """Return the model's state dict without rows, which are not even read."""
    with _rows_left_out():
        return model.state_dict()


def load_dense_state(model: nn.Module, state: Mapping[str, Any]) -> None:
    """Load a state dict without rows. The rows of the model stay."""
    with _rows_left_out():
        own = model.state_dict()
        laid_out = {name: laid_out_as(value, own.get(name)) for name, value in state.items()}
        model.load_state_dict(laid_out)


@contextmanager
def _rows_left_out() -> Iterator[None]:
    token = _without_rows.set(True)
    try:
        yield
    finally:
        _without_rows.reset(token)
