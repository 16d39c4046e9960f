"""`Job` defines what is trained: model, loss, optimizer, data, hyperparameters. It knows no processes.

A job is a dataclass whose fields are hyperparameters: `--set lr=0.05` overrides one. Creating a job trains
nothing.
"""

from __future__ import annotations

import ast
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
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path
from typing import TYPE_CHECKING, Any, Union

from manyhands.errors import JobError, RunFolderError, UsageError, closest
from manyhands.job_length import ONE_LENGTH, choose_length, is_interval

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from manyhands.measure import Measure


@dataclass(kw_only=True)
class Job:
    """Base class of jobs. Subclass it as a dataclass and define `model`, `optimizer`, `data` and `loss`.

    `batch_size` is the global batch: the number of workers never changes the mathematics (except with
    --scale-batch).
    """

    batch_size: int = 32
    """Samples per step, over all workers."""
    epochs: int | None = None
    """Number of passes over the data; without it, and without `steps`, 1."""
    steps: int | None = None
    """Number of steps, instead of `epochs`: the data is repeated as needed."""
    seed: int = 0
    """Seed of everything random: the same seed gives the same result, bit for bit."""
    accumulate: int = 1
    """Number of micro-batches that a worker divides its share of a step into, to save memory."""
    clip_norm: float | None = None
    """Maximum norm of the whole gradient; None: no clipping."""
    eval_every: int | str = 1
    """Number of epochs between evaluations, or a text such as "200 steps"; there is always one at the end."""
    eval_samples: int | None = None
    """Number of evaluation samples to use, always the same ones, chosen by the seed; None: all."""
    monitor: str = "loss"
    """The evaluation metric that decides which model is best: "min mae" or "max auc"; or just its name, if
    its direction is well known, such as "loss" or "accuracy"."""
    patience: int | None = None
    """Number of evaluations without a better `monitor` after which training stops; None: never."""
    plateau: str | None = None
    """When to lower the learning rate of all workers, such as "factor=0.5; patience=3"; None: never."""
    loader_processes: int = 0
    """Number of processes per worker that load samples ahead (DataLoader's num_workers); 0: none."""

    def model(self) -> nn.Module:
        """Return a new model. The seed is set before the call."""
        raise NotImplementedError

    def optimizer(self, *args: Any, **kwargs: Any) -> torch.optim.Optimizer:
        """Return a torch optimizer over all trainable parameters.

        Define it as `optimizer(self, params)`, or as `optimizer(self, params, model)` for groups by name.
        """
        raise NotImplementedError

    def schedule(self, optimizer: torch.optim.Optimizer, num_steps: int) -> Any:
        """Return a torch learning-rate scheduler, which is stepped once per global step; or None.

        `num_steps` is the total number of steps. With --scale-batch, a step of the schedule is `batch_size`
        samples, however large the actual batch is.
        """
        return None

    def data(self) -> Any:
        """Return the training data: a map-style dataset (`len` and `[]`)."""
        raise NotImplementedError

    def eval_data(self) -> Any:
        """Return the evaluation data, or None."""
        return None

    def collate(self, samples: list[Any]) -> Any:
        """Return a batch made from a list of samples, as torch's DataLoader does."""
        from torch.utils.data import default_collate

        return default_collate(samples)

    def inputs(self, batch: Any) -> Any:
        """Return the model's arguments: a tensor, a tuple (positional) or a dict (by keyword)."""
        return batch[0]

    def loss(self, output: Any, batch: Any) -> Tensor:
        """Return the mean loss over the batch, a scalar tensor."""
        raise NotImplementedError

    def metrics(self, output: Any, batch: Any) -> Mapping[str, Any]:
        """Return more means over the batch, for evaluation: name to number or scalar tensor."""
        return {}

    def weight(self, batch: Any) -> float | Tensor | None:
        """Return the weight of a batch in means over workers; None: its number of samples.

        Return the number of tokens, for example, if batches of a language model differ in it.
        """
        return None

    def log(self, name: str, value: float | Tensor) -> None:
        """Log a number of the batch. Call it from loss() or metrics().

        It is a mean over the batch, unless measures() declares another rule. Combined over micro-batches and
        workers, it is in the step's event, and on TensorBoard as train/NAME. In an evaluation it becomes a
        metric. Outside of training and evaluation, nothing happens.
        """
        if (logged := _logged.get()) is not None:
            logged.append((name, value))

    def measures(self) -> Sequence[Measure]:
        """Return the units of logged numbers, and how they are combined over micro-batches and workers.

        For example, [mh.Measure("tokens", unit="tokens", rule="sum")]. A logged number that is not listed is
        a mean without unit.
        """
        return []

    def unit(self) -> tuple[str, float]:
        """Return the unit of throughput: its name, and its average number per sample."""
        return "samples", 1.0

    def fields(self) -> dict[str, Any]:
        """Return the hyperparameters by name."""
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}


_logged: ContextVar[list[tuple[str, Any]] | None] = ContextVar("logged", default=None)


@contextmanager
def collecting() -> Iterator[list[tuple[str, Any]]]:
    """Yield a list of everything that jobs log inside the block, in this thread."""
    logged: list[tuple[str, Any]] = []
    token = _logged.set(logged)
    try:
        yield logged
    finally:
        _logged.reset(token)


REQUIRED_METHODS = ("model", "optimizer", "data", "loss")


def load_job(reference: str, settings: Mapping[str, str] | None = None) -> Job:
    """Create the job of a reference (see `find_job`), with fields set from `settings`, as {"lr": "0.05"}."""
    return make_job(load_job_class(reference), settings or {}, source=reference)


def make_job(cls: type[Job], settings: Mapping[str, str], *, source: str) -> Job:
    """Create a job of this class with fields set from `settings`. `source`: the place of the class, for
    errors."""
    values = choose_length(parse_settings(cls, settings))
    try:
        job = cls(**values)
    except Exception as error:
        raise JobError(f"{cls.__name__} in {source} can't be built: {error}") from error
    check_fields(job)
    if job.steps is None and job.epochs is None:
        job.epochs = 1
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
    elif jobs:
        cls = next(iter(jobs.values()))
    else:
        raise JobError(
            f"{text} has no Job. Write one:\n\n"
            "    @dataclass\n    class MyJob(mh.Job):\n        def model(self): ...\n\n"
            "See examples/digits.py for a complete example."
        )
    check_class(cls, text)
    return cls


# Finding the file of a job --------------------------------------------------------------------------

ROOT = "/./"
"""Marks the import root in a path, as in rsync: /home/me/./pkg/job.py is the module pkg.job."""


@dataclass(frozen=True)
class JobFile:
    """The file of a job, and how to import it. None of its code has run."""

    path: Path
    """Absolute path of the file."""
    name: str
    """Name of the class; empty: the first one in the file."""
    module: str = ""
    """Module name to import; empty: a script that is in no package."""
    folder: Path | None = None
    """Import root of the package; None: Python finds it by itself."""

    @property
    def title(self) -> str:
        """Name for its runs."""
        path = self.path
        return self.name or (path.parent.name if path.stem == "__init__" else path.stem)

    @property
    def anywhere(self) -> str:
        """A reference that is valid in every working directory of this machine."""
        text = str(self.path)
        if self.folder is not None and _dotted(self.path, _package_root(self.path)) != self.module:
            text = f"{self.folder}{ROOT}{self.path.relative_to(self.folder)}"
        return f"{text}:{self.name}" if self.name else text


def find_job(reference: str) -> JobFile:
    """Find the file of a job without running any of its code. A reference is one of:

    path.py, path.py:Name               a file; part of a package if the folder has an __init__.py
    pkg.module, pkg.module:Name         a module, found from the working directory, as by  python -m
    folder/./pkg/module.py              a module of a package without __init__.py
    """
    text, _, name = reference.partition(":")
    path = Path(text)
    if not path.is_file() and path.suffix != ".py" and re.fullmatch(r"\w+(\.\w+)*", text):
        return _find_module(text, name)
    if not path.exists():
        there = path.with_name(f"{path.name}.py")
        if path.suffix == ".py":
            hint = closest(path.name, (file.name for file in path.parent.glob("*.py")))
        else:
            hint = f". Did you mean {there}?" if there.is_file() else f"{_ALLOWED}."
        raise JobError(f"There is no file {path}{hint}")
    if path.is_dir() or path.suffix != ".py":
        raise JobError(f"A job is a Python file, path.py or path.py:Name; {reference!r} is not.")
    path = path.resolve()
    root, marked, rest = text.rpartition(ROOT)
    folder = Path(root).resolve() if marked and "/" in rest else _package_root(path)
    module = _dotted(path, folder)
    return JobFile(path, name, module, folder) if module else JobFile(path, name)


def job_of_run(config: Mapping[str, Any], run: Path) -> JobFile:
    """Find the job of a run's config.json from any working directory: in the run's folder, by its path, or by
    its reference."""
    noted = config["job"]
    _, _, name = noted["reference"].partition(":")
    if noted.get("saved"):
        return find_job(f"{run / noted['saved']}:{name}")
    there = noted.get("anywhere") or (f"{noted['file']}:{name}" if name else noted["file"])
    for reference in (there, noted["reference"]):
        with suppress(JobError):
            return find_job(reference)
    raise RunFolderError(f"The job file of {run} is gone: {noted['file']}. Put it back there.")


_ALLOWED = " (a job is a Python file: path.py or path.py:Name, or a module: pkg.module:Name)"


def _package_root(path: Path) -> Path:
    """Return the folder of the file's outermost package; the folder of the file if there is no package."""
    folder = path.parent
    while (folder / "__init__.py").is_file() and folder.parent != folder:
        folder = folder.parent
    return folder


def _dotted(path: Path, folder: Path) -> str:
    """Return the module's name relative to an import root; empty if it is in no package, or not below it."""
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
    if spec is None or spec.loader is None:  # an installed package wins over a plain folder
        with suppress(ValueError):  # of __main__
            spec = importlib.util.find_spec(top) or spec
    if spec is None:
        raise JobError(
            f"There is no file {module}{_ALLOWED}, and no module {top!r}, neither in {here} nor "
            "installed."
        )
    known = top
    for part in parts:
        places = spec.submodule_search_locations
        if places is None:
            hint = f" Write {known}:{part}." if not name else ""
            raise JobError(f"{known} is a module, not a package with {part!r} in it.{hint}")
        known = f"{known}.{part}"
        # importlib.util.find_spec() would import the parent packages.
        spec = PathFinder.find_spec(part, list(places))
        if spec is None:
            there = [found.name for found in pkgutil.iter_modules(list(places))]
            raise JobError(
                f"There is no module {known}{closest(part, there)} "
                f"{known.rpartition('.')[0]} has: {', '.join(sorted(there)) or 'none'}."
            )
    if spec.origin is None or not spec.origin.endswith(".py"):
        raise JobError(
            f"{module} is not a Python file. Name a module with a job: {module}.job:Name."
        )
    path = Path(spec.origin).resolve()
    depth = len(parts) + (path.stem == "__init__")
    folder = path.parents[depth] if depth < len(path.parents) else path.parent
    if path.stem != "__init__" and not parts:
        return JobFile(path, name)  # a script, as if given by its path
    return JobFile(path, name, module, folder if _dotted(path, folder) == module else None)


def _load_module(job: JobFile) -> types.ModuleType:
    _search(job.path.parent)  # the job can import its neighbours, as a script can
    try:
        if not job.module or _is_taken(job):
            return _load_script(job.path)
        if job.folder is not None:
            _search(job.folder)
        importlib.invalidate_caches()
        return importlib.import_module(job.module)
    except Exception as error:
        raise JobError(_import_problem(job, error)) from error


def _load_script(path: Path) -> types.ModuleType:
    digest = hashlib.sha256(str(path).encode()).hexdigest()[:8]
    name = f"manyhands_job_{path.stem}_{digest}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look the module up by name
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _is_taken(job: JobFile) -> bool:
    """Return true if another module has this name already, so that the file must be loaded as a script."""
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
    """Describe why a job file can't be imported, with the line."""
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
            "or import the job's neighbours by their plain names:  from model import Net."
        )
    return f"{where} can't be imported: {type(error).__name__}: {error}"


def _missing_module(job: JobFile, name: str) -> str:
    """Tell how to make a missing module importable."""
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


def check_class(cls: type[Job], path: str) -> None:
    """Raise JobError if a class lacks what every job has."""
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
    """Parse the strings of `--set name=value` into the types of the fields."""
    fields = {f.name: f for f in dataclasses.fields(cls)}
    # A subclass may declare `epochs: int`; None stays possible.
    hints = _hints(cls) | _hints(Job) if settings else {}
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
            f"--set needs the types of the fields of {cls.__name__}, and one can't be resolved: {error}. "
            "Import it outside of TYPE_CHECKING."
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
    if kind is str:
        return text
    parse = parse_bool if kind is bool else kind
    if parse not in PARSED:
        return _parse_literal(name, text, kind)
    try:
        return parse(text)
    except ValueError:
        raise UsageError(f"--set {name}={text}: {name} is {PARSED[parse]}.") from None


_CONTAINERS = {list: "[64, 32]", tuple: "(64, 32)", dict: "{'a': 1}", set: "{1, 2}"}
"""Types of fields that are written as in Python, with an example."""


def _parse_literal(name: str, text: str, kind: Any) -> Any:
    """Parse a list, tuple, dict or set, or a value of any type, written as in Python."""
    wanted = typing.get_origin(kind) or kind
    if wanted is not Any and wanted not in _CONTAINERS:
        raise UsageError(f"--set {name}={text}: a field of type {kind} can't be set as text.")
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        value = _NOT_PARSED
    if value is _NOT_PARSED or (wanted is not Any and not isinstance(value, wanted)):
        example = _CONTAINERS.get(wanted, "[64, 32], 0.5 or 'relu'")
        raise UsageError(
            f'--set {name}={text}: {name} is written as in Python, such as  --set "{name}={example}"'
        )
    return value


_NOT_PARSED = object()


def parse_bool(text: str) -> bool:
    """Parse true, yes, 1, false, no or 0; raise ValueError for anything else."""
    yes = text.lower() in ("true", "yes", "1")
    if not yes and text.lower() not in ("false", "no", "0"):
        raise ValueError(text)
    return yes


PARSED: dict[Any, str] = {
    int: "a whole number",
    float: "a number",
    parse_bool: "true or false",
    Path: "a path",
}
"""Values that parsers accept, in words for errors."""


def check_fields(job: Job) -> None:
    """Raise JobError if a field of the base class has an invalid value, however it was set."""
    positive, clip = "a whole number of at least 1", job.clip_norm
    clips = clip is None or (isinstance(clip, int | float) and clip > 0)
    rules = (
        ("batch_size", _whole(job.batch_size, 1), positive),
        ("epochs", _is_count(job.epochs), f"{positive}, or None"),
        ("steps", _is_count(job.steps), f"{positive}, or None"),
        ("accumulate", _whole(job.accumulate, 1), positive),
        ("eval_every", is_interval(job.eval_every), 'a number of epochs, or a text: "200 steps"'),
        ("eval_samples", _is_count(job.eval_samples), f"{positive}, or None"),
        ("patience", _is_count(job.patience), f"{positive}, or None"),
        ("loader_processes", _whole(job.loader_processes, 0), "a whole number, 0 or more"),
        ("seed", _whole(job.seed), "a whole number"),
        ("clip_norm", clips, "a number above 0, or None"),
        ("monitor", isinstance(job.monitor, str), 'a metric, such as "accuracy" or "min mae"'),
        ("plateau", isinstance(job.plateau, str | None), 'as "factor=0.5; patience=3", or None'),
    )
    for name, is_valid, wanted in rules:
        if not is_valid:
            raise JobError(f"{name} must be {wanted}, and is {getattr(job, name)!r}.")
    if job.steps is not None and job.epochs is not None:
        raise JobError(
            f"{type(job).__name__} has steps={job.steps} and epochs={job.epochs}: {ONE_LENGTH}. Set one of "
            f"them to None in the job file (epochs: int | None = None), or choose:  --set steps={job.steps}"
        )


def _whole(value: Any, least: float = -math.inf) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _is_count(value: Any) -> bool:
    return value is None or _whole(value, 1)
