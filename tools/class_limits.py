"""Limits on classes, shared by tests/unit/test_classes.py and measure.py.

A class has at most 20 public methods, assigns at most 15 attributes on `self`, and its constructor takes at
most 8 arguments. Dataclasses and named tuples may have any number of fields.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

MAX_PUBLIC_METHODS = 20
MAX_ATTRIBUTES = 15
MAX_ARGUMENTS = 8


def classes(package: Path) -> Iterator[tuple[Path, ast.ClassDef]]:
    """Yield every class of the package, with its path in it."""
    for path in sorted(package.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                yield path.relative_to(package), node


def repeated_names(package: Path) -> dict[str, list[str]]:
    """Return class names that occur more than once, with the files."""
    places = defaultdict(list)
    for path, node in classes(package):
        places[node.name].append(str(path))
    return {name: paths for name, paths in places.items() if len(paths) > 1}


def over_limits(package: Path) -> dict[str, str]:
    """Return the classes above a limit, with the file and the limits that each exceeds."""
    return {
        node.name: f"{path}: {', '.join(excess)}"
        for path, node in classes(package)
        if (excess := exceeded(node))
    }


def exceeded(node: ast.ClassDef) -> list[str]:
    methods = [each for each in node.body if isinstance(each, ast.FunctionDef)]
    public = [each for each in methods if not each.name.startswith("_")]
    found = []
    if len(public) > MAX_PUBLIC_METHODS:
        found.append(f"{len(public)} public methods")
    if is_plain_data(node):
        return found
    attributes = {
        target.attr
        for method in methods
        for target in ast.walk(method)
        if isinstance(target, ast.Attribute)
        and isinstance(target.ctx, ast.Store)
        and isinstance(target.value, ast.Name)
        and target.value.id == "self"
    }
    if len(attributes) > MAX_ATTRIBUTES:
        found.append(f"{len(attributes)} attributes")
    for method in methods:
        arguments = len(method.args.args) + len(method.args.kwonlyargs) - 1
        if method.name == "__init__" and arguments > MAX_ARGUMENTS:
            found.append(f"{arguments} constructor arguments")
    return found


def is_plain_data(node: ast.ClassDef) -> bool:
    """If true, the class is a dataclass or NamedTuple: its fields are its constructor's arguments."""
    marks = [ast.unparse(each) for each in (*node.decorator_list, *node.bases)]
    return any("dataclass" in mark or "NamedTuple" in mark for mark in marks)
