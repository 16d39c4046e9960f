"""What servers and workers must know of a parameter-server strategy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from manyhands.ps.policies import Policy
from manyhands.ps.staleness import Rule


@dataclass(frozen=True)
class PsMode:
    make_policy: Callable[[Sequence[str]], Policy]
    """Makes a policy for the workers, given in rank order."""
    rounds: bool
    """If true, updates are made in rounds, and all workers are told of each; otherwise a push is an update
    of its own, and only its worker is told."""
    slots: int
    """Gradient buffers per worker: with two it computes the next gradient while one is under way."""
    lr_rule: Rule = "none"
    compensate: float = 0.0
    """Strength of delay compensation; 0: none."""
    row_age: int | None = None
    """Steps for which a worker may reuse a table's row before it fetches it again; None: never."""
    for_all: bool = False
    """If true, an update is everybody's gradients, so that every server knows by itself what comes next."""
    clip_norm: float | None = None
    """The norm to which the servers clip what they have added up."""
    push_clip_norm: float | None = None
    """The norm to which a worker clips its own gradient, where each push is an update of its own."""
