from __future__ import annotations

import dataclasses

from manyhands.contract import Strategy
from manyhands.strategies.spec import SpecPart


def spec_of(strategy: Strategy) -> str:
    """Return the shortest spec that makes this config."""
    changed = {
        field.name: getattr(strategy, field.name)
        for field in dataclasses.fields(strategy)
        if getattr(strategy, field.name) != field.default
    }
    return str(SpecPart(strategy.name, changed))
