"""What a training is given as a job becomes a file and texts, from which the workers build an equal job."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from manyhands.api.job_source import given_settings, job_source, settings_of
from manyhands.errors import JobError, UsageError
from manyhands.job import Job, load_job, make_job
from manyhands.testing.jobs import Regression


@dataclass
class Fields(Job):
    """Fields of each kind."""

    lr: float = 0.1
    name: str = "x"
    fast: bool = False
    decay: float | None = None
    folder: Path = Path("here")
    widths: list[int] = field(default_factory=lambda: [1, 2])
    betas: tuple[float, float] = (0.9, 0.99)
    sizes: dict[str, Any] = field(default_factory=dict)
    anything: Any = None
    device: torch.device | None = None
    half: float = field(init=False, default=0.0)

    def __post_init__(self) -> None:
        self.half = self.lr / 2
        self.note = "made from the fields"

    def model(self) -> Any: ...
    def optimizer(self, params: Any) -> Any: ...
    def data(self) -> Any: ...
    def loss(self, output: Any, batch: Any) -> Any: ...


@dataclass
class Doubled(Fields):
    def __post_init__(self) -> None:
        super().__post_init__()
        self.lr *= 2


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"lr": 1 / 3, "batch_size": 7},
        {"lr": float("inf")},
        {"lr": 1},
        {"name": "a 'quoted' text\nof two lines", "fast": True},
        {"name": ""},
        {"decay": 0.5, "folder": Path("/elsewhere")},
        {"widths": [3], "betas": (0.1, 0.2), "sizes": {"a": [1, None]}},
        {"anything": {"x": (1, 2.5)}},
        {"anything": "text"},
        {"anything": True},
        {"steps": 5, "eval_every": "2 steps"},
    ],
)
def test_the_fields_of_an_instance_reach_the_workers(given: dict[str, Any]) -> None:
    job = Fields(**given)
    settings = settings_of(job)
    assert settings.keys() == given.keys()
    built = make_job(Fields, settings, source="here")
    length = {"epochs": built.epochs}  # 1, where neither is given
    assert built.fields() == job.fields() | length
    assert [type(built.fields()[name]) for name in given if name != "lr"] == [
        type(value) for name, value in given.items() if name != "lr"
    ]


def test_a_length_replaces_the_other_one_of_the_class() -> None:
    settings = settings_of(Regression(steps=5))
    assert make_job(Regression, settings, source="here").epochs is None


@pytest.mark.parametrize(
    ("job", "says"),
    [
        (Fields(device=torch.device("cpu")), "can't be given this device as a field"),
        (Fields(anything=object()), "can't be given this object as a field"),
        (Fields(widths=(1, 2)), "can't be given this tuple as a field .*widths is written as"),
        (Doubled(lr=0.5), "has lr=1.0 here, and would have lr=2.0 in the workers: __post_init__"),
    ],
)
def test_a_field_that_would_not_reach_them_is_refused(job: Job, says: str) -> None:
    with pytest.raises(JobError, match=says):
        settings_of(job)


def test_what_is_set_by_hand_is_refused() -> None:
    job = Fields()
    job.extra = 3  # type: ignore[attr-defined]
    with pytest.raises(JobError, match=r"would not have extra, .* Declare it.*  extra: int = "):
        settings_of(job)


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A package without __init__.py, whose job imports its neighbour."""
    folder = tmp_path / "mhtested" / "jobs"
    folder.mkdir(parents=True)
    (folder / "net.py").write_text("SIZE = 3\n")
    (folder / "one.py").write_text(
        "from dataclasses import dataclass\nimport manyhands as mh\nfrom mhtested.jobs.net import SIZE\n"
        "@dataclass\nclass One(mh.Job):\n    lr: float = 0.1\n    def model(self): return SIZE\n"
        "    def optimizer(self, params): ...\n    def data(self): ...\n"
        "    def loss(self, output, batch): ...\nOther = One\n"
    )
    path, modules = list(sys.path), set(sys.modules)
    sys.path.insert(0, str(tmp_path))
    yield tmp_path
    sys.path[:] = path
    for name in set(sys.modules) - modules:
        if name.startswith(("mhtested", "manyhands_job_")):
            del sys.modules[name]


def test_a_class_of_a_file_is_found_by_its_file(package: Path) -> None:
    one = importlib.import_module("mhtested.jobs.one")
    source = job_source(one.One(lr=0.5))
    assert source.file is not None
    assert (source.title, source.settings) == ("One", {"lr": "0.5"})
    assert source.reference == f"{package}/./mhtested/jobs/one.py:One"
    assert isinstance(load_job(source.reference, source.settings), one.One)
    source = job_source(Regression())
    assert load_job(source.reference).fields() == Regression().fields()


def test_paths_and_modules_are_taken_as_the_command_does(package: Path) -> None:
    path = package / "mhtested" / "jobs" / "one.py"
    for given in (path, str(path), f"{path}:One"):
        source = job_source(given)
        assert (source.reference, source.settings) == (str(given), {})
        assert source.file is not None
        assert source.file.path == path


def test_a_class_that_the_workers_can_not_import_is_refused() -> None:
    @dataclass
    class Local(Regression):
        pass

    with pytest.raises(JobError, match=r"can't import .*Local from .*Define it at the top level"):
        job_source(Local())
    incomplete = type("Incomplete", (Job,), {"__module__": __name__})
    with pytest.raises(JobError, match=r"Incomplete from .* is not at the top level"):
        job_source(incomplete())


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (Regression, r"mh.train\(Regression\): give an instance, .* mh.train\(Regression\(\)\)"),
        (torch.nn.Linear(1, 1), r'mh.train\(Linear\): a job is a path, "job.py"'),
        ("nowhere.py", "There is no file nowhere.py"),
    ],
)
def test_anything_else_is_refused(given: Any, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        job_source(given)


def test_settings_are_as_typed() -> None:
    given = {"lr": 0.05, "name": "x", "decay": None, "widths": [1]}
    texts = {"lr": "0.05", "name": "x", "decay": "None", "widths": "[1]"}
    assert given_settings(given) == texts
