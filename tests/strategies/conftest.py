"""Strategies that only tests have."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from manyhands.strategies.registry import STRATEGIES

EXTRA = Path(__file__).parent / "extra"


@pytest.fixture
def extra_strategies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the strategies of the folder `extra` known to this process and to all that it starts."""
    monkeypatch.setenv("PYTHONPATH", str(EXTRA), prepend=os.pathsep)
    monkeypatch.syspath_prepend(EXTRA)
    from extra_strategies import EXTRA_STRATEGIES

    for name, strategy in EXTRA_STRATEGIES.items():
        monkeypatch.setitem(STRATEGIES, name, strategy)
