"""What is saved of a script or a notebook: the class, what it uses, and nothing else."""

from __future__ import annotations

import math
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from manyhands.api.job_source import job_source
from manyhands.api.saved_class import literal
from manyhands.errors import JobError
from manyhands.job import Job, load_job

HEAD = """
from dataclasses import dataclass
import manyhands as mh
"""
BODY = """
    def optimizer(self, params): ...
    def data(self): ...
    def loss(self, output, batch): ...
"""
Run = Callable[..., types.ModuleType]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    """Return a function that runs a script as `__main__`, as `python script.py` does."""
    modules, path = set(sys.modules), list(sys.path)

    def run_script(source: str, name: str = "script.py") -> types.ModuleType:
        main = types.ModuleType("__main__")
        file = tmp_path / name
        file.write_text(source)
        main.__file__ = str(file)
        monkeypatch.setitem(sys.modules, "__main__", main)
        monkeypatch.setattr(sys, "path", [str(tmp_path), *path])
        exec(compile(source, file, "exec"), vars(main))
        return main

    yield run_script
    sys.path[:] = path
    for name in set(sys.modules) - modules:
        if name.startswith(("manyhands_job_", "beside_")):
            del sys.modules[name]


def saved(job: Job, folder: Path) -> Job:
    """Save a job, and load it as a worker does."""
    source = job_source(job)
    assert source.file is None
    path = folder / f"saved_{len(list(folder.iterdir()))}.py"
    path.write_text(source.text)
    return load_job(f"{path}:{source.reference}", source.settings)


def refused(job: Job, says: str) -> None:
    with pytest.raises(JobError, match=says):
        job_source(job)


def test_everything_that_the_class_uses_is_saved_and_nothing_else(run: Run, tmp_path: Path) -> None:
    (tmp_path / "beside_it.py").write_text("def doubled(x): return 2 * x\n")
    main = run(
        f"""{HEAD}
import functools
import math as m
from math import floor
from pathlib import Path
import beside_it
from beside_it import doubled

SIZES = {{"small": [1, 2.5, float("inf")], "none": None}}
HERE = Path(__file__).parent
started = object()
ran = []

def decorated(function):
    return function

@functools.cache
def cached(x):
    return doubled(x) + helper(x)

def helper(x):
    return [started for started in (x, 1)][-1] + SIZES["small"][0]

class Base(mh.Job):
    rate = m.pi
    def model(self): return (cached(3), self.rate, HERE, Path(__file__).name, beside_it.doubled(floor(2.5)))

def unused(): return started

@dataclass
class Mine(Base):
    lr: float = 0.1
    @decorated
    def schedule(self, optimizer, num_steps: "int"): return SIZES
{BODY}
ran.append("all of the script")
"""
    )
    job = main.Mine(lr=0.2)
    again = saved(job, tmp_path)
    assert again.model() == job.model() == (8, math.pi, tmp_path, "script.py", 4)
    assert again.schedule(None, 1) == main.SIZES
    assert again.fields() == job.fields() | {"epochs": 1}
    names = set(vars(sys.modules[type(again).__module__]))
    assert {"Base", "Mine", "cached", "helper", "decorated", "SIZES"} <= names
    assert not {"unused", "started", "ran"} & names


def test_values_are_those_of_now(run: Run, tmp_path: Path) -> None:
    main = run(
        f"{HEAD}\nSIZE = 1\n@dataclass\nclass Mine(mh.Job):\n    def model(self): return SIZE\n{BODY}"
    )
    main.SIZE = {"now": (2,)}
    assert saved(main.Mine(), tmp_path).model() == {"now": (2,)}


def test_names_in_annotations_are_saved_where_they_can_be(run: Run, tmp_path: Path) -> None:
    main = run(
        f"""{HEAD}
from fractions import Fraction
handle = open(__file__)
Handle = type("Handle", (), {{}})()
@dataclass
class Mine(mh.Job):
    share: Fraction | None = None
    lr: float = 0.1
    def model(self, handle: Handle = None) -> Handle: ...
{BODY}
handle.close()
"""
    )
    assert saved(main.Mine(lr=0.5), tmp_path).fields()["lr"] == 0.5


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (
            "thing = object()",
            "Mine uses thing, of type object, which can't be saved.*Make it in a method",
        ),
        ("thing = [1, object()]", "Mine uses thing, of type list"),
        ("thing = list(range(100_000))", "Mine uses thing, of type list"),
        ("thing = lambda: 1", "Mine uses thing, of type function"),
        (
            "def inner(): return other\nother = object()\ndef thing(): return inner()",
            "inner uses other",
        ),
    ],
)
def test_what_can_not_be_saved_is_refused_with_what_to_do(run: Run, line: str, says: str) -> None:
    main = run(
        f"{HEAD}\n{line}\n@dataclass\nclass Mine(mh.Job):\n    def model(self): return thing\n{BODY}"
    )
    refused(main.Mine(), says)


def test_a_class_that_no_other_program_can_find_is_refused(run: Run) -> None:
    text = f"@dataclass\nclass Mine(mh.Job):\n    def model(self): ...\n{BODY}"
    inside = text.replace("\n", "\n    ")
    main = run(f"{HEAD}\ndef make():\n    {inside}\n    return Mine()\n")
    refused(main.make(), "Mine is defined inside of make, .* Define it at the top level")
    main = run(f"{HEAD}\nif True:\n    {inside}\n", "conditional.py")
    refused(main.Mine(), "source of Mine can't be found: .*inside of an if")


def test_a_job_of_a_class_that_was_defined_anew_is_refused(run: Run) -> None:
    text = f"{HEAD}\n@dataclass\nclass Mine(mh.Job):\n    def model(self): ...\n{BODY}"
    main = run(f"{text}\njob = Mine()\n{text}")
    refused(main.job, "Mine was defined anew since this job.* make the job anew")
    main = run(f"{text}\n@dataclass\nclass Mine(Mine):\n    lr: float = 0.1\n", "derived.py")
    refused(main.Mine(), "Mine was defined anew .*Give the new class another name")


def test_a_class_typed_at_a_prompt_is_refused(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    main = run(f"{HEAD}\n@dataclass\nclass Mine(mh.Job):\n    def model(self): ...\n{BODY}")
    monkeypatch.delattr(main, "__file__")
    refused(main.Mine(), r'typed at a prompt.* mh.train\("job.py:Mine"\)')


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(),
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.dictionaries(st.text() | st.integers(), inner)
        | st.sets(st.integers())
        | st.frozensets(st.text())
    ),
    max_leaves=8,
)


@given(PLAIN)
def test_plain_values_come_back_equal(value: Any) -> None:
    text = literal(value)
    assert text is not None
    assert repr(eval(text)) == repr(value) or eval(text) == value


def test_values_of_torch_and_paths_come_back_equal() -> None:
    import logging
    import pathlib

    import torch

    names = {"logging": logging, "pathlib": pathlib, "torch": torch}
    values = [torch.bfloat16, torch.device("cuda", 1), Path("a b"), logging.getLogger("x")]
    for value in values:
        text = literal([value])
        assert text is not None
        assert eval(text, names) == [value]
    assert literal(torch.zeros(2)) is None
