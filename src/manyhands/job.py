"""A Job says what is trained: model, loss, optimizer, data, hyperparameters. It knows nothing of processes.

A job is a dataclass: its fields are hyperparameters, so `--set lr=0.05` overrides one and the same
file serves training, planning, simulating, comparing and tuning. Building a job trains nothing.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib
import importlib.util
import math
import os
import pkgutil
import re
import sys
import traceback
import types
import typing
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, Union

from manyhands.errors import JobError, RunFolderError, UsageError, closest

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn


@dataclass(kw_only=True)
class Job:
    """What is trained. Subclass it as a dataclass, give `model`, `optimizer`, `data` and `loss`.

    `batch_size` is the GLOBAL batch: the number of workers never changes the mathematics (unless it is
    asked to, by --scale-batch).
    """

    batch_size: int = 32
    """Samples of the whole cluster in one step."""
    epochs: int = 1
    """How many times every sample is used."""
    seed: int = 0
    """Same seed, same result, bit for bit."""
    accumulate: int = 1
    """Into how many micro-batches a worker cuts its share of a step, to save memory."""
    clip_norm: float | None = None
    """Clip the norm of the whole gradient to this, or None."""
    eval_every: int = 1
    """Evaluate after every so many epochs."""
    monitor: str = "loss"
    """The evaluation metric that decides which model is best: "min mae" or "max auc"; or only a name, if
    its direction is well known, such as "loss" or "accuracy"."""
    patience: int | None = None
    """Stop after so many evaluations without a better `monitor`, or None for never."""
    plateau: str | None = None
    """When to lower the learning rate of all workers, as "factor=0.5; patience=3", or None for never."""
    loader_processes: int = 0
    """Processes a worker that load samples ahead (as DataLoader's num_workers); 0 loads in the worker."""

    def model(self) -> nn.Module:
        """The model, built anew. The seed is set before this is called."""
        raise NotImplementedError

    def optimizer(self, *args: Any, **kwargs: Any) -> torch.optim.Optimizer:
        """A torch optimizer over all parameters that can be trained.

        Write it as `optimizer(self, params)`, or as `optimizer(self, params, model)` for groups by name.
        """
        raise NotImplementedError

    def schedule(self, optimizer: torch.optim.Optimizer, num_steps: int) -> Any:
        """A torch learning-rate scheduler, stepped once per global step; or None.

        `num_steps` is the number of steps of the whole training. With --scale-batch both are told in
        steps of `batch_size` samples, however large a batch is.
        """
        return None

    def data(self) -> Any:
        """The training data: a map-style dataset (`len` and `[]`)."""
        raise NotImplementedError

    def eval_data(self) -> Any:
        """The data to evaluate on, or None."""
        return None

    def collate(self, samples: list[Any]) -> Any:
        """Make a batch of a list of samples, as torch's DataLoader does."""
        from torch.utils.data import default_collate

        return default_collate(samples)

    def inputs(self, batch: Any) -> Any:
        """What the model is called with: a tensor, a tuple (positional) or a dict (by keyword)."""
        return batch[0]

    def loss(self, output: Any, batch: Any) -> Tensor:
        """The mean loss over the batch, a scalar tensor."""
        raise NotImplementedError

    def metrics(self, output: Any, batch: Any) -> Mapping[str, Any]:
        """Further means over the batch, for evaluation: name to number or scalar tensor."""
        return {}

    def weight(self, batch: Any) -> float | Tensor | None:
        """What this batch counts in a mean over workers; None: its number of samples.

        A language model whose batches hold unequal numbers of tokens returns that number.
        """
        return None

    def log(self, name: str, value: float | Tensor) -> None:
        """Record a mean over the batch, from loss(), metrics() or what they call.

        Its mean over micro-batches and workers is in the step's event, and on TensorBoard as train/NAME; in
        an evaluation it is one of the metrics. Does nothing where nobody trains or evaluates.
        """
        if (logged := _logged.get()) is not None:
            logged.append((name, value))

    def unit(self) -> tuple[str, float]:
        """What speed is told in: a name, and how many of them a sample has on average."""
        return "samples", 1.0

    def fields(self) -> dict[str, Any]:
        """The hyperparameters by name."""
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}


_logged: ContextVar[list[tuple[str, Any]] | None] = ContextVar("logged", default=None)


@contextmanager
def collecting() -> Iterator[list[tuple[str, Any]]]:
    """What any job logs meanwhile, in this thread."""
    logged: list[tuple[str, Any]] = []
    token = _logged.set(logged)
    try:
        yield logged
    finally:
        _logged.reset(token)


REQUIRED_METHODS = ("model", "optimizer", "data", "loss")


def load_job(reference: str, settings: Mapping[str, str] | None = None) -> Job:
    """The job of a reference (see `find_job`), with `settings` ("lr": "0.05") put into its fields."""
    cls = load_job_class(reference)
    values = parse_settings(cls, settings or {})
    try:
        job = cls(**values)
    except Exception as error:
        raise JobError(f"{cls.__name__} in {reference} can't be built: {error}") from error
    check_fields(job)
    return job


def load_job_class(reference: str) -> type[Job]:
    text, _, name = reference.partition(":")
    module = _load_module(find_job(reference))
    jobs = {
        key: value
        for key, value in vars(module).items()
        if isinstance(value, type)
        and issubclass(value, Job)
        and value is not Job
        and value.__module__ == module.__name__
    }
    if name:
        if name not in jobs:
            raise JobError(
                f"{text} has no Job called {name!r}{closest(name, jobs)} "
                f"It has: {', '.join(jobs) or 'none'}."
            )
        cls = jobs[name]
    elif not jobs:
        raise JobError(
            f"{text} has no Job. Write one:\n\n"
            "    @dataclass\n    class MyJob(mh.Job):\n        def model(self): ...\n\n"
            "See examples/digits.py for a whole one."
        )
    else:
        # The first one of a file is its default, as a reader would guess.
        cls = next(iter(jobs.values()))
    _check_class(cls, text)
    return cls


# Where a job is -----------------------------------------------------------------------------------

ROOT = "/./"
"""In a path, after the folder that imports begin from, as in rsync: /home/me/./pkg/job.py is pkg.job."""


@dataclass(frozen=True)
class JobFile:
    """Where a job's code is, and how it is imported. Nothing of it has been run."""

    path: Path
    """Of the file, absolute."""
    name: str
    """Of the class; empty: the first one."""
    module: str = ""
    """What it is imported as; empty: a script, in no package."""
    folder: Path | None = None
    """Where imports of the package begin; None: Python finds it by itself."""

    @property
    def title(self) -> str:
        """What runs of it are called."""
        path = self.path
        return self.name or (path.parent.name if path.stem == "__init__" else path.stem)

    @property
    def anywhere(self) -> str:
        """A reference that means the same in every working folder of this machine."""
        text = str(self.path)
        if self.folder is not None and _dotted(self.path, _package_root(self.path)) != self.module:
            text = f"{self.folder}{ROOT}{self.path.relative_to(self.folder)}"
        return f"{text}:{self.name}" if self.name else text


def find_job(reference: str) -> JobFile:
    """Where the job of a reference is, without running any of its code:

    path.py, path.py:Name               a file; its package, if the folders around it have an __init__.py
    pkg.module, pkg.module:Name         a module, from the working folder or installed, as for  python -m
    folder/./pkg/module.py              a module of a package without __init__.py
    """
    text, _, name = reference.partition(":")
    path = Path(text)
    if not path.is_file() and path.suffix != ".py" and re.fullmatch(r"\w+(\.\w+)*", text):
        return _find_module(text, name)
    if not path.exists():
        there = path.with_name(f"{path.name}.py")
        hint = f". Did you mean {there}?" if there.is_file() else f"{_ALLOWED}."
        raise JobError(f"There is no file {path}{'.' if path.suffix == '.py' else hint}")
    if path.is_dir() or path.suffix != ".py":
        raise JobError(f"A job is a Python file, path.py or path.py:Name; {reference!r} is not.")
    path = path.resolve()
    root, marked, rest = text.rpartition(ROOT)
    folder = Path(root).resolve() if marked and "/" in rest else _package_root(path)
    module = _dotted(path, folder)
    return JobFile(path, name, module, folder) if module else JobFile(path, name)


def job_of_run(config: Mapping[str, Any], run: Path) -> JobFile:
    """The job of a run's config.json, from any working folder: where it was, or as it was given."""
    noted = config["job"]
    _, _, name = noted["reference"].partition(":")
    there = noted.get("anywhere") or (f"{noted['file']}:{name}" if name else noted["file"])
    for reference in (there, noted["reference"]):
        with suppress(JobError):
            return find_job(reference)
    raise RunFolderError(f"The job file of {run} is gone: {noted['file']}. Put it back there.")


_ALLOWED = " (a job is a Python file: path.py or path.py:Name, or a module: pkg.module:Name)"


def _package_root(path: Path) -> Path:
    """The folder that the file's outermost package is in; that of the file if it is in none."""
    folder = path.parent
    while (folder / "__init__.py").is_file() and folder.parent != folder:
        folder = folder.parent
    return folder


def _dotted(path: Path, folder: Path) -> str:
    """The module's name as seen from the folder; empty if it is in no package, or has no such name."""
    if not path.is_relative_to(folder):
        return ""
    parts = path.relative_to(folder).with_suffix("").parts
    parts = parts[:-1] if parts[-1] == "__init__" else parts
    inside = path.parent != folder and all(part.isidentifier() for part in parts)
    return ".".join(parts) if inside else ""


def _find_module(module: str, name: str) -> JobFile:
    here = os.getcwd()
    top, *parts = module.split(".")
    spec = PathFinder.find_spec(top, [here])
    if spec is None or spec.loader is None:  # a mere folder gives way to anything installed
        spec = _find_installed(top) or spec
    if spec is None:
        raise JobError(
            f"There is no file {module}{_ALLOWED}, and no module {top!r}, neither in {here} nor "
            "among what is installed."
        )
    known = top
    for part in parts:
        places = spec.submodule_search_locations
        if places is None:
            hint = f" Write {known}:{part}." if not name else ""
            raise JobError(f"{known} is a module, and no package with {part!r} in it.{hint}")
        known = f"{known}.{part}"
        spec = PathFinder.find_spec(
            part, list(places)
        )  # find_spec() of importlib.util would import
        if spec is None:
            there = [found.name for found in pkgutil.iter_modules(list(places))]
            raise JobError(
                f"There is no module {known}{closest(part, there)} "
                f"{known.rpartition('.')[0]} has: {', '.join(sorted(there)) or 'none'}."
            )
    if spec.origin is None or not spec.origin.endswith(".py"):
        raise JobError(
            f"{module} is not a Python file, so no job is in it. Name a module: {module}.job:Name."
        )
    path = Path(spec.origin).resolve()
    depth = len(parts) + (path.stem == "__init__")
    folder = path.parents[depth] if depth < len(path.parents) else path.parent
    if path.stem == "__init__" or parts:
        told = _dotted(path, folder) == module
        return JobFile(path, name, module, folder if told else None)
    return JobFile(path, name)  # a file of its own: as by its path


def _find_installed(top: str) -> ModuleSpec | None:
    try:
        return importlib.util.find_spec(top)
    except ValueError:  # __main__
        return None


def _load_module(job: JobFile) -> types.ModuleType:
    if job.module and not _is_taken(job):
        return _import(job)
    path = job.path
    digest = hashlib.sha256(str(path).encode()).hexdigest()[:8]
    name = f"manyhands_job_{path.stem}_{digest}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Dataclasses and pickling look the module up by name; the job's neighbours import as in a script.
    sys.modules[name] = module
    _search(path.parent)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise JobError(_import_problem(job, error)) from error
    return module


def _import(job: JobFile) -> types.ModuleType:
    _search(job.path.parent)  # neighbours import as in a script, too
    if job.folder is not None:
        _search(job.folder)
    importlib.invalidate_caches()
    try:
        return importlib.import_module(job.module)
    except Exception as error:
        raise JobError(_import_problem(job, error)) from error


def _is_taken(job: JobFile) -> bool:
    """If true, Python has another module of that name already: the file is loaded as a script."""
    top = job.module.partition(".")[0]
    if job.folder is None or top not in {*sys.modules, *sys.stdlib_module_names}:
        return False
    if top not in sys.modules:
        return True
    places = getattr(sys.modules[top], "__path__", [])
    return str(job.folder / top) not in [str(Path(place).resolve()) for place in places]


def _search(folder: Path) -> None:
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))


def _import_problem(job: JobFile, error: Exception) -> str:
    """What is wrong in which line of a job file."""
    path = job.path
    if isinstance(error, SyntaxError) and error.filename is not None:
        line = (error.text or "").rstrip()
        caret = f"\n    {' ' * (len(line[: (error.offset or 1) - 1].lstrip()))}^" if line else ""
        shown = f"\n    {line.strip()}{caret}" if line else ""
        return f"{error.filename}, line {error.lineno}: {error.msg}.{shown}"
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if frame.filename == str(path)]
    where = f"{path}, line {lines[-1]}" if lines else str(path)
    if isinstance(error, ModuleNotFoundError) and error.name:
        return f"{where}: {error}. {_missing_module(job, error.name)}"
    if isinstance(error, ImportError) and "relative import" in str(error):
        folder = path.parent if not job.module else _package_root(path)
        return (
            f"{where}: {error}. Relative imports need a package: put an empty __init__.py into {folder}, "
            "or import what is beside the job by its plain name:  from model import Net."
        )
    return f"{where} can't be imported: {type(error).__name__}: {error}"


def _missing_module(job: JobFile, name: str) -> str:
    """What to do about it."""
    package, _, inside = name.partition(".")
    around = [job.path.parent, *job.path.parents[1:]]
    own = next((folder for folder in around if folder.name == package), None)
    if own is None:
        return f"Install it: pip install {package}"
    if inside and job.module:
        there = [found.name for found in pkgutil.iter_modules([str(own)])]
        return f"{own} has: {', '.join(sorted(there)) or 'no module'}."
    return (
        f"It is the name of the job's own folder, {own}: put an empty __init__.py into it, and into every "
        "folder between it and the job."
    )


def _check_class(cls: type[Job], path: str) -> None:
    missing = [m for m in REQUIRED_METHODS if getattr(cls, m) is getattr(Job, m)]
    if missing:
        raise JobError(
            f"{cls.__name__} in {path} lacks {', '.join(f'{m}()' for m in missing)}. "
            f"A Job must have {', '.join(f'{m}()' for m in REQUIRED_METHODS)}."
        )
    own = vars(cls).get("__annotations__", {})
    if own and "__dataclass_fields__" not in vars(cls):
        raise JobError(
            f"{cls.__name__} in {path} has fields ({', '.join(own)}) but is not a dataclass: "
            "write @dataclass above it."
        )


def parse_settings(cls: type[Job], settings: Mapping[str, str]) -> dict[str, Any]:
    """`--set name=value` strings as values of the fields' own types."""
    fields = {f.name: f for f in dataclasses.fields(cls)}
    hints = _hints(cls) if settings else {}
    values: dict[str, Any] = {}
    for name, text in settings.items():
        if name not in fields:
            raise UsageError(
                f"--set {name}={text}: {cls.__name__} has no field {name!r}"
                f"{closest(name, fields)} Its fields: {', '.join(sorted(fields))}."
            )
        values[name] = _parse_value(name, text, hints.get(name, str))
    return values


def _hints(cls: type[Job]) -> dict[str, Any]:
    try:
        return typing.get_type_hints(cls)
    except (NameError, TypeError) as error:
        raise UsageError(
            f"--set needs the types of the fields of {cls.__name__}, and one can't be read: {error}. "
            "Import what it names outside of TYPE_CHECKING."
        ) from error


def _parse_value(name: str, text: str, kind: Any) -> Any:
    if typing.get_origin(kind) in (Union, types.UnionType):
        options = typing.get_args(kind)
        if type(None) in options and text.lower() in ("none", "null", ""):
            return None
        *narrower, kind = [option for option in options if option is not type(None)]
        for option in narrower:
            try:
                return _parse_value(name, text, option)
            except UsageError:
                continue
    if kind is bool:
        words = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
        if text.lower() not in words:
            raise UsageError(f"--set {name}={text}: {name} is true or false.")
        return words[text.lower()]
    if kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            a = {int: "a whole number", float: "a number"}[kind]
            raise UsageError(f"--set {name}={text}: {name} is {a}.") from None
    if kind is str:
        return text
    raise UsageError(
        f"--set {name}={text}: a field of type {kind} can't be set from the command line."
    )


def total_steps(job: Job, num_samples: int) -> int:
    """Count the steps of the whole training, in batches of the job's own size."""
    return math.ceil(num_samples / job.batch_size) * job.epochs


def check_fields(job: Job) -> None:
    """The fields that every job has must make sense, whatever they were set by."""
    at_least_one = ("batch_size", "epochs", "accumulate", "eval_every")
    for name in at_least_one:
        if not _whole(getattr(job, name), 1):
            _refuse(job, name, "a whole number of at least 1")
    if job.patience is not None and not _whole(job.patience, 1):
        _refuse(job, "patience", "a whole number of at least 1, or None")
    if not _whole(job.loader_processes, 0):
        _refuse(job, "loader_processes", "a whole number, 0 or more")
    if not _whole(job.seed):
        _refuse(job, "seed", "a whole number")
    clip = job.clip_norm
    if clip is not None and not (isinstance(clip, int | float) and clip > 0):
        _refuse(job, "clip_norm", "a number above 0, or None")
    if not isinstance(job.monitor, str):
        _refuse(job, "monitor", 'a metric, such as "accuracy" or "min mae"')
    if not isinstance(job.plateau, str | None):
        _refuse(job, "plateau", 'a text such as "factor=0.5; patience=3", or None')


def _whole(value: Any, least: float = float("-inf")) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _refuse(job: Job, name: str, wanted: str) -> NoReturn:
    raise JobError(f"{name} must be {wanted}, and is {getattr(job, name)!r}.")
