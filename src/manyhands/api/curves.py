"""Draws the curves of a run with matplotlib, which is imported here alone.

Without pyplot: nothing is global, no window opens, and any thread may draw.
"""

from __future__ import annotations

import io
from collections.abc import Mapping

import numpy as np
from matplotlib.figure import Figure


class Curves(Figure):
    """A figure that a notebook shows, whether pyplot is in use there or not."""

    def _repr_png_(self) -> bytes:
        png = io.BytesIO()
        self.savefig(png, format="png")
        return png.getvalue()


def draw(title: str, steps: Mapping[str, np.ndarray], metrics: Mapping[str, np.ndarray]) -> Curves:
    """Draw the loss of training and evaluations above one row per other metric, over the steps."""
    others = [name for name in metrics if name not in ("step", "loss")]
    rows = 1 + len(others)
    figure = Curves(figsize=(6.4, 1.2 + 2.0 * rows), layout="constrained")
    first, *rest = figure.subplots(rows, sharex=True, squeeze=False)[:, 0]
    first.plot(steps["step"], steps["loss"], linewidth=0.8, label="training")
    if "loss" in metrics:
        first.plot(metrics["step"], metrics["loss"], marker=".", label="evaluation")
    first.set_ylabel("loss")
    first.legend()
    for axes, name in zip(rest, others, strict=True):
        axes.plot(metrics["step"], metrics[name], marker=".", color="C1")
        axes.set_ylabel(name)
    (rest or [first])[-1].set_xlabel("step")
    figure.suptitle(title)
    return figure
