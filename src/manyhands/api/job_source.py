"""What `mh.train()` is given as a job: a reference to a file, or an instance. Members get a file and texts.

An instance becomes the file of its class, and those of its fields that differ from the defaults of the class,
as the texts of `--set`. So a run is the same however it was started: `manyhands resume` and `--set` work on
it, and its config.json says where each value comes from. Whether the members will build an equal job is tried
here, before anything is started.
"""

from __future__ import annotations

import dataclasses
import inspect
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from manyhands.api.saved_class import saved_class
from manyhands.errors import JobError, UsageError
from manyhands.job import Job, JobFile, check_class, find_job, make_job, parse_settings
from manyhands.job_length import LENGTHS

SAVED_AS = "saved_job.py"
"""The file in the run folder for a class that no file can be imported for. Not a name that a module of the
user may have: the folder is searched for modules."""


@dataclass(frozen=True)
class JobSource:
    """The job of a training that is about to start."""

    reference: str
    """As given, or as it could have been. Of a saved class: its name alone."""
    file: JobFile | None
    """None: the class is saved in the run folder."""
    text: str = ""
    """The source of a saved class."""
    origin: str = ""
    """Where the user wrote a saved class: "Digits of train.py"."""
    settings: Mapping[str, str] = field(default_factory=dict)
    """Fields of an instance that differ from the defaults of its class, as texts."""

    @property
    def title(self) -> str:
        """Name for its runs."""
        return self.reference if self.file is None else self.file.title


def job_source(job: str | os.PathLike[str] | Job) -> JobSource:
    """Find the source of a job without running any of its code."""
    if isinstance(job, Job):
        return _of_instance(job)
    if isinstance(job, str | os.PathLike):
        reference = os.fspath(job)
        return JobSource(reference, find_job(reference))
    if isinstance(job, type) and issubclass(job, Job):
        raise UsageError(
            f"mh.train({job.__name__}): give an instance, with its hyperparameters:  "
            f"mh.train({job.__name__}())"
        )
    raise UsageError(
        f'mh.train({type(job).__name__}): a job is a path, "job.py" or "job.py:Name"; a module, '
        '"pkg.module:Name"; or an instance of a class that derives from mh.Job.'
    )


def _of_instance(job: Job) -> JobSource:
    cls = type(job)
    name = cls.__name__
    if cls.__module__ == "__main__":
        check_class(cls, "__main__")
        text, origin = saved_class(cls)
        return JobSource(name, None, text, f"{name} of {origin}", settings_of(job))
    file = _file_of(cls)
    check_class(cls, str(file.path))
    return JobSource(file.anywhere, file, settings=settings_of(job))


def _file_of(cls: type[Job]) -> JobFile:
    """Find the file that the class can be imported from."""
    module = sys.modules.get(cls.__module__)
    path = getattr(module, "__file__", None)
    if module is None or path is None or not str(path).endswith(".py"):
        raise JobError(
            f"{cls.__qualname__} of {cls.__module__} comes from no Python file, which the workers could "
            "import. Write it into one."
        )
    if getattr(module, cls.__qualname__, None) is not cls:
        raise JobError(
            f"The workers can't import {cls.__qualname__} from {path}: it is not at the top level there, or "
            "another class has its name. Define it at the top level."
        )
    file = Path(path).resolve()
    # A path may be found by more than one module name: use the one that it was imported by.
    depth = cls.__module__.count(".") + (file.stem == "__init__")
    if depth and not cls.__module__.startswith("manyhands_job_"):
        return JobFile(file, cls.__name__, cls.__module__, file.parents[depth])
    return find_job(f"{file}:{cls.__name__}")


def settings_of(job: Job) -> dict[str, str]:
    """Return the fields that differ from their defaults, as texts. Raises JobError if the members would
    build another job from them."""
    cls = type(job)
    settings = {}
    for each in dataclasses.fields(job):
        value = getattr(job, each.name, dataclasses.MISSING)
        if each.init and not _same(value, _default(each)):
            settings[each.name] = _as_setting(cls, each.name, value)
    built = make_job(cls, settings, source=_where(cls))
    for name, value in vars(job).items():
        other = getattr(built, name, dataclasses.MISSING)
        if name in LENGTHS and name not in settings:
            continue  # the one that was given replaces the other
        if not _same(value, other) and name in job.fields():
            raise JobError(
                f"{cls.__name__} has {name}={_short(value)} here, and would have {name}={_short(other)} in "
                "the workers: __post_init__() changes it once more, or it was set by hand. Leave the field "
                "as it was given, and compute from it in a property."
            )
        if other is dataclasses.MISSING:
            raise JobError(
                f"The workers would not have {name}, which was set on this {cls.__name__}: only fields reach "
                f"them. Declare it in the class:  {name}: {type(value).__name__} = ..."
            )
    return settings


def given_settings(settings: Mapping[str, Any]) -> dict[str, str]:
    """Return what is given as `settings`, such as {"lr": 0.05}, as the texts of `--set`."""
    return {
        name: value if isinstance(value, str) else repr(value) for name, value in settings.items()
    }


def _as_setting(cls: type[Job], name: str, value: Any) -> str:
    """Return the text that `--set` parses into this value."""
    why = ""
    for text in (value if isinstance(value, str) else repr(value), repr(value), str(value)):
        try:
            if _same(parse_settings(cls, {name: text})[name], value):
                return text
        except UsageError as error:
            why = why or f" ({error})"
    raise JobError(
        f"{cls.__name__}({name}={_short(value)}): the workers can't be given this {type(value).__name__} as "
        f"a field{why}. Fields are numbers, texts, true or false, paths, and lists, tuples, dicts and sets "
        "of numbers and texts, as annotated. Make anything else in a method, from fields such as these."
    )


def _default(each: dataclasses.Field[Any]) -> Any:
    if each.default_factory is not dataclasses.MISSING:
        return each.default_factory()
    return each.default


def _same(value: Any, other: Any) -> bool:
    """Compare values of any type; those that don't compare to a truth are different. True is not 1."""
    if value is other:
        return True
    number = isinstance(value, int | float) and isinstance(other, int | float)
    if type(value) is not type(other) and (not number or bool in (type(value), type(other))):
        return False
    try:
        return bool(value == other) or (value != value and other != other)
    except Exception:
        return False


def _where(cls: type) -> str:
    try:
        return inspect.getfile(cls)
    except (OSError, TypeError):
        return "this notebook"


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
