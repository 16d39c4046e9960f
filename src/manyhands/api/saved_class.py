"""Saves the source of a class that no file can be imported for: one of a script, or of a notebook's cell.

A member is a fresh program that imports the job. Importing the script again would run all of it, the call of
`mh.train()` included, and a notebook can't be imported at all. So the class is written to a file of its own,
with everything of `__main__` that it uses, and nothing else:

    a class or function of __main__         its source, and what that uses in turn
    a module, or a name of one              the import
    numbers, texts, lists, dicts, paths     the value that they have now
    anything else                           refused: the members would not have the same

The parts stand in the order in which they were run. Names in annotations are saved where they can be, since
annotations are not evaluated in the file. This costs milliseconds, and no code of `__main__` is run.
"""

from __future__ import annotations

import ast
import builtins
import importlib.util
import inspect
import linecache
import os
import site
import symtable
import sys
import sysconfig
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import manyhands
from manyhands.errors import JobError
from manyhands.job import Job

FUTURE = "from __future__ import annotations\n"
MAX_CHARS = 10_000
"""Values with a longer text are data, and are refused."""

PARSED_AS_CELL = ast.PyCF_ONLY_AST | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
Definition = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
_scripts: dict[Path, str] = {}
"""Scripts as they were at their first training: a file may be edited while it runs."""


def saved_class(cls: type[Job]) -> tuple[str, str]:
    """Return the text of a file with a class of `__main__`, and where that is from. Raises JobError if it
    can't be saved."""
    main = sys.modules["__main__"]
    sources, origin = _sources(cls, main)
    collected = _Collected(cls, vars(main), sources)
    collected.add_all()
    return collected.text(origin), Path(origin).name


def _sources(cls: type[Job], main: types.ModuleType) -> tuple[list[str], str]:
    """Return the source of `__main__` in the order in which it ran: a script, or the cells of a notebook."""
    file = getattr(main, "__file__", None)
    if file is not None and Path(file).is_file():
        path = Path(file).resolve()
        return [_scripts.setdefault(path, path.read_text())], str(path)
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    if shell is None:
        raise JobError(
            f"{cls.__name__} was typed at a prompt, where Python keeps no source. Write it into a file and "
            f'import it, or train the file:  mh.train("job.py:{cls.__name__}")'
        )
    return [str(cell) for cell in shell.user_ns["In"]], "a notebook"


@dataclass(frozen=True)
class _Part:
    """A definition, and where it stands."""

    at: tuple[int, int]
    """Index of its source, and line in it."""
    text: str


@dataclass
class _Collected:
    """What the file will have."""

    cls: type[Job]
    names: Mapping[str, Any]
    """The names of `__main__`."""
    sources: Sequence[str]
    imports: dict[str, str] = field(default_factory=dict)
    values: dict[str, str] = field(default_factory=dict)
    parts: dict[str, _Part] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._definitions: dict[str, list[tuple[int, Definition, str]]] = {}
        self._imported: dict[str, str] = {}
        for index, source in enumerate(self.sources):
            try:
                body = compile(source, "cell", "exec", PARSED_AS_CELL).body
            except SyntaxError:
                continue  # a cell that never ran
            for statement in body:
                if isinstance(statement, Definition):
                    found = (index, statement, source)
                    self._definitions.setdefault(statement.name, []).append(found)
                elif isinstance(statement, ast.Import | ast.ImportFrom):
                    self._imported |= _imports(statement, self.names.get("__package__"))

    def add_all(self) -> None:
        """Add the class, and everything that it uses."""
        self._check_current(self.cls)
        wanted = [(self.cls.__name__, True, "mh.train()")]
        while wanted:
            name, required, user = wanted.pop()
            if name in self.parts or name in self.imports or name in self.values:
                continue
            if name not in self.names or name == "__name__":
                continue  # a builtin, or not defined: the same error as anywhere
            if name in vars(builtins) and self.names[name] is vars(builtins)[name]:
                continue
            found = self._add(name, self.names[name])
            if found is not None:
                used, annotated = found
                wanted += [(each, True, name) for each in used]
                wanted += [(each, False, name) for each in annotated - used]
            elif required:
                raise self._unsaved(name, user)

    def _add(self, name: str, value: Any) -> tuple[set[str], set[str]] | None:
        """Add a name. Returns the names that its code uses, and those in its annotations; None if it can't
        be saved."""
        nothing: tuple[set[str], set[str]] = set(), set()
        if getattr(value, "__module__", None) == "__main__" and name in self._definitions:
            index, node, source = self._definition(name, value)
            if isinstance(value, type):
                for cls in value.__mro__:
                    if cls.__module__ == "__main__":
                        self._check_current(cls)
            text = _segment(source, node)
            self.parts[name] = _Part((index, node.lineno), text)
            return used_names(text), annotated_names(node)
        line = _import_of(name, value) or self._imported.get(name)
        if line is not None:
            self.imports[name] = line
            return nothing
        if name == "__file__":
            value = os.path.abspath(value)
        text_of_value = literal(value)
        if text_of_value is None or len(text_of_value) > MAX_CHARS:
            return None
        self.values[name] = f"{name} = {text_of_value}"
        return nothing

    def _definition(self, name: str, value: Any) -> tuple[int, Definition, str]:
        """Return the newest definition of a name that has run: a cell may have failed before."""
        found, ran = self._definitions[name], _source_of(value)
        return next((each for each in reversed(found) if each[2].strip() == ran), found[-1])

    def _check_current(self, cls: type) -> None:
        """Refuse a class that was defined anew since: its source may be gone."""
        name = cls.__qualname__
        if "." in name:
            outer = name.replace(".<locals>", "").rpartition(".")[0]
            raise JobError(
                f"{cls.__name__} is defined inside of {outer}, where no other program can find it. Define it "
                "at the top level."
            )
        if self.names.get(name) is not cls:
            raise JobError(
                f"{name} was defined anew since this job, or a class that it derives from, was made. Give "
                "the new class another name; or run the cells that use it again, and make the job anew:  "
                f"job = {self.cls.__name__}(...)"
            )
        if name not in self._definitions:
            raise JobError(
                f"The source of {name} can't be found: it is not at the top level of the script or of a "
                "cell, but inside of an if or the like. Move it there, or write it into a file, and train:  "
                f'mh.train("job.py:{self.cls.__name__}")'
            )

    def _unsaved(self, name: str, user: str) -> JobError:
        value = self.names[name]
        return JobError(
            f"{user} uses {name}, of type {type(value).__name__}, which can't be saved for the workers: only "
            "small values (numbers, texts, lists of them), imports, classes and functions can. Make it in a "
            f"method of {self.cls.__name__}, such as data(); or make it a field; or write the job into a "
            f'file, and train that:  mh.train("job.py:{self.cls.__name__}")'
        )

    def text(self, origin: str) -> str:
        """Return the text of the file."""
        parts = sorted(self.parts.values(), key=lambda part: part.at)
        values = list(self.values.values())
        modules = [
            name
            for name in ("logging", "pathlib", "torch")
            if any(f"{name}." in line for line in values)
        ]
        return "\n".join(
            [
                f'"""Saved by mh.train(): {self.cls.__name__} of {origin}, with what it uses of it."""\n',
                FUTURE,
                "import sys\n",
                *_adding(search_path()),
                *(f"import {name}" for name in modules),
                *sorted(set(self.imports.values())),
                *(["", *values] if values else []),
                *(f"\n\n{part.text}" for part in parts),
                "",
            ]
        )


def _adding(search_path: Sequence[str]) -> list[str]:
    """Return the lines that let the file find the modules that the program found."""
    listed = [f"    {path!r}," for path in search_path]
    return [
        "folders = [",
        *listed,
        "]",
        "sys.path[:0] = [f for f in folders if f not in sys.path]\n",
    ]


def used_names(text: str) -> set[str]:
    """Return the global names that code uses, wherever in it, annotations left out."""

    def walk(table: symtable.SymbolTable) -> Iterator[str]:
        top = table.get_type() == "module"
        for symbol in table.get_symbols():
            if symbol.is_referenced() and (top or symbol.is_global()):
                yield symbol.get_name()
        for inner in table.get_children():
            yield from walk(inner)

    return set(walk(symtable.symtable(FUTURE + text, "job", "exec")))


def annotated_names(node: ast.AST) -> set[str]:
    """Return the names in annotations."""
    annotations: list[ast.expr | None] = []
    for inner in ast.walk(node):
        if isinstance(inner, ast.arg | ast.AnnAssign):
            annotations.append(inner.annotation)
        elif isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef):
            annotations.append(inner.returns)
    return {
        name.id
        for annotation in annotations
        if annotation is not None
        for name in ast.walk(annotation)
        if isinstance(name, ast.Name)
    }


def _source_of(value: Any) -> str | None:
    """Return the source of the cell or script in which a function, or a method of a class, was defined."""
    own = vars(value).values() if isinstance(value, type) else (value,)
    for each in map(inspect.unwrap, own):
        code = getattr(each, "__code__", None)
        if code is not None and (lines := linecache.getlines(code.co_filename)):
            return "".join(lines).strip()
    return None


def _segment(source: str, node: Definition) -> str:
    """Return the lines of a definition, with its decorators."""
    first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
    assert node.end_lineno is not None
    return "\n".join(source.splitlines()[first - 1 : node.end_lineno])


def _imports(statement: ast.Import | ast.ImportFrom, package: str | None) -> dict[str, str]:
    """Return name to the line that imports it."""
    found = {}
    for alias in statement.names:
        renamed = f" as {alias.asname}" if alias.asname else ""
        if isinstance(statement, ast.Import):
            name = alias.asname or alias.name.partition(".")[0]
            found[name] = f"import {alias.name}{renamed}"
        elif alias.name != "*" and statement.module != "__future__":
            module = "." * statement.level + (statement.module or "")
            if statement.level:
                module = importlib.util.resolve_name(module, package)
            found[alias.asname or alias.name] = f"from {module} import {alias.name}{renamed}"
    return found


def _import_of(name: str, value: Any) -> str | None:
    """Return the line that imports a value, if it is a module or has a name in one."""
    if isinstance(value, types.ModuleType):
        if sys.modules.get(value.__name__) is not value:
            return None
        return f"import {value.__name__}" + ("" if value.__name__ == name else f" as {name}")
    home, own = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    if not isinstance(home, str) or not isinstance(own, str) or home == "__main__":
        return None
    if getattr(sys.modules.get(home), own, None) is not value:
        return None
    return f"from {home} import {own}" + ("" if own == name else f" as {name}")


def literal(value: Any) -> str | None:
    """Return code that makes an equal value; None if there is none."""
    if value is None or type(value) in (bool, int, str, bytes):
        return repr(value)
    if type(value) is float:
        return repr(value) if value == value and abs(value) != float("inf") else f"float('{value}')"
    if type(value) in (list, tuple, set, frozenset, dict):
        return _container(value)
    kind = f"{type(value).__module__}.{type(value).__name__}"
    if isinstance(value, Path):
        return f"pathlib.Path({str(value)!r})"
    if kind == "torch.dtype":
        return repr(value)
    if kind == "torch.device":
        return f"torch.device({str(value)!r})"
    if kind == "logging.Logger":
        return f"logging.getLogger({value.name!r})"
    return None


def _container(value: Any) -> str | None:
    pairs = value.items() if isinstance(value, dict) else ((each,) for each in value)
    texts = [[literal(part) for part in pair] for pair in pairs]
    if any(text is None for pair in texts for text in pair):
        return None
    inside = ", ".join(": ".join(map(str, pair)) for pair in texts)
    match value:
        case dict():
            return f"{{{inside}}}"
        case list():
            return f"[{inside}]"
        case tuple():
            return f"({inside},)" if len(value) == 1 else f"({inside})"
        case set() if value:
            return f"{{{inside}}}"
        case _:
            return f"{type(value).__name__}([{inside}])"


def search_path() -> list[str]:
    """Return where this program finds modules of its own, and the members may not."""
    paths = sysconfig.get_paths()
    installed = {Path(paths[name]).resolve() for name in ("stdlib", "purelib", "platlib")}
    installed |= {Path(folder).resolve() for folder in site.getsitepackages()}
    package = Path(manyhands.__file__).resolve().parents[1]
    found = []
    for entry in sys.path:
        path = Path(entry or os.getcwd()).resolve()
        if not path.is_dir() or path == package:
            continue
        if not any(path == folder or path.is_relative_to(folder) for folder in installed):
            found.append(str(path))
    return list(dict.fromkeys(found))
