"""What only shows when the job is loaded: batches that don't fit, and a plateau rule of nothing."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from manyhands.errors import JobError, UsageError
from manyhands.train.facts import check_job, syllabus_of
from manyhands.train.options import Options
from manyhands.train.plateau import Plateau
from manyhands.train.scaling import Scaling

OPTIONS = Options("job.py", "allreduce", 2)


def facts(*, metrics: tuple[str, ...] = ("loss", "accuracy"), **fields: Any) -> dict[str, Any]:
    given = {"batch_size": 8, "monitor": "loss", "patience": None, "plateau": None, "epochs": 2}
    return {
        "fields": {**given, "eval_every": 1, **fields},
        "train_samples": 100,
        "eval_samples": 10 if metrics else 0,
        "metrics": list(metrics),
    }


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


def test_the_syllabus_has_the_rules() -> None:
    scaling = Scaling("sqrt", 3)
    told = facts(plateau="patience=2", monitor="accuracy")
    syllabus = syllabus_of(told, replace(OPTIONS, scaling=scaling))
    assert syllabus.scaling == scaling
    assert syllabus.plateau == Plateau(patience=2, watch="accuracy")
    without = syllabus_of(facts(metrics=(), plateau="patience=2"), OPTIONS)
    assert without.plateau == Plateau(patience=2, watch="train_loss")
    assert syllabus_of(facts(), OPTIONS).plateau is None
