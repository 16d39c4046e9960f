"""`mh.Result`: what a run has left in its folder, for Python.

    result = mh.train("job.py", workers=4)
    result.metrics["accuracy"]         array: the value at each evaluation
    result.load()                      the trained model

`mh.Result("runs/digits-20260101-120000")` opens any other run: one that failed, or that a command has
trained. Everything is read from the folder when it is asked for; a long run costs a second for 100,000 steps.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from manyhands.errors import RunFolderError, UsageError
from manyhands.events.history import History, read_history
from manyhands.events.units import count, figure
from manyhands.runs.folder import EVENTS, RunFolder

if TYPE_CHECKING:
    import numpy as np
    import torch
    from matplotlib.figure import Figure
    from torch import nn


class Result:
    """The results of a run: how it ended, its curves, its weights."""

    def __init__(self, run: str | os.PathLike[str]) -> None:
        """Open the run in this folder."""
        self._folder = RunFolder.open(Path(run))

    @property
    def path(self) -> Path:
        """The folder of the run."""
        return self._folder.path

    @cached_property
    def summary(self) -> Mapping[str, Any]:
        """The content of summary.json: outcome, steps, speed, best and final metrics, and more."""
        summary = self._folder.summary
        if summary is None:
            state = "is still training" if self._folder.locked else "was cut off"
            raise RunFolderError(
                f"{self.path} {state}: it has no summary. Its curves and checkpoints can be read already; "
                f"mh.resume({str(self.path)!r}) continues a run that was cut off."
            )
        return summary

    @property
    def outcome(self) -> str:
        """How it ended: "finished", "early-stopped", "limit" (max_steps or max_time) or "target"; if an error
        was raised, "interrupted", "preempted", "diverged" or "failed"."""
        return str(self.summary["outcome"])

    @cached_property
    def metrics(self) -> dict[str, np.ndarray]:
        """The evaluations as arrays of the same length: "step", "loss" and the job's metrics. NaN where an
        evaluation did not have one."""
        evaluations = self._history.evaluations
        names = dict.fromkeys(name for each in evaluations for name in each["metrics"])
        rows = [each["metrics"] for each in evaluations]
        return {
            "step": _array([each["step"] for each in evaluations], whole=True),
            **{name: _array([row.get(name) for row in rows]) for name in names},
        }

    @cached_property
    def steps(self) -> dict[str, np.ndarray]:
        """The steps of the training as arrays of the same length: "step", and its mean "loss"."""
        losses = self._history.losses
        return {
            "step": _array([step for step, _ in losses], whole=True),
            "loss": _array([loss for _, loss in losses]),
        }

    @cached_property
    def _history(self) -> History:
        return read_history(self.path / EVENTS)

    def load(self, step: str | int = "best", *, device: str | torch.device = "cpu") -> nn.Module:
        """Return the trained model in evaluation mode: `mh.load(self.path)`."""
        from manyhands.embeddings.from_run import load

        return load(self.path, step=step, device=device)

    def plot(self) -> Figure:
        """Draw the loss of the training and the metrics of the evaluations over the steps.

        Needs matplotlib (pip install 'manyhands[plot]'). Returns the figure: `figure.savefig("curves.png")`.
        """
        try:
            from manyhands.api.curves import draw
        except ImportError as error:
            raise UsageError(
                "Result.plot() needs matplotlib. Type  pip install 'manyhands[plot]'  or use the arrays in "
                "result.steps and result.metrics."
            ) from error
        return draw(self.path.name, self.steps, self.metrics)

    def __repr__(self) -> str:
        try:
            summary = self.summary
        except RunFolderError:
            return f"Result({str(self.path)!r}, not ended)"
        figures = {**(summary.get("final_metrics") or {})}
        shown = "".join(f", {name} {figure(value)}" for name, value in figures.items())
        return f"Result({str(self.path)!r}, {self.outcome}, {count(summary['steps'] or 0)} steps{shown})"


def _array(values: Sequence[Any], *, whole: bool = False) -> np.ndarray:
    import numpy as np

    if whole:
        return np.array(values, dtype=np.int64)
    floats = [value if isinstance(value, int | float) else math.nan for value in values]
    return np.array(floats, dtype=np.float64)
