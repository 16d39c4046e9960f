"""mh.train() in this process: in a thread, and in two at once."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

import manyhands as mh
from manyhands.testing import harness
from manyhands.testing.jobs import Regression
from manyhands.threads import start_thread

HANDLED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def members(run: Path) -> list[int]:
    """Return the processes that a run has started."""
    return [e["pid"] for e in harness.Finished(0, "", "", 0.0, run).of("MemberStarted")]


def handlers() -> list[Any]:
    return [signal.getsignal(number) for number in HANDLED]


def test_a_thread_trains_while_a_failing_job_raises(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = handlers()
    good, bad = tmp_path / "good", tmp_path / "bad"
    found: list[Any] = []

    def train() -> None:
        job = Regression(epochs=2, optim="sgd")
        found.append(mh.train(job, strategy="single", device="cpu", run_dir=good, progress=False))

    thread = start_thread(train, name="train", on_error=found.append)
    with pytest.raises(mh.MemberError, match=r"worker-0 KeyError: 'nonesuch'") as caught:
        mh.train(Regression(optim="nonesuch"), strategy="single", device="cpu", run_dir=bad)
    assert caught.value.run == bad
    traceback, log = caught.value.__notes__
    assert 'jobs.py", line' in traceback
    assert log == f"log: {bad}/logs/worker-0.log"
    assert mh.Result(bad).outcome == "failed"
    assert harness.gone(members(bad), within_s=0)

    thread.join(100)
    [result] = found
    assert isinstance(result, mh.Result), result
    assert (result.outcome, len(result.steps["loss"])) == ("finished", 14)
    assert harness.gone(members(good), within_s=0)
    assert handlers() == before
    printed = capsys.readouterr()
    assert f"  run         {bad}" in printed.out.splitlines()
    assert str(good) not in printed.out  # progress=False
    assert printed.err == ""  # what the exception says is not printed, too


@pytest.mark.long
def test_trainings_one_after_the_other(tmp_path: Path) -> None:
    """By paths and by instances, of several strategies; each leaves nothing."""
    job = Path(harness.JOBS)
    runs = [
        (f"{job}:Regression", {"strategy": "allreduce", "workers": 2}),
        ("manyhands.testing.jobs:Regression", {"strategy": "ps:sync", "workers": 2}),
        (Regression(lr=0.1), {"strategy": "ps:async", "workers": 2}),
        (Regression(lr=0.1), {"strategy": "local(every=2)", "workers": 2, "control": "tcp"}),
    ]
    before = handlers()
    for number, (given, options) in enumerate(runs):
        run = tmp_path / str(number)
        result = mh.train(given, settings={"epochs": 2}, device="cpu", run_dir=run, **options)
        assert result.outcome == "finished"
        assert len(result.metrics["worst"]) == 2
        assert harness.gone(members(run), within_s=0)
        assert handlers() == before


@pytest.mark.long
def test_limits_targets_and_divergence(tmp_path: Path) -> None:
    common: dict[str, Any] = {"strategy": "single", "device": "cpu", "progress": False}
    limited = mh.train(Regression(), max_steps=3, run_dir=tmp_path / "limited", **common)
    assert (limited.outcome, limited.summary["limit"]) == ("limit", "--max-steps 3")
    whole = mh.resume(limited.path, device="cpu", progress=False)
    assert (whole.outcome, len(whole.steps["step"])) == ("finished", 21)
    again = mh.resume(whole.path, progress=False)  # nothing to do
    assert again.summary == whole.summary
    timed = mh.train(
        Regression(epochs=10_000, pause_s=0.01), max_time=6, run_dir=tmp_path / "timed", **common
    )
    assert timed.outcome == "limit"
    target = mh.train(Regression(), target="loss=100", run_dir=tmp_path / "target", **common)
    assert target.outcome == "target"
    wild = Regression(lr=1e30, clip_norm=None, anneal=False, epochs=50, optim="sgd")
    with pytest.raises(mh.Diverged) as caught:
        mh.train(wild, max_bad_steps=3, run_dir=tmp_path / "wild", **common)
    assert caught.value.run is not None
    assert mh.Result(caught.value.run).outcome == "diverged"
