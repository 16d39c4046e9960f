"""The plateau rule: its syntax, and that it lowers when torch's does."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.optim.lr_scheduler import ReduceLROnPlateau

from manyhands.coordinator.plateau import Plateau, PlateauWatch, parse_plateau, resolve
from manyhands.errors import JobError
from manyhands.runs.files import jsonable


@pytest.mark.parametrize(
    ("text", "means"),
    [
        ("", Plateau()),
        ("factor=0.5; patience=3", Plateau(factor=0.5, patience=3)),
        (" watch = train_loss;every=100; ", Plateau(watch="train_loss", every=100)),
        (
            "threshold=0.01; cooldown=2; lowest=0.001; watch=val loss",
            Plateau(threshold=0.01, cooldown=2, lowest=0.001, watch="val loss"),
        ),
    ],
)
def test_words(text: str, means: Plateau) -> None:
    assert parse_plateau(text) == means
    assert parse_plateau(str(means)) == means


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("patence=3", "no 'patence'; did you mean 'patience'\\? There are: factor, patience"),
        ("patience 3", 'plateau "patience 3": an option is NAME=VALUE'),
        ("factor=1", "factor is a number above 0 and below 1"),
        ("factor=0", "factor is a number above 0"),
        ("factor=half", "factor is a number"),
        ("factor=nan", "factor is a number"),
        ("lowest=1.5", "lowest is a number from 0 and below 1"),
        ("patience=0", "patience is a whole number of at least 1"),
        ("patience=-1", "patience is a whole number"),
        ("every=epoch", "every is a whole number of at least 1"),
        ("factor=0.5; factor=0.1", "factor is given twice"),
        ("watch=", "the metric is missing"),
    ],
)
def test_an_error_shows_what_to_write(text: str, complaint: str) -> None:
    with pytest.raises(JobError, match=complaint) as caught:
        parse_plateau(text)
    assert 'plateau="factor=0.5; patience=3"' in str(caught.value)


@pytest.mark.parametrize(
    ("text", "metrics", "watched"),
    [
        ("", ["loss", "accuracy"], "max accuracy"),
        ("", [], "min train_loss"),
        ("watch=loss", ["loss", "accuracy"], "min loss"),
        ("watch=max loss", ["loss", "accuracy"], "max loss"),
        ("watch=train_loss", ["loss", "accuracy"], "min train_loss"),
    ],
)
def test_what_is_watched(text: str, metrics: list[str], watched: str) -> None:
    rule = resolve(parse_plateau(text), monitor="accuracy", metrics=metrics)
    assert rule.watch == watched


@pytest.mark.parametrize(
    ("text", "metrics", "complaint"),
    [
        ("watch=accurcy", ["loss", "accuracy"], "gives loss, accuracy; did you mean 'accuracy'"),
        ("watch=loss", [], "nothing is evaluated"),
        ("every=9; watch=loss", ["loss"], "every=9 is for watch=train_loss; .* eval_every"),
    ],
)
def test_unknown_metrics_are_refused(text: str, metrics: list[str], complaint: str) -> None:
    with pytest.raises(JobError, match=complaint):
        resolve(parse_plateau(text), monitor="accuracy", metrics=metrics)


values = st.lists(
    st.one_of(st.floats(0.01, 2.0), st.sampled_from([0.5, 0.5001, 1.0, math.nan])), max_size=40
)


@settings(max_examples=60)
@given(
    values=values,
    rule=st.builds(
        Plateau,
        factor=st.sampled_from([0.1, 0.5]),
        patience=st.integers(1, 4),
        watch=st.sampled_from(["loss", "accuracy", "min gap", "max gap"]),
        threshold=st.sampled_from([0.0, 1e-4, 0.1]),
        cooldown=st.integers(0, 3),
        lowest=st.sampled_from([0.0, 0.2]),
    ),
    cut=st.integers(0, 40),
)
def test_lowers_when_torch_would(values: list[float], rule: Plateau, cut: int) -> None:
    """torch counts its patience one further. Also when what is known goes through a checkpoint."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    theirs = ReduceLROnPlateau(
        optimizer,
        mode="min" if rule.watch in ("loss", "min gap") else "max",
        factor=rule.factor,
        patience=rule.patience - 1,
        threshold=rule.threshold,
        cooldown=rule.cooldown,
        min_lr=rule.lowest,
        eps=0.0,
    )
    ours = PlateauWatch(rule)
    for number, value in enumerate(values):
        if number == cut:
            ours = PlateauWatch(rule, json.loads(json.dumps(jsonable(ours.state()))))
        before = ours.factor
        why = ours.judge(value)
        theirs.step(value)
        assert ours.factor == optimizer.param_groups[0]["lr"]
        assert bool(why) == (ours.factor < before)


def test_the_reason_is_described() -> None:
    watch = PlateauWatch(Plateau(watch="loss", factor=0.5, patience=2))
    said = [watch.judge(value) for value in (0.5, 0.6, 0.7)]
    assert said == ["", "", "loss has not been better than 0.5 for 2 evaluations"]
    watch = PlateauWatch(Plateau(watch="train_loss", patience=1, every=20))
    assert watch.judge(math.nan) == ("train_loss has not been a number for 1 mean over 20 steps")


def test_a_mean_is_over_samples() -> None:
    watch = PlateauWatch(Plateau(watch="train_loss", patience=1))
    watch.add(1.0, 30)
    watch.add(4.0, 10)
    assert watch.close() == ""
    assert (watch.best, watch.num_steps) == (1.75, 0)


def state(**more: Any) -> dict[str, Any]:
    watch = PlateauWatch(Plateau(watch="loss", patience=1, factor=0.5))
    watch.judge(0.5)
    watch.judge(0.5)
    return {**watch.state(), **more}


def test_a_lowered_rate_stays_under_another_rule() -> None:
    assert PlateauWatch(None, state()).factor == 0.5
    same = PlateauWatch(Plateau(watch="loss"), state())
    other = PlateauWatch(Plateau(watch="accuracy"), state())
    assert (same.factor, same.best) == (0.5, 0.5)
    assert (other.factor, other.best) == (0.5, None)
    old = {key: value for key, value in state().items() if key != "lower"}
    assert PlateauWatch(Plateau(watch="loss"), old).best == 0.5
    assert PlateauWatch(Plateau(watch="max loss"), state()).best is None
    assert math.isnan(PlateauWatch(Plateau(watch="loss"), state(sum=None))._sum)
