"""What `manyhands scale` prints while it waits, and when it stops waiting."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from manyhands.cli.scale import _events, _wait
from manyhands.errors import UsageError
from manyhands.events.units import plural
from manyhands.runs.folder import EVENTS, RunFolder

SLOT = "2 workers will start as soon as there are free slots"


def view(*workers: str) -> dict[str, Any]:
    return {"event": "ViewChanged", "members": list(workers), "servers": 0}


def noticed(message: str) -> dict[str, Any]:
    return {"event": "Noticed", "message": message}


def answered(workers: int, *, why: str = "") -> dict[str, Any]:
    message = f"asked for {plural(workers, 'worker')}" + (f", and refused: {why}" if why else "")
    return {"event": "ScaleAnswered", "workers": workers, "accepted": not why, "message": message}


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    first = json.dumps(view("worker-0", "worker-1"), separators=(",", ":"))
    (tmp_path / EVENTS).write_text(first + "\n")
    return RunFolder(tmp_path)


def test_missing_slots_are_reported_once(
    run: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    before = noticed("another worker will start as soon as there are free slots")
    news = [view("a", "b"), before, answered(4), noticed(SLOT)]
    assert _wait(run, 4, iter([*news, view("a", "b", "c", "d")])) == 0
    assert capsys.readouterr().out.splitlines() == [
        "asked for 4 workers",
        SLOT,
        "4 workers: a, b, c, d",
    ]


def test_a_later_request_replaces_ours(run: RunFolder) -> None:
    news = [answered(5), view("a", "b", "c"), answered(1)]
    with pytest.raises(UsageError, match="request for 5 workers was replaced: asked for 1 worker"):
        _wait(run, 5, iter(news))


def test_earlier_requests_are_ignored(run: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    news = [
        view("a", "b"),
        answered(99, why="they would share a global batch of 64"),
        noticed("a process on host-1 (10.0.0.2) was refused: it has another key"),
        answered(2),
    ]
    assert _wait(run, 2, iter(news)) == 0  # there are two already
    assert capsys.readouterr().out.splitlines() == ["asked for 2 workers", "2 workers: a, b"]


def test_the_result_is_printed_even_if_it_was_reached_before_reading(
    run: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    """With fewer workers, the new view may be in the file before the answer is read."""
    news = _events(run.path / EVENTS)
    with open(run.path / EVENTS, "a") as file:
        for event in (answered(1), view("worker-0")):
            file.write(json.dumps(event, separators=(",", ":")) + "\n")
    assert _wait(run, 1, news) == 0
    assert capsys.readouterr().out.splitlines() == ["asked for 1 worker", "1 worker: worker-0"]


def test_a_view_before_the_answer_counts_once_answered(
    run: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    news = [view("a", "b"), view("a", "b", "c"), answered(3)]
    assert _wait(run, 3, iter(news)) == 0
    assert capsys.readouterr().out.splitlines() == ["asked for 3 workers", "3 workers: a, b, c"]


def test_a_refused_request_is_an_error(run: RunFolder) -> None:
    with pytest.raises(UsageError, match="and refused: there is only one"):
        _wait(run, 9, iter([answered(9, why="there is only one")]))
