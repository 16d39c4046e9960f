"""What mh.Result reads from a run folder."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import manyhands as mh
from manyhands.errors import RunFolderError, UsageError
from manyhands.events import JsonlSink
from manyhands.events.events import Evaluated, Resumed, RunStarted, StepCommitted
from manyhands.runs.folder import EVENTS, RunFolder

SUMMARY = {"outcome": "finished", "steps": 3, "final_metrics": {"loss": 0.5, "accuracy": 0.75}}


def step(number: int, loss: float) -> StepCommitted:
    return StepCommitted(
        step=number,
        epoch=0,
        samples=8,
        shares={"worker-0": ((0, 8),)},
        loss=loss,
        lr=0.1,
        step_s=0.01,
        compute_s=0.01,
        wait_s=0.0,
        bytes_sent=0,
    )


def evaluated(number: int, **metrics: float) -> Evaluated:
    return Evaluated(step=number, epoch=0, samples=8, metrics=metrics, best=False, seconds=0.1)


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    """A run that lost its third step, and trained it again."""
    run = RunFolder.create("digits", path=tmp_path / "run")
    run.write_config({"settings": {}})
    sink = JsonlSink(run.path / EVENTS)
    start: dict[str, Any] = {
        "run": str(run.path),
        "job": "j.py",
        "strategy": "single",
        "workers": 1,
    }
    for event in (
        RunStarted(**start, versions={}),
        step(1, 3.0),
        step(2, math.nan),
        evaluated(2, loss=2.5),
        step(3, 9.0),
        Resumed(step=2, epoch=0, checkpoint="checkpoints/step-2", workers=1),
        step(3, 1.0),
        evaluated(3, loss=0.5, accuracy=0.75),
    ):
        sink.handle(event)
    sink.close()
    return run


def test_the_curves_are_arrays_without_what_was_undone(run: RunFolder) -> None:
    result = mh.Result(run.path)
    assert result.steps["step"].tolist() == [1, 2, 3]
    np.testing.assert_array_equal(result.steps["loss"], [3.0, math.nan, 1.0])
    assert list(result.metrics) == ["step", "loss", "accuracy"]
    assert result.metrics["step"].dtype == np.int64
    np.testing.assert_array_equal(result.metrics["loss"], [2.5, 0.5])
    np.testing.assert_array_equal(result.metrics["accuracy"], [math.nan, 0.75])


def test_a_run_without_evaluations_has_no_metrics(tmp_path: Path) -> None:
    run = RunFolder.create("digits", path=tmp_path / "run")
    run.write_config({})
    result = mh.Result(str(run.path))
    assert [*result.metrics] == ["step"]
    assert len(result.metrics["step"]) == len(result.steps["loss"]) == 0


def test_the_summary_and_the_outcome(run: RunFolder) -> None:
    run.write_summary(SUMMARY)
    result = mh.Result(run.path)
    assert (result.path, result.outcome, result.summary) == (run.path, "finished", SUMMARY)
    assert repr(result) == f"Result('{run.path}', finished, 3 steps, loss 0.5000, accuracy 0.7500)"


def test_a_run_that_has_not_ended(run: RunFolder) -> None:
    result = mh.Result(run.path)
    with pytest.raises(RunFolderError, match=r"was cut off: .* mh.resume\('.*run'\) continues"):
        _ = result.outcome
    run.lock()
    try:
        with pytest.raises(RunFolderError, match="is still training"):
            _ = result.summary
    finally:
        run.unlock()
    assert repr(result) == f"Result('{run.path}', not ended)"
    with pytest.raises(RunFolderError, match="There is no run"):
        mh.Result("nowhere")


def test_the_plot_has_a_row_for_each_metric(run: RunFolder) -> None:
    figure = mh.Result(run.path).plot()
    assert [axes.get_ylabel() for axes in figure.axes] == ["loss", "accuracy"]
    training, evaluation = figure.axes[0].lines
    assert training.get_xydata()[-1].tolist() == [3, 1.0]
    assert evaluation.get_xydata().tolist() == [[2, 2.5], [3, 0.5]]
    assert figure._repr_png_().startswith(b"\x89PNG")


def test_without_matplotlib_the_plot_says_what_to_install(
    run: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "manyhands.api.curves", raising=False)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(UsageError, match=r"pip install 'manyhands\[plot\]'"):
        mh.Result(run.path).plot()
