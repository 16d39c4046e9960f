"""Checks of a loaded job: batches that do not fit, and plateau rules without a metric."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from job_facts import facts

from manyhands.coordinator.batch_scaling import Scaling
from manyhands.coordinator.job_checks import check_job, monitor_note, plan_config_of
from manyhands.coordinator.options import RunOptions
from manyhands.coordinator.plateau import Plateau
from manyhands.errors import JobError, UsageError
from manyhands.strategies.allreduce import AllReduce

OPTIONS = RunOptions("job.py", "allreduce", 2, AllReduce())


def test_a_batch_that_follows_the_workers_has_to_fit_the_data() -> None:
    check_job(facts(), workers=20, scaling=Scaling("linear", reference=2))
    with pytest.raises(UsageError, match="8 for 2 makes a global batch of 104 for 26 workers") as e:
        check_job(facts(), workers=26, scaling=Scaling("linear", reference=2))
    assert "--set batch_size=7" in str(e.value)
    check_job(facts(batch_size=7), workers=26, scaling=Scaling("linear", reference=2))


def test_each_worker_of_the_reference_needs_a_sample() -> None:
    with pytest.raises(UsageError, match=r"batch_size of 8 is for 9 workers.*--set batch_size=9"):
        check_job(facts(), workers=2, scaling=Scaling("sqrt", reference=9))
    with pytest.raises(UsageError, match="9 workers share a global batch of 8"):
        check_job(facts(), workers=9)


def test_a_rule_is_checked_before_anything_is_trained() -> None:
    with pytest.raises(JobError, match="there is no 'patients'"):
        check_job(facts(plateau="patients=3"), workers=1)
    with pytest.raises(JobError, match="'f1' can't be watched"):
        check_job(facts(plateau="watch=f1"), workers=1)


def test_an_ambiguous_metric_needs_a_direction() -> None:
    worst = ("loss", "worst")
    with pytest.raises(
        JobError, match=r'Write  monitor="min worst"  .* monitor="max worst"  if hi'
    ):
        check_job(facts(metrics=worst, monitor="worst"), workers=1)
    with pytest.raises(JobError, match='Write  plateau="patience=2; watch=min worst"  if lower'):
        check_job(facts(metrics=worst, plateau="watch=worst; patience=2"), workers=1)
    stated = facts(metrics=worst, monitor="min worst", plateau="patience=2")
    check_job(stated, workers=1)
    plan_config = plan_config_of(stated, OPTIONS)
    assert str(plan_config.monitor) == "min worst"
    assert plan_config.plateau == Plateau(patience=2, watch="min worst")
    same = plan_config_of(
        replace(stated, fields=replace(stated.fields, plateau="watch=worst")), OPTIONS
    )
    assert same.plateau == Plateau(watch="min worst")
    assert plan_config_of(facts(metrics=("loss", "mae"), monitor="mae"), OPTIONS).monitor.lower
    check_job(facts(metrics=(), monitor="worst"), workers=1)  # nothing is evaluated


def test_a_resumed_run_keeps_its_direction() -> None:
    worst, best = ("loss", "worst"), {"metrics": {"loss": 1.0, "worst": 2.0}, "step": 4}
    for saved, kept in (
        ({"monitor": "min worst", "best": best}, "min worst"),
        ({"best": best}, "max worst"),  # by a version that guessed
    ):
        told = facts(metrics=worst, monitor="worst")
        check_job(told, workers=1, saved=saved)
        monitor = plan_config_of(told, OPTIONS, saved).monitor
        assert str(monitor) == kept
        assert f'chosen by "{kept}"' in monitor_note(monitor, told)
        stated = facts(metrics=worst, monitor="min worst")
        assert str(plan_config_of(stated, OPTIONS, saved).monitor) == "min worst"
    told = facts()
    assert monitor_note(plan_config_of(told, OPTIONS).monitor, told) == ""
    watched = {"rates": {"plateau": {"watch": "worst", "lower": True}}}
    told = facts(metrics=worst, plateau="watch=worst")
    assert plan_config_of(told, OPTIONS, watched).plateau == Plateau(watch="min worst")


def test_the_plan_config_has_the_rules() -> None:
    scaling = Scaling("sqrt", 3)
    told = facts(plateau="patience=2", monitor="accuracy")
    plan_config = plan_config_of(told, replace(OPTIONS, scaling=scaling))
    assert plan_config.scaling == scaling
    assert plan_config.plateau == Plateau(patience=2, watch="max accuracy")
    without = plan_config_of(facts(metrics=(), plateau="patience=2"), OPTIONS)
    assert without.plateau == Plateau(patience=2, watch="min train_loss")
    assert plan_config_of(facts(), OPTIONS).plateau is None


def test_the_plan_config_has_the_length_and_the_interval() -> None:
    by_epochs = plan_config_of(facts(eval_every="3 epochs"), OPTIONS)
    assert (by_epochs.epochs, by_epochs.steps, by_epochs.eval_every) == (2, None, 3)
    by_steps = plan_config_of(facts(epochs=None, steps=50, eval_every="20 steps"), OPTIONS)
    assert (by_steps.steps, by_steps.eval_steps, by_steps.num_steps) == (50, 20, 50)


def test_a_number_of_evaluation_samples_needs_evaluation_data() -> None:
    with pytest.raises(JobError, match=r"eval_samples=5 needs samples.*--set eval_samples=none"):
        check_job(facts(metrics=(), eval_samples=5), workers=1)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"monitor": "f1"}, "monitor is 'f1', and the evaluation gives loss, accuracy"),
        ({"plateau": "watch=f1"}, "'f1' can't be watched: the evaluation gives loss, accuracy"),
    ],
)
def test_names_of_metrics_are_checked_once_they_are_known(
    fields: dict[str, Any], says: str
) -> None:
    complete = facts(**fields)
    early = replace(complete, built=None)
    assert early.metrics is None
    check_job(early, workers=1)
    with pytest.raises(JobError, match=says):
        check_job(complete, workers=1)


def test_the_plan_needs_no_names_of_metrics() -> None:
    complete = facts(plateau="patience=3", monitor="max accuracy")
    early = replace(complete, built=None)
    assert plan_config_of(early, OPTIONS) == plan_config_of(complete, OPTIONS)
