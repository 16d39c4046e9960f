"""Layers: imports point down, few packages read the environment, torch is imported late."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import manyhands

HOME = Path(manyhands.__file__).parent
FILES = sorted(HOME.rglob("*.py"))

LAYERS = [
    {"__main__"},
    {"cli"},
    {"api"},
    {"coordinator", "worker"},
    {"strategies"},
    {"ps"},
    {"collectives"},
    {"codecs"},
    {"compute"},
    {"word2vec"},
    {"embeddings"},
    {"doctor", "launch", "lab", "control"},
    {"transport", "hosts", "runs", "events"},
    {"contract"},
    {"costs", "job", "job_length", "errors", "measure", "pairs", "ranges", "threads", "__init__"},
]
"""From the top down. `data` may import only errors and job; `testing` may import anything."""


def package_of(path: Path) -> str:
    """Return the package below `manyhands`, or the module's own name."""
    return path.relative_to(HOME).parts[0].removesuffix(".py")


def for_types_only(tree: ast.Module) -> set[ast.AST]:
    """Return every node under `if TYPE_CHECKING:`."""
    return {
        inner
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for statement in node.body
        for inner in ast.walk(statement)
    }


def imported(path: Path, *, types: bool) -> Iterator[tuple[int, str]]:
    """Yield line and package of each import from manyhands, anywhere in the file."""
    tree = ast.parse(path.read_text())
    hidden = set() if types else for_types_only(tree)
    for node in ast.walk(tree):
        if node in hidden:
            continue
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: write imports in full"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        for name in names:
            parts = name.split(".")
            if parts[0] == "manyhands":
                inside = parts[1] if len(parts) > 1 else "__init__"
                known = (HOME / inside).is_dir() or (HOME / f"{inside}.py").is_file()
                yield node.lineno, inside if known else "__init__"


def layer(package: str) -> int:
    return next(number for number, packages in enumerate(LAYERS) if package in packages)


def test_every_package_has_a_layer() -> None:
    packages = {package_of(path) for path in FILES}
    assert packages - {"data", "testing"} == set().union(*LAYERS)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(HOME)))
def test_imports_point_down(path: Path) -> None:
    here = package_of(path)
    wrong = []
    # The contract names types of higher layers, for type checkers only.
    for line, package in imported(path, types=here != "contract"):
        if package == here or here == "testing":
            continue
        if here == "__init__":
            # It exports their names, lazily.
            fine = package in ("api", "data", "embeddings", "errors", "job", "measure", "word2vec")
        elif here == "data":
            fine = package in ("errors", "job")
        else:
            fine = package not in ("data", "testing") and layer(package) >= layer(here)
        if not fine:
            wrong.append(f"line {line}: {here} imports {package}")
    assert not wrong


def test_no_two_packages_import_each_other() -> None:
    """Not even inside a layer. Imports for type checkers do not count."""
    graph: dict[str, set[str]] = {}
    for path in FILES:
        here = package_of(path)
        if here != "__init__":
            packages = {package for _, package in imported(path, types=False)}
            graph.setdefault(here, set()).update(packages - {here, "__init__"})
    order = list(TopologicalSorter(graph).static_order())
    assert order.index("errors") < order.index("transport") < order.index("hosts")


def reads_environment(path: Path) -> list[int]:
    tree = ast.parse(path.read_text())
    return [
        node.lineno
        for node in ast.walk(tree)
        if (isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv", "environb"))
        or (isinstance(node, ast.ImportFrom) and node.module == "os" and _names_environ(node))
    ]


def _names_environ(node: ast.ImportFrom) -> bool:
    return any(alias.name in ("environ", "getenv") for alias in node.names)


def test_few_packages_read_the_environment() -> None:
    """Options come from hosts; data finds its own folder there, and testing passes it on."""
    readers = {path.relative_to(HOME) for path in FILES if reads_environment(path)}
    assert {path.parts[0] for path in readers} <= {
        "hosts",
        "collectives",
        "data",
        "doctor",
        "lab",
        "testing",
    }


@pytest.mark.parametrize("module", ["manyhands", "manyhands.cli.main", "manyhands.coordinator.run"])
def test_what_starts_without_torch(module: str) -> None:
    code = f"import sys, {module}; print(*sorted(n for n in sys.modules if '.' not in n))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert not {"torch", "numpy", "tensorboard", "sklearn"} & set(done.stdout.split())


def test_every_listed_name_can_be_imported() -> None:
    for name in manyhands.__all__:
        assert getattr(manyhands, name) is not None
    assert dir(manyhands) == sorted(manyhands.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nonesuch'"):
        _ = manyhands.nonesuch


def test_every_lazy_name_is_listed() -> None:
    """The names for type checkers, the names loaded on first use and `__all__` are the same."""
    tree = ast.parse((HOME / "__init__.py").read_text())
    shown = {
        alias.asname or alias.name
        for node in for_types_only(tree)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert shown | {"__version__"} == set(manyhands.__all__)
    assert set(manyhands._HOMES) <= set(manyhands.__all__)


def test_each_file_says_what_it_is() -> None:
    for path in FILES:
        text = path.read_text()
        if text.strip():
            assert ast.get_docstring(ast.parse(text)), f"{path} has no docstring"


UNSAFE = {"pickle": {"load", "loads", "Unpickler"}, "torch": {"load"}, "dcp": {"load"}}
"""Functions that run code from a file, by module."""


def test_only_the_safe_reader_unpickles() -> None:
    """Any other reader of a checkpoint would run untrusted code."""
    found = []
    for path in FILES:
        text = path.read_text()
        for node in ast.walk(ast.parse(text)):
            match node:
                case ast.Attribute(value=ast.Name(id=module), attr=name) if name in UNSAFE.get(
                    module, ()
                ):
                    found.append(f"{path.relative_to(HOME)}: {ast.unparse(node)}")
        assert "FileSystemReader" not in text, f"{path}: use runs/safe_reader.py"
    # Loader processes run the job's code anyway, and speak with their worker alone, over a socket pair.
    loaders = {"compute/loaders.py", "compute/loader_process.py"}
    assert {entry.partition(":")[0] for entry in found} == {"runs/safe_reader.py", *loaders}, found
