"""Files are whole or absent, and JSON never meets what it has no word for."""

from __future__ import annotations

import json
import math
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from manyhands.runs.files import exchange, jsonable, write_json

leaves = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary()
anything = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text() | st.integers(), inner)
    ),
    max_leaves=12,
)


@given(anything)
def test_anything_becomes_json_that_stays_as_it_is(value: Any) -> None:
    once = jsonable(value)
    assert json.loads(json.dumps(once, allow_nan=False)) == once
    assert jsonable(once) == once


def test_values_that_json_lacks() -> None:
    value = {"a": (1, math.nan), 2: [math.inf, True, None], "p": Path("x")}
    assert jsonable(value) == {"a": [1, None], "2": [None, True, None], "p": "PosixPath('x')"}


def test_a_reader_never_sees_half_a_file(tmp_path: Path) -> None:
    path = tmp_path / "it.json"
    write_json(path, {"number": 0, "padding": "x" * 20_000})
    done = threading.Event()

    def write() -> None:
        for number in range(1, 60):
            write_json(path, {"number": number, "padding": "x" * (20_000 - 300 * number)})
        done.set()

    writer = threading.Thread(target=write)
    writer.start()
    seen = []
    while not done.is_set():
        seen.append(json.loads(path.read_text())["number"])
    writer.join(timeout=30)
    assert seen == sorted(seen)
    assert json.loads(path.read_text())["number"] == 59
    assert [p.name for p in tmp_path.iterdir()] == ["it.json"]


def test_a_failed_write_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "it.json"
    write_json(path, {"a": 1})
    (tmp_path / ".it.json.new").mkdir()
    with pytest.raises(OSError):
        write_json(path, {"a": 2})
    assert json.loads(path.read_text()) == {"a": 1}


def test_two_folders_are_exchanged(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    for folder in (one, two):
        folder.mkdir()
        (folder / folder.name).touch()
    exchange(one, two)
    assert [p.name for p in one.iterdir()] == ["two"]
    assert [p.name for p in two.iterdir()] == ["one"]
    with pytest.raises(FileNotFoundError, match="none"):
        exchange(tmp_path / "none", two)
    assert two.exists()
