"""The state of a model without the rows of its sparse tables.

`model.state_dict()` has the rows too, as its user expects. A checkpoint and a worker that catches up get
them by themselves, with what a table's optimizer remembers: once a host, and only what has changed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from torch import nn

_without_rows: ContextVar[bool] = ContextVar("without_rows", default=False)


def rows_wanted() -> bool:
    """If false, a module with a table leaves its rows out of a state dict, and expects none in it."""
    return not _without_rows.get()


def dense_state(model: nn.Module) -> dict[str, Any]:
    """The model's state dict without rows, which are not even read."""
    with _rows_left_out():
        return model.state_dict()


def load_dense_state(model: nn.Module, state: Mapping[str, Any]) -> None:
    """Load a state dict without rows. Those that the model has stay."""
    with _rows_left_out():
        model.load_state_dict(state)


@contextmanager
def _rows_left_out() -> Iterator[None]:
    token = _without_rows.set(True)
    try:
        yield
    finally:
        _without_rows.reset(token)
