"""Staleness of pushes: what it does to the learning rate. Pure.

The staleness of a push is the number of updates applied between the weights that it was computed on
and its own update: 0 in lockstep, about the number of workers less one in async.

`lr_scale` is the factor on the learning rate of one push (Zhang et al. 2016, "Staleness-aware
Async-SGD": divide by it; the square root is the milder rule for where that makes the steps too small). It
goes by batches, not by pushes: each of n pushes moves the weights by an n-th of a step, so n of them make a
gradient as stale as one step.
"""

from __future__ import annotations

import math
from typing import Literal

from manyhands.errors import SpecError, closest

Rule = Literal["none", "inverse", "sqrt"]
RULES: tuple[Rule, ...] = ("none", "inverse", "sqrt")
MomentumRule = Literal["none", "ahead"]
"""What momentum does about staleness: see partial_steps.py."""


def lr_scale(rule: Rule, batches: float) -> float:
    """1, 1/(1+batches) or 1/sqrt(1+batches)."""
    assert batches >= 0, f"a staleness of {batches} batches is below 0"
    if rule == "none":
        return 1.0
    if rule == "inverse":
        return 1 / (1 + batches)
    if rule == "sqrt":
        return 1 / math.sqrt(1 + batches)
    raise SpecError(
        f"{rule!r} is no rule for the learning rate over staleness{closest(str(rule), RULES)} "
        f"There are {', '.join(RULES)}; write one of them."
    )
