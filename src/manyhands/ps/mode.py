"""The mode of a parameter-server strategy: the facts about it that servers and workers need."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from manyhands.ps.policies import Policy
from manyhands.ps.staleness import MomentumRule, Rule


@dataclass(frozen=True)
class PsMode:
    make_policy: Callable[[Sequence[str]], Policy]
    """Makes a policy for the workers, given in rank order."""
    rounds: bool
    """If true, updates are made in rounds, and each is announced to all workers; otherwise a push is an
    update of its own, announced to its worker only."""
    slots: int
    """Gradient buffers per worker: with two it computes the next gradient while one is under way."""
    lr_rule: Rule = "none"
    momentum_rule: MomentumRule = "none"
    compensate: float = 0.0
    """Strength of delay compensation; 0: none."""
    row_age: int | None = None
    """Steps for which a worker may reuse a table's row before it fetches it again; None: never."""
    for_all: bool = False
    """If true, an update has the gradients of all workers, so every server decides by itself."""
    clip_norm: float | None = None
    """The norm to which the servers clip the sum of gradients."""
    push_clip_norm: float | None = None
    """The norm to which a worker clips its own gradient, if each push is an update of its own."""
