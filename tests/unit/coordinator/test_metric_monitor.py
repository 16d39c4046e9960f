"""Which metrics are better when lower, and which names are ambiguous."""

from __future__ import annotations

import pytest

from manyhands.coordinator.metric_monitor import (
    HIGHER,
    LOWER,
    lower_is_better,
    metric_name,
    read_monitor,
)
from manyhands.errors import JobError

OPTION = 'monitor="{}"'


@pytest.mark.parametrize(
    "name",
    [
        *sorted(LOWER),
        *(
            "val_loss",
            "valLoss",
            "Perplexity",
            "RMSE",
            "bits_per_byte",
            "token error rate",
            "top5_error",
        ),
        *("cross_entropy", "val/cross_entropy", "loss_val", "reconstruction_error", "brier_score"),
    ],
)
def test_lower_is_better(name: str) -> None:
    assert lower_is_better(name) is True
    assert str(read_monitor(name, option=OPTION)) == f"min {name}"


@pytest.mark.parametrize(
    "name",
    [
        *sorted(HIGHER),
        *(
            "top5",
            "top1_accuracy",
            "accuracy_top1",
            "Acc@1",
            "recall@5",
            "hits_at_10",
            "mAP",
            "f1_score",
        ),
        *("macro F1", "val_roc_auc", "topAccuracy", "log_likelihood"),
    ],
)
def test_higher_is_better(name: str) -> None:
    assert lower_is_better(name) is False
    assert str(read_monitor(name, option=OPTION)) == f"max {name}"


@pytest.mark.parametrize(
    "name",
    [
        *(
            "worst",
            "score",
            "val",
            "gap",
            "entropy",
            "",
            "top",
            "5",
            "glossary",
            "samples_per_s",
            "lossy",
        ),
        *("accuracy_loss", "accuracy_gap", "loss_scale", "error_reduction", "recall_error"),
        *(
            "neg_mean_squared_error",
            "negative_log_likelihood",
            "minus auc",
            "-auc",
            "1-auc",
            "1 - auc",
        ),
    ],
)
def test_ambiguous_names(name: str) -> None:
    assert lower_is_better(name) is None
    with pytest.raises(JobError) as caught:
        read_monitor(name, option=OPTION)
    assert f'Write  monitor="min {name}"  if lower is better,' in str(caught.value)
    assert f'monitor="max {name}"  if higher is.' in str(caught.value)
    assert not LOWER & HIGHER


def test_a_stated_direction_counts() -> None:
    assert str(read_monitor(" min  worst case ", option=OPTION)) == "min worst case"
    assert read_monitor("max loss", option=OPTION).lower is False
    assert (metric_name("max auc"), metric_name("auc"), metric_name("min")) == ("auc", "auc", "min")
