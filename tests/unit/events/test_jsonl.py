from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from manyhands.errors import RunFolderError
from manyhands.events import JsonlSink, committed_steps, read_events
from manyhands.events import events as ev
from manyhands.events.jsonl import encode


def write(path: Path, *events: ev.Event) -> None:
    sink = JsonlSink(path)
    for event in events:
        sink.handle(event)
    sink.close()


def strict(line: bytes) -> Any:
    """Parse as any other language would: no NaN, no Infinity."""

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is not JSON")

    return json.loads(line, parse_constant=refuse)


def test_round_trip(
    tmp_path: Path,
    start: list[ev.Event],
    step: Callable[..., ev.StepCommitted],
    finish: Callable[..., ev.RunFinished],
) -> None:
    path = tmp_path / "events.jsonl"
    sent = [*start, step(1), ev.Noticed(message="ümlaut\nand a second line"), finish()]
    write(path, *sent)
    records = list(read_events(path))
    assert [record["event"] for record in records] == [type(event).__name__ for event in sent]
    assert [list(record)[:2] for record in records] == [["time", "event"]] * len(sent)
    back = records[-3]
    assert (back["step"], back["loss"], back["time"]) == (1, 0.25, 1_001.0)
    assert back["shares"]["worker-1"] == [[16, 32]]
    assert records[-2:] == [ev.to_record(event) for event in sent[-2:]]


def test_appends_to_an_existing_file(tmp_path: Path, step: Callable[..., ev.StepCommitted]) -> None:
    path = tmp_path / "events.jsonl"
    write(path, step(1))
    write(path, step(2))
    assert [record["step"] for record in read_events(path)] == [1, 2]


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
def test_values_that_json_lacks(
    tmp_path: Path, loss: float, step: Callable[..., ev.StepCommitted], evaluated: ev.Evaluated
) -> None:
    path = tmp_path / "events.jsonl"
    bad = ev.Evaluated(step=1, epoch=0, samples=1, metrics={"loss": loss}, best=False, seconds=0.1)
    write(path, step(1, loss=loss), bad, evaluated)
    lines = path.read_bytes().splitlines()
    assert isinstance(strict(lines[0])["loss"], str)
    assert isinstance(strict(lines[1])["metrics"]["loss"], str)
    first, second, third = read_events(path)
    assert repr(first["loss"]) == repr(second["metrics"]["loss"]) == repr(loss)
    assert third["metrics"] == {"loss": 0.4321, "accuracy": 0.8765}


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=10,
)


@settings(deadline=None, max_examples=60)
@given(st.dictionaries(st.text(), json_values))
def test_every_record_is_one_line_of_strict_json(record: dict[str, Any]) -> None:
    line = encode(record)
    assert line.endswith(b"\n")
    assert line.count(b"\n") == 1
    assert strict(line).keys() == record.keys()


@pytest.mark.parametrize("torn", [b"{", b'{"time":1,"event":"Noticed"}', b"\0" * 200_000])
def test_a_torn_tail_is_skipped_by_readers_and_cut_by_the_next_writer(
    tmp_path: Path, torn: bytes, step: Callable[..., ev.StepCommitted]
) -> None:
    path = tmp_path / "events.jsonl"
    write(path, step(1))
    with path.open("ab") as file:
        file.write(torn)
    assert [record["step"] for record in read_events(path)] == [1]
    write(path, step(2))
    assert [record["step"] for record in read_events(path)] == [1, 2]
    assert path.read_bytes().count(b"\n") == 2


def test_a_file_that_is_only_a_torn_line_starts_anew(
    tmp_path: Path, step: Callable[..., ev.StepCommitted]
) -> None:
    path = tmp_path / "events.jsonl"
    path.write_bytes(b'{"time":')
    write(path, step(1))
    assert [record["step"] for record in read_events(path)] == [1]


def test_a_damaged_line_in_the_middle_is_named(
    tmp_path: Path, step: Callable[..., ev.StepCommitted]
) -> None:
    path = tmp_path / "events.jsonl"
    write(path, step(1))
    with path.open("ab") as file:
        file.write(b"hello\n")
    write(path, step(2))
    with pytest.raises(RunFolderError, match="line 2, is not an event"):
        list(read_events(path))


def test_a_closed_sink_raises(tmp_path: Path, step: Callable[..., ev.StepCommitted]) -> None:
    sink = JsonlSink(tmp_path / "events.jsonl")
    sink.close()
    sink.close()
    with pytest.raises(ValueError, match="is closed"):
        sink.handle(step(1))


FILL_UP = """
import resource, sys
from manyhands.events import JsonlSink
from manyhands.events.events import Noticed
resource.setrlimit(resource.RLIMIT_FSIZE, (1_000, 1_000))
sink = JsonlSink(sys.argv[1])
try:
    while True:
        sink.handle(Noticed(message="a line of some length"))
except OSError as error:
    print(error.strerror)
"""


def test_a_partial_write_is_truncated(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    done = subprocess.run(
        [sys.executable, "-c", FILL_UP, str(path)], capture_output=True, text=True, timeout=60
    )
    assert done.stdout == "File too large\n", done.stderr
    written = path.read_bytes()
    assert 800 < len(written) < 1_000
    assert written.endswith(b"\n")
    assert len(list(read_events(path))) == written.count(b"\n")


EMIT_FOR_EVER = """
import sys
from manyhands.events import JsonlSink
from manyhands.events.events import Noticed
sink = JsonlSink(sys.argv[1])
number = 0
while True:
    sink.handle(Noticed(message=f"{number} " + "x" * 20_000))
    number += 1
    if number % 10 == 0:
        print(number, flush=True)
"""


def test_sigkill_loses_nothing_that_was_emitted(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    for _ in range(2):  # the second child goes on in the file of the first
        before = len(list(read_events(path))) if path.exists() else 0
        child = subprocess.Popen(
            [sys.executable, "-c", EMIT_FOR_EVER, str(path)], stdout=subprocess.PIPE
        )
        try:
            assert child.stdout is not None
            os.set_blocking(child.stdout.fileno(), False)
            said, deadline = b"", time.monotonic() + 20
            while said.count(b"\n") < 5:
                assert time.monotonic() < deadline, "the child emits nothing"
                said += child.stdout.read() or b""
                time.sleep(0.001)
        finally:
            child.send_signal(signal.SIGKILL)
            child.wait(10)
        said += child.stdout.read() or b""
        child.stdout.close()
        emitted = int(said.splitlines()[-1])
        mine = [record["message"].split()[0] for record in read_events(path)][before:]
        assert len(mine) >= emitted
        assert mine == [str(number) for number in range(len(mine))]


def test_steps_after_the_resumed_one_are_void() -> None:
    def committed(step: int, loss: float) -> dict[str, Any]:
        return {"event": "StepCommitted", "step": step, "loss": loss}

    first = [committed(step, 1.0) for step in (1, 2, 3, 4)]
    second = [committed(step, 2.0) for step in (3, 4)]
    third = [committed(step, 3.0) for step in (4, 5)]
    two, three = ({"event": "Resumed", "step": step} for step in (2, 3))
    history = committed_steps([*first, two, *second, three, *third, {"event": "RunFinished"}])
    assert [(record["step"], record["loss"]) for record in history] == [
        (1, 1.0),
        (2, 1.0),
        (3, 2.0),
        (4, 3.0),
        (5, 3.0),
    ]


@settings(deadline=None, max_examples=60)
@given(st.lists(st.tuples(st.integers(0, 12), st.integers(0, 8)), max_size=8))
def test_each_step_counts_once_from_the_last_start(
    attempts: list[tuple[int, int]],
) -> None:
    """Attempts: resume at (at most) a step, then go on for some steps and die."""
    records: list[dict[str, Any]] = []
    last_doer: dict[int, int] = {}
    reached = 0
    for attempt, (wanted, num_steps) in enumerate(attempts):
        begin = min(wanted, reached)
        records.append({"event": "Resumed", "step": begin})
        reached = begin + num_steps
        for step in range(begin + 1, reached + 1):
            records.append({"event": "StepCommitted", "step": step, "by": attempt})
            last_doer[step] = attempt
    history = committed_steps(records)
    assert [record["step"] for record in history] == list(range(1, reached + 1))
    assert [record["by"] for record in history] == [last_doer[s] for s in range(1, reached + 1)]


def test_steps_are_sorted() -> None:
    def committed(*steps: int) -> list[dict[str, object]]:
        return [{"event": "StepCommitted", "step": step} for step in steps]

    records = [*committed(2, 1, 4), {"event": "Resumed", "step": 2}, *committed(4, 3)]
    assert [record["step"] for record in committed_steps(records)] == [1, 2, 3, 4]
