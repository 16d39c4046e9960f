"""Steps or epochs: what is typed wins over the job file, and what is typed last over what was before."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from manyhands.errors import JobError, UsageError
from manyhands.job import Job, load_job
from manyhands.job_length import (
    EPOCHS,
    STEPS,
    is_interval,
    length_of,
    merge_settings,
    parse_interval,
    source_of,
    total_steps,
)

JOB = """
from dataclasses import dataclass
import manyhands as mh

@dataclass
class Mine(mh.Job):
    {fields}

    def model(self): ...
    def optimizer(self, params): ...
    def data(self): ...
    def loss(self, output, batch): ...
"""


def load(folder: Path, fields: str, **settings: str) -> Job:
    path = folder / f"job_{abs(hash(fields))}.py"
    path.write_text(JOB.format(fields=fields))
    return load_job(str(path), settings)


@pytest.mark.parametrize(
    ("fields", "settings", "steps", "epochs"),
    [
        ("", {}, None, 1),
        ("epochs: int = 20", {}, None, 20),
        ("steps: int = 500", {}, 500, None),
        ("epochs: int = 20", {"steps": "500"}, 500, None),
        ("steps: int = 500", {"epochs": "3"}, None, 3),
        ("steps: int = 500", {"epochs": "none"}, 500, None),
        ("epochs: int = 20", {"epochs": "none"}, None, 1),
        ("epochs: int = 20", {"steps": "none"}, None, 20),
        ("steps: int = 500\n    epochs: int = 20", {"steps": "7"}, 7, None),
    ],
)
def test_one_length_is_left(
    tmp_path: Path, fields: str, settings: dict[str, str], steps: int | None, epochs: int | None
) -> None:
    job = load(tmp_path, fields, **settings)
    assert (job.steps, job.epochs) == (steps, epochs)


def test_two_lengths_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError) as typed:
        load(tmp_path, "", steps="500", epochs="3")
    assert str(typed.value) == (
        "--set steps=500 --set epochs=3: training ends after a number of steps or of epochs. Type one of "
        "them:  --set steps=500"
    )
    with pytest.raises(JobError, match="Mine has steps=500 and epochs=20: training ends") as both:
        load(tmp_path, "steps: int = 500\n    epochs: int = 20")
    assert str(both.value).endswith("(epochs: int | None = None), or choose:  --set steps=500")


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("steps", "0", "steps must be a whole number of at least 1, or None, and is 0"),
        ("steps", "many", "--set steps=many: steps is a whole number"),
        ("eval_samples", "0", "eval_samples must be a whole number of at least 1, or None, and is"),
        ("eval_every", "50 meters", "a text: \"200 steps\", and is '50 meters'"),
        ("eval_every", "0 steps", "eval_every must be"),
        ("eval_every", "-1", "eval_every must be"),
        ("eval_every", "1.5", "eval_every must be"),
    ],
)
def test_wrong_values_are_refused(tmp_path: Path, name: str, text: str, says: str) -> None:
    with pytest.raises(UsageError) as caught:
        load(tmp_path, "", **{name: text})
    assert says in str(caught.value)


def test_an_interval_may_be_set_where_a_job_declares_a_number(tmp_path: Path) -> None:
    job = load(tmp_path, "eval_every: int = 2", eval_every="50 steps")
    assert job.eval_every == "50 steps"
    assert load(tmp_path, "eval_every: int = 2", eval_every="3").eval_every == 3


@pytest.mark.parametrize(
    ("value", "parsed"),
    [
        (1, (1, EPOCHS)),
        ("3", (3, EPOCHS)),
        ("2 epochs", (2, EPOCHS)),
        ("1 epoch", (1, EPOCHS)),
        ("200 steps", (200, STEPS)),
        (" 1 Step ", (1, STEPS)),
        ("007steps", (7, STEPS)),
    ],
)
def test_intervals(value: Any, parsed: tuple[int, str]) -> None:
    assert parse_interval(value) == parsed


@pytest.mark.parametrize("value", [0, -1, 1.0, True, None, "", "steps", "0 steps", "5 s", [1]])
def test_values_that_are_no_intervals(value: object) -> None:
    assert not is_interval(value)


def test_a_resumed_run_has_the_length_that_was_typed_last() -> None:
    before = {"epochs": "5", "lr": "0.1"}
    assert merge_settings(before, {"steps": "9"}) == {"lr": "0.1", "steps": "9"}
    assert merge_settings(before, {"epochs": "9"}) == {"lr": "0.1", "epochs": "9"}
    assert merge_settings(before, {"lr": "1"}) == {"epochs": "5", "lr": "1"}


def test_the_source_of_a_value() -> None:
    assert source_of("lr", {"lr": "1"}) == "--set"
    assert source_of("lr", {"steps": "1"}) == "job file"
    assert source_of("epochs", {"steps": "1"}) == "--set steps"
    assert source_of("steps", {"epochs": "1"}) == "--set epochs"
    assert source_of("epochs", {}) == "job file"


def test_the_number_of_steps() -> None:
    assert total_steps(Job(batch_size=4, epochs=3), 10) == 9
    assert total_steps(Job(batch_size=4), 10) == 3
    assert total_steps(Job(batch_size=4, steps=7), 10) == 7


def test_the_length_of_a_run_is_that_of_its_config() -> None:
    """Also of a run of a version that had only epochs."""
    assert length_of({}) == EPOCHS
    assert length_of({"fields": {"epochs": {"value": 3}}}) == EPOCHS
    assert length_of({"fields": {"steps": {"value": None}}}) == EPOCHS
    assert length_of({"fields": {"steps": {"value": 9}, "epochs": {"value": None}}}) == STEPS
