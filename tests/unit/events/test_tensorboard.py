from __future__ import annotations

import dataclasses
import logging
import math
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from manyhands.events import TensorBoardSink
from manyhands.events import events as ev

RESUMED = ev.Resumed(time=2_000.0, step=3, epoch=0, checkpoint="checkpoints/step-3", workers=2)


def read(folder: Path) -> EventAccumulator:
    accumulator = EventAccumulator(str(folder))
    accumulator.Reload()
    return accumulator


def test_tags_and_values_read_back(
    tmp_path: Path,
    start: list[ev.Event],
    step: Callable[..., ev.StepCommitted],
    evaluated: ev.Evaluated,
) -> None:
    sink = TensorBoardSink(tmp_path / "tb")
    saved = ev.CheckpointSaved(
        step=10, path="checkpoints/step-10", bytes=5, stall_s=0.125, write_s=1.0
    )
    steps = [step(number, loss=1 / number) for number in range(1, 11)]
    lower = ev.RateChanged(
        step=7, factor=0.5, over=0, batch_size=64, steps=20, reason="it gets no better"
    )
    for event in [*start, *steps, evaluated, lower, saved]:
        sink.handle(event)
    sink.close()
    sink.close()
    board = read(tmp_path / "tb")
    assert set(board.Tags()["scalars"]) == {
        "train/loss",
        "train/lr",
        "train/samples_per_s",
        "time/step_s",
        "time/compute_s",
        "time/wait_s",
        "comm/bytes_sent",
        "eval/loss",
        "eval/accuracy",
        "checkpoint/stall_s",
        "train/lr_factor",
        "train/batch_size",
    }
    assert [(p.step, p.value) for p in board.Scalars("train/lr_factor")] == [(7, 0.5)]
    assert [(p.step, p.value) for p in board.Scalars("train/batch_size")] == [(7, 64.0)]
    loss = board.Scalars("train/loss")
    assert [(point.step, point.wall_time) for point in loss] == [
        (number, 1_000.0 + number) for number in range(1, 11)
    ]
    assert [point.value for point in loss] == pytest.approx([1 / n for n in range(1, 11)])
    assert board.Scalars("train/samples_per_s")[0].value == pytest.approx(32 / 0.02)
    assert board.Scalars("comm/bytes_sent")[0].value == 1_000
    (accuracy,) = board.Scalars("eval/accuracy")
    assert (accuracy.step, accuracy.wall_time) == (10, 1_010.5)
    assert accuracy.value == pytest.approx(0.8765)
    assert board.Scalars("checkpoint/stall_s")[0].value == pytest.approx(0.125)
    (text,) = board.Tensors("run")
    said = text.tensor_proto.string_val[0].decode()
    assert "| strategy | allreduce |" in said
    assert "| torch | 2.11.0 |" in said


def test_which_part_of_the_time_members_compute_and_wait(
    tmp_path: Path, start: list[ev.Event]
) -> None:
    sink = TensorBoardSink(tmp_path / "tb")
    some = ev.MemberTimes(
        step=10,
        seconds=2.0,
        members={
            "worker-0": (5, 40, 1.0, 0.5, "worker-1", 7, None, "training"),
            "worker-1": (5, 40, 1.8, None, None, 7, None, "training"),
            "server-0": (5, None, 0.1, 1.9, None, None, None, "serving"),
        },
        others={},
    )
    rest: ev.MembersSummary = {"members": 2, "compute_s": (0.2, 0.4, 0.6), "wait_s": None}
    nothing = {"worker-0": (0, 0, None, None, None, 0, None, "evaluating")}
    for event in [
        *start,
        some,
        dataclasses.replace(some, step=20, others={"workers": rest, "servers": {"members": 1}}),
        dataclasses.replace(some, step=30, members=nothing),
    ]:
        sink.handle(event)
    sink.close()
    board = read(tmp_path / "tb")
    for tag, values in {
        "members/computing_min": [0.5, 0.1],
        "members/computing_mean": [0.7, 0.45],
        "members/computing_max": [0.9, 0.9],
        "members/waiting_min": [0.25, 0.25],
        "members/waiting_mean": [0.25, 0.25],
        "members/waiting_max": [0.25, 0.25],
    }.items():
        assert [point.step for point in board.Scalars(tag)] == [10, 20]
        assert [point.value for point in board.Scalars(tag)] == pytest.approx(values), tag


def test_a_tag_says_its_unit_and_rule(
    tmp_path: Path, start: list[ev.Event], step: Callable[..., ev.StepCommitted]
) -> None:
    tokens = {"unit": "tokens", "rule": "sum", "help": "of the batch"}
    ready = [
        dataclasses.replace(event, measures={"tokens": tokens})
        if isinstance(event, ev.MemberReady)
        else event
        for event in start
    ]
    steps = [
        dataclasses.replace(step(number), measures={"tokens": 100.0 * number, "penalty": 0.5})
        for number in (1, 2)
    ]
    sink = TensorBoardSink(tmp_path)
    for event in [*ready, *steps]:
        sink.handle(event)
    sink.close()
    board = read(tmp_path)
    assert [point.value for point in board.Scalars("train/tokens")] == [100.0, 200.0]
    assert [point.value for point in board.Scalars("train/penalty")] == [0.5, 0.5]
    described = {
        tag: board.SummaryMetadata(tag).summary_description
        for tag in ("train/tokens", "time/compute_s", "comm/bytes_sent")
    }
    assert described == {
        "train/tokens": "sum, in tokens: of the batch",
        "time/compute_s": "mean, in s: computing, over workers",
        "comm/bytes_sent": "sum, in bytes: sent by all members",
    }


def test_a_resumed_run_shows_no_step_twice(
    tmp_path: Path,
    start: list[ev.Event],
    step: Callable[..., ev.StepCommitted],
) -> None:
    first = TensorBoardSink(tmp_path)
    for event in [*start, *(step(number, loss=1.0) for number in range(1, 6))]:
        first.handle(event)
    first.close()
    second = TensorBoardSink(tmp_path)
    resumed = [*start[:-1], RESUMED, start[-1]]
    for event in [*resumed, *(step(number, loss=2.0) for number in range(4, 8))]:
        second.handle(event)
    second.close()
    assert len(list(tmp_path.glob("events.out.tfevents.*"))) == 2
    board = read(tmp_path)
    points = [(point.step, point.value) for point in board.Scalars("train/loss")]
    assert points == [(1, 1.0), (2, 1.0), (3, 1.0), (4, 2.0), (5, 2.0), (6, 2.0), (7, 2.0)]
    assert [point.step for point in board.Tensors("run")] == [0, 3]


def test_resuming_within_one_process_discards_later_steps(
    tmp_path: Path, step: Callable[..., ev.StepCommitted]
) -> None:
    sink = TensorBoardSink(tmp_path)
    for event in [step(3, 1.0), step(4, 1.0), step(5, 1.0), RESUMED, step(4, 2.0)]:
        sink.handle(event)
    sink.close()
    points = [(point.step, point.value) for point in read(tmp_path).Scalars("train/loss")]
    assert points == [(3, 1.0), (4, 2.0)]


def test_nan_and_a_step_without_time(tmp_path: Path, step: Callable[..., ev.StepCommitted]) -> None:
    no_time = dataclasses.replace(step(1, loss=math.nan), step_s=0.0)
    sink = TensorBoardSink(tmp_path)
    sink.handle(no_time)
    sink.close()
    board = read(tmp_path)
    assert math.isnan(board.Scalars("train/loss")[0].value)
    assert "train/samples_per_s" not in board.Tags()["scalars"]


def test_points_are_on_disk_during_the_run(
    tmp_path: Path, step: Callable[..., ev.StepCommitted], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("manyhands.events.tensorboard.FLUSH_EVERY_S", 0.05)
    sink = TensorBoardSink(tmp_path)
    sink.handle(step(1))
    deadline = time.monotonic() + 10
    while "train/loss" not in read(tmp_path).Tags()["scalars"]:
        assert time.monotonic() < deadline, "nothing was flushed"
        time.sleep(0.05)
    sink.close()


def test_without_tensorboard_one_notice_and_then_nothing(
    tmp_path: Path,
    start: list[ev.Event],
    step: Callable[..., ev.StepCommitted],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    for name in list(sys.modules):
        if name.split(".")[0] == "tensorboard":
            monkeypatch.setitem(sys.modules, name, None)
    sink = TensorBoardSink(tmp_path / "tb")
    with caplog.at_level(logging.WARNING, logger="manyhands.events"):
        for event in [*start, step(1), step(2)]:
            sink.handle(event)
        sink.close()
    (notice,) = caplog.messages
    assert "pip install tensorboard" in notice
    assert not (tmp_path / "tb").exists()


def test_sinks_need_no_torch_and_import_tensorboard_and_rich_late(tmp_path: Path) -> None:
    script = f"""
import sys
from manyhands.events import TensorBoardSink, make_console
from manyhands.events.events import Noticed
make_console().handle(Noticed(message="x"))
assert not {{"tensorboard", "rich"}} & set(sys.modules), "imported too early"
sink = TensorBoardSink({str(tmp_path)!r})
sink.handle(Noticed(message="x"))
sink.close()
assert "tensorboard" in sys.modules
assert "torch" not in sys.modules
"""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", script], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "note: x\n"


def test_staleness_by_step_and_its_histogram(
    tmp_path: Path, start: list[ev.Event], step: Callable[..., ev.StepCommitted]
) -> None:
    sink = TensorBoardSink(tmp_path / "tb")
    summary = {"steps": 2, "staleness": {"histogram": {"0": 1200, "1": 0, "2-3": 4}}}
    end = ev.RunFinished(outcome="finished", summary=summary, resume_command=None)
    for event in [*start, dataclasses.replace(step(1), staleness=1.5), step(2), end]:
        sink.handle(event)
    sink.close()
    board = read(tmp_path / "tb")
    assert [(s.step, s.value) for s in board.Scalars("train/staleness")] == [(1, 1.5)]
    (told,) = board.Tensors("staleness")
    text = told.tensor_proto.string_val[0].decode()
    assert "| 0 | 1,200 |" in text
    assert "| 2-3 | 4 |" in text
