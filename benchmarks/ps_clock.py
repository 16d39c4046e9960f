"""Samples per second from the times at which steps were done, computed alike for all contenders.

Each worker records the time of every step. Steps count between the moment when the last worker has ended its
warm-up and the moment when the first worker has finished, so no worker's start or idle end is included. A
step that crosses either edge counts partially.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import Any


def steady(logs: Sequence[Sequence[float]], *, samples: int, skip: int) -> dict[str, Any]:
    """`logs`: for each worker the times of its steps, each of `samples`; the first `skip` are warm-up."""
    assert all(len(log) > skip + 1 for log in logs), "too few steps to measure"
    began = max(log[skip] for log in logs)
    ended = min(log[-1] for log in logs)
    if ended <= began:
        raise RuntimeError("the workers were never at work at the same time: use more steps")
    steps = sum(_done(log, ended) - _done(log, began) for log in logs)
    return {
        "samples_per_s": samples * steps / (ended - began),
        "began": began,
        "ended": ended,
    }


def _done(log: Sequence[float], time: float) -> float:
    """How many steps were done at a time, with the share of the one under way."""
    after = bisect_right(log, time)
    if after in (0, len(log)):
        return after
    return after + (time - log[after - 1]) / (log[after] - log[after - 1])
