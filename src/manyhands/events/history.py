"""The history of a run, read from its events.jsonl: while it trains, after a kill, and for old runs.

A Resumed event voids the steps and evaluations after its step. Reading takes about a second for 100,000
steps; `with_steps=False` skips the steps and takes a tenth of that.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from manyhands.events.jsonl import read_events

_STEP = b'"event":"StepCommitted"'
BARS = "▁▂▃▄▅▆▇█"
PLAIN_BARS = ".:-=+*%#"


@dataclass(frozen=True)
class LostMember:
    """A member that died during the run."""

    member: str
    reason: str
    after_step: int


@dataclass
class History:
    """The history of a run so far, without voided steps."""

    seconds: float = 0.0
    """Running time of all starts, without the pauses between them."""
    num_starts: int = 0
    """How many times it was started or resumed."""
    num_steps: int | None = None
    """Planned steps of the whole training."""
    step: int = 0
    samples: int = 0
    train_s: float = 0.0
    """Time spent in steps."""
    losses: list[tuple[int, float]] = field(default_factory=list)
    """Step and its mean loss."""
    evaluations: list[Mapping[str, Any]] = field(default_factory=list)
    lost: list[LostMember] = field(default_factory=list)
    failure: str | None = None
    """The member that failed since the last start, and why."""
    ended: bool = False
    """If true, the last start has a RunFinished event."""
    resume_command: str | None = None
    """The command to continue, if it gave one."""

    @property
    def best(self) -> Mapping[str, Any] | None:
        """The evaluation of the best model."""
        return next((each for each in reversed(self.evaluations) if each["best"]), None)

    @property
    def curves(self) -> dict[str, list[tuple[int, float]]]:
        """Metric to its values in the evaluations, each with its step."""
        curves: dict[str, list[tuple[int, float]]] = {}
        for each in self.evaluations:
            for name, value in each["metrics"].items():
                if isinstance(value, int | float):
                    curves.setdefault(name, []).append((each["step"], value))
        return curves


def read_history(path: Path, *, with_steps: bool = True) -> History:
    """Read the history from this events.jsonl; an empty one if the file does not exist."""
    history = History()
    if not path.is_file():
        return history
    began = last = None
    steps: list[dict[str, Any]] = []
    for record in read_events(path, leave_out=b"" if with_steps else _STEP):
        kind = record["event"]
        if kind == "RunStarted":
            history.seconds += last - began if began is not None and last is not None else 0.0
            history.num_starts += 1
            history.failure, history.ended, history.resume_command = None, False, None
            began = record["time"]
        last = record["time"]
        match kind:
            case "StepCommitted":
                steps.append({key: record[key] for key in ("step", "loss", "samples", "step_s")})
                history.step = max(history.step, record["step"])
            case "Evaluated":
                history.evaluations.append(record)
                history.step = max(history.step, record["step"])
            case "CheckpointSaved":
                history.step = max(history.step, record["step"])
            case "MemberReady":
                history.num_steps = record["steps"]
            case "RateChanged":
                history.num_steps = record.get("steps", history.num_steps)
            case "MemberLost":
                history.lost.append(LostMember(record["member"], record["reason"], history.step))
            case "MemberFailed":
                history.failure = history.failure or f"{record['member']} {record['reason']}"
            case "RunFinished":
                history.ended = True
                history.resume_command = record.get("resume_command")
            case "Resumed":
                history.step = record["step"]
                steps = [step for step in steps if step["step"] <= history.step]
                kept = [each for each in history.evaluations if each["step"] <= history.step]
                history.evaluations = kept
    if began is not None and last is not None:
        history.seconds += last - began
    steps.sort(key=lambda step: int(step["step"]))
    history.losses = [(step["step"], step["loss"]) for step in steps]
    history.samples = sum(step["samples"] for step in steps)
    history.train_s = sum(step["step_s"] for step in steps)
    return history


def sparkline(values: Sequence[float], cells: int = 48, bars: str = BARS) -> str:
    """Draw a curve in one line of text: one bar per equal part, the mean of its values. A part without a
    finite value is an x."""
    if not values:
        return ""
    cells = min(cells, len(values))
    parts = []
    for cell in range(cells):
        part = values[cell * len(values) // cells : (cell + 1) * len(values) // cells]
        finite = [value for value in part if math.isfinite(value)]
        parts.append(sum(finite) / len(finite) if finite else None)
    known = [part for part in parts if part is not None]
    least, most = min(known, default=0.0), max(known, default=0.0)
    span = (most - least) or 1.0
    top = len(bars) - 1
    return "".join("x" if p is None else bars[round((p - least) / span * top)] for p in parts)
