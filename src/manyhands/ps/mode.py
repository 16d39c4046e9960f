"""What distinguishes the ways of agreeing, as far as servers and their clients must know it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from manyhands.ps.policies import Policy
from manyhands.ps.staleness import Rule


@dataclass(frozen=True)
class PsMode:
    make_policy: Callable[[Sequence[str]], Policy]
    """From the workers, in rank order."""
    rounds: bool
    """Updates are made in rounds, and all workers are told of each; otherwise a push is an update of
    its own, and its worker alone is told."""
    slots: int
    """Gradient buffers of a worker: with two it computes the next while one is under way."""
    lr_rule: Rule = "none"
    compensate: float = 0.0
    """Strength of the delay compensation; 0: none."""
    row_age: int | None = None
    """Steps for which a worker may reuse a table's row before it asks for it again; None: it never may."""
    for_all: bool = False
    """An update is everybody's gradients, so that every server knows by itself what comes next."""
    clip_norm: float | None = None
    """The norm to which the servers clip what they have added up."""
    push_clip_norm: float | None = None
    """The norm to which a worker clips its own gradient, where each push is an update of its own."""
