"""Targets: which evaluation reaches one, and which targets are refused before training."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import pytest
from job_facts import facts

from manyhands.coordinator.job_checks import check_job
from manyhands.coordinator.metric_monitor import LOSS, Monitor
from manyhands.coordinator.target import Target, TargetWatch, target_of, target_text
from manyhands.coordinator.training_clock import TrainingTimes
from manyhands.errors import JobError, UsageError
from manyhands.events.events import Evaluated

ACCURACY = Monitor("accuracy", lower=False)


def evaluated(step: int, **metrics: float) -> Evaluated:
    return Evaluated(step=step, epoch=step // 10, samples=31, metrics=metrics, best=True, seconds=1)


def watching(target: Target, saved: dict[str, Any] | None = None) -> TargetWatch:
    watch = TargetWatch(saved)
    watch.target = target
    return watch


@pytest.mark.parametrize("text", ["accuracy", "=0.9", "accuracy=", "accuracy=high", "a=nan"])
def test_what_is_no_target(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        target_text(text)


def test_a_target_is_kept_as_typed() -> None:
    assert target_text(" accuracy = 0.97 ") == "accuracy=0.97"
    assert target_text("min bits=per=byte=1e-2") == "min bits=per=byte=1e-2"


@pytest.mark.parametrize(
    ("target", "met", "missed"),
    [
        (Target(ACCURACY, 0.9), [0.9, 0.95], [0.89, math.nan]),
        (Target(LOSS, 0.5), [0.5, 0.1], [0.51, math.nan, math.inf]),
    ],
)
def test_a_value_as_good_as_the_target_meets_it(
    target: Target, met: list[float], missed: list[float]
) -> None:
    assert all(target.is_met(value) for value in met)
    assert not any(target.is_met(value) for value in missed)


def test_the_first_evaluation_that_meets_it_reaches_it() -> None:
    watch, times = watching(Target(ACCURACY, 0.9)), TrainingTimes(7.5, 2.0, 0.5)
    assert watch.add(evaluated(10, accuracy=0.8), samples=80, times=times) is None
    reached = watch.add(evaluated(20, accuracy=0.92), samples=160, times=times)
    assert reached is not None
    assert (reached.step, reached.epoch, reached.samples) == (20, 2, 160)
    assert (reached.metric, reached.value, reached.target) == ("accuracy", 0.92, 0.9)
    assert (reached.time_to_target_s, reached.startup_s, reached.evaluation_s) == (7.5, 2.0, 0.5)
    assert watch.add(evaluated(30, accuracy=0.99), samples=240, times=times) is None
    assert watch.reached is reached


def test_without_a_target_nothing_reaches_it() -> None:
    watch = TargetWatch()
    assert watch.add(evaluated(1, loss=0.0), samples=1, times=None) is None
    assert watch.metric is None


def test_all_members_that_start_again_know_what_was_reached() -> None:
    watch = watching(Target(ACCURACY, 0.9))
    reached = watch.add(evaluated(20, accuracy=0.92), samples=160, times=None)
    saved = {"step": 20, **watch.state()}
    assert TargetWatch(saved, before=watch).reached is reached
    earlier = TargetWatch({"step": 10}, before=watch)
    assert (earlier.target, earlier.reached) == (watch.target, None)


def test_a_resumed_run_refuses_a_target_that_it_has_reached() -> None:
    told = facts()
    watch = TargetWatch()
    for step, accuracy in ((10, 0.8), (20, 0.95), (30, math.nan), (40, 0.9)):
        watch.add(evaluated(step, accuracy=accuracy), samples=0, times=None)
    saved = json.loads(json.dumps({"step": 40, **watch.state()}))
    with pytest.raises(
        UsageError, match=r"--target accuracy=0.94: .* step 40 has reached 0.95 alr"
    ):
        target_of("accuracy=0.94", told, monitor=LOSS, saved=saved)
    assert target_of("accuracy=0.96", told, monitor=LOSS, saved=saved).value == 0.96
    assert target_of("min accuracy=0.7", told, monitor=LOSS, saved=saved).metric.lower
    with pytest.raises(UsageError, match=r"has reached 0.8 already"):
        target_of("min accuracy=0.85", told, monitor=LOSS, saved=saved)


def test_an_older_run_knows_its_best_and_its_last_evaluation() -> None:
    best = {"metrics": {"loss": 0.5, "accuracy": 0.7}, "step": 10, "waited": 1}
    saved = {"step": 20, "best": best, "last_metrics": {"loss": None, "accuracy": 0.8}}
    watch = TargetWatch(saved)
    assert watch.best(LOSS) == 0.5
    assert watch.best(ACCURACY) == 0.8
    assert TargetWatch({"step": 2, "best": {"metrics": None, "step": 0}}).best(LOSS) is None


def test_the_direction_is_that_of_the_monitor_or_of_the_name() -> None:
    told, monitor = (
        facts(metrics=("loss", "worst"), monitor="max worst"),
        Monitor("worst", lower=False),
    )
    assert target_of("worst=3", told, monitor=monitor).metric == monitor
    assert target_of("min worst=3", told, monitor=monitor).metric == Monitor("worst", lower=True)
    with pytest.raises(JobError) as caught:
        target_of("worst=3", told, monitor=LOSS)
    assert str(caught.value) == (
        '--target "worst=3": the name does not show whether lower or higher is better. Write  '
        '--target "min worst=3"  if lower is better,  --target "max worst=3"  if higher is.'
    )


def test_a_target_needs_a_metric_that_is_evaluated() -> None:
    with pytest.raises(UsageError) as caught:
        check_job(facts(), workers=1, target="acuracy=0.97")
    assert str(caught.value) == (
        "--target acuracy=0.97: the evaluation gives loss, accuracy; did you mean 'accuracy'? Type  "
        "--target accuracy=NUMBER  or return 'acuracy' from metrics()."
    )
    with pytest.raises(UsageError, match=r"eval_data\(\) returns no data.*leave --target out"):
        check_job(facts(metrics=()), workers=1, target="accuracy=0.97")
    unknown = replace(facts(metrics=("loss",)), built=None)
    check_job(unknown, workers=1, target="accuracy=0.97")  # checked again when they are known
