"""Limits on classes: sizes that one can keep in mind, and names that mean one thing."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import manyhands

HOME = Path(manyhands.__file__).parent
FILES = sorted(HOME.rglob("*.py"))

MAX_PUBLIC_METHODS = 20
MAX_ATTRIBUTES = 15
MAX_ARGUMENTS = 8

EXCEPTIONS: dict[str, str] = {
    "Learner": "to be split",
    "Coordinator": "to be split",
    "Driver": "to be split",
    "Membership": "to be split",
    "TrainingPlan": "to be split",
    "LocalTables": "to be split",
    "TableStore": "to be split",
    "AgentLauncher": "to be split",
    "Member": "to be split",
    "Acceptor": "to be split",
    "Client": "to be split",
    "PsLearner": "to be split",
    "RoundTable": "to be split",
    "Server": "to be split",
    "ServerState": "to be split",
    "UpdatePipeline": "to be split",
    "AllReduceLearner": "to be split",
    "Link": "to be split",
    "Listener": "to be split",
    "Worker": "to be split",
}
"""Class to the reason why it is larger."""


def classes() -> Iterator[tuple[Path, ast.ClassDef]]:
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                yield path.relative_to(HOME), node


def is_plain_data(node: ast.ClassDef) -> bool:
    """Whether it is a dataclass or NamedTuple, whose fields are its constructor's arguments."""
    marks = [ast.unparse(each) for each in (*node.decorator_list, *node.bases)]
    return any("dataclass" in mark or "NamedTuple" in mark for mark in marks)


def too_large(node: ast.ClassDef) -> list[str]:
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


def test_classes_are_small() -> None:
    found = {
        node.name: f"{path}: {large}" for path, node in classes() if (large := too_large(node))
    }
    assert set(found) == set(EXCEPTIONS), "\n".join(
        f"{name}: {what}" for name, what in found.items() if name not in EXCEPTIONS
    )


def test_no_class_name_occurs_twice() -> None:
    places = defaultdict(list)
    for path, node in classes():
        places[node.name].append(str(path))
    assert not {name: paths for name, paths in places.items() if len(paths) > 1}
