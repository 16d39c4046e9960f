"""Measure how easily the code reads, on any commit.

    python tools/measure.py                    the working tree
    python tools/measure.py 904ab69 HEAD       two commits, side by side
    python tools/measure.py --list modes HEAD  what is behind one row

Prints a Markdown table with a column per commit. A commit is unpacked into a temporary folder and parsed,
never imported, so every row is counted from the source alone:

code          lines of src/ that are not blank, comments or docstrings
repeated      class names that occur twice or more
classes       classes above the limits of class_limits.py
modes         mode conditions: see MODE_FLAGS
config        members of Strategy, the config half of the contract
learner       members of Learner, the run-time half
flags         how many classes declare the same flag of a strategy: see STRATEGY_FLAGS
untyped       places with `dict[str, Any]`, `Mapping[str, Any]` or `object` instead of `Any`
kinds         message kinds that are told apart by a string: see _message_kinds
longest       lines of the longest function, and its name
functions     functions of more than 60 lines
metaphors     names of modules and classes that a newcomer would have to look up: see METAPHORS
"""

from __future__ import annotations

import argparse
import ast
import subprocess
import tarfile
import tempfile
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path

from class_limits import over_limits, repeated_names

ROOT = Path(__file__).resolve().parent.parent
LONG_FUNCTION = 60

MODE_PACKAGES = ("ps", "strategies", "collectives")
"""Where mode conditions are counted. `collectives` was a part of `strategies`."""

MODE_FLAGS = {
    "shared": "blocks or rows are in the memory of the host",
    "travels": "a worker's gradients arrive as messages",
    "for_all": "every update has the gradients of all workers",
    "turns": "a worker takes part in rounds in shared memory",
    "two_phase": "an update is prepared by all servers before it is committed",
    "lockstep": "every worker does every step",
    "one_host": "all members of the view are on one host",
    "spans_hosts": "the run may use more than one host",
}
"""Flags that say how members agree, and what each means if true.

A mode condition is the test of an `if`, `while`, `assert`, conditional expression or comprehension, or an
`and` or `or`, that mentions at least one of these as a name or an attribute, with or without a leading
underscore. Conditions on one line count once.
"""

STRATEGY_FLAGS = (
    *("lockstep", "elastic", "needs_coordinator", "default_workers", "shares_memory"),
    *("updates_whole_batches", "can_shrink", "equals_single"),
    *("goes_on", "one_batch", "may_shrink"),  # former names
)
"""Facts about a strategy that the coordinator, the command line or the tests read."""

MESSAGE_KEYS = ("kind", "order", "what")
SENDERS = ("say", "_say", "_report", "_tell")

METAPHORS = """
Estate Keep Council settle Door Guest Asking heads Nonsense Early Lanes Trailer Uplink parcels Material
Holding Lead Word Given Bell Serving Turns Terms Ticker ticks Landing Station catching_up peers Lender
Conductor Crew handout InStep InParts Course Syllabus Shelf Brakes facts tally pace parts late Manner
Trainee Attendance Ground Reach Post posts on_ray berth far wish line strangers dialling meeting silence
proof checkup judge basket held homes foresight moving wording Birth places ps/Host ps/Run ps/Table
"""
"""Former names of modules and classes; `ps/Host` counts in ps/ only. Case does not matter."""


class Source:
    """The parsed files of src/manyhands in one tree."""

    def __init__(self, root: Path) -> None:
        self.package = root / "src" / "manyhands"
        self.texts = {
            path.relative_to(self.package): path.read_text()
            for path in sorted(self.package.rglob("*.py"))
        }
        self.trees = {path: ast.parse(text) for path, text in self.texts.items()}

    def nodes(self) -> Iterator[tuple[Path, ast.AST]]:
        for path, tree in self.trees.items():
            for node in ast.walk(tree):
                yield path, node


def code_lines(source: Source) -> list[str]:
    """Return `path: number` for each file; the numbers add up to the lines of code."""
    return [
        f"{path}: {_count_code(text, source.trees[path])}" for path, text in source.texts.items()
    ]


def _count_code(text: str, tree: ast.Module) -> int:
    prose: set[int] = set()
    for node in ast.walk(tree):
        # A string that is a statement: the docstring of a module, class, function or attribute.
        if isinstance(node, ast.Expr) and isinstance(getattr(node.value, "value", None), str):
            prose.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return sum(
        1
        for number, line in enumerate(text.splitlines(), start=1)
        if number not in prose and line.strip() and not line.lstrip().startswith("#")
    )


def mode_conditions(source: Source) -> list[str]:
    found: dict[tuple[Path, int], str] = {}
    for path, node in source.nodes():
        if path.parts[0] not in MODE_PACKAGES:
            continue
        for condition in _conditions(node):
            if {name.lstrip("_") for name in _names(condition)} & set(MODE_FLAGS):
                found.setdefault((path, condition.lineno), ast.unparse(condition))
    return [f"{path}:{line}: {text}" for (path, line), text in sorted(found.items())]


def _conditions(node: ast.AST) -> list[ast.expr]:
    match node:
        case ast.If() | ast.IfExp() | ast.While() | ast.Assert():
            return [node.test]
        case ast.comprehension():
            return node.ifs
        case ast.BoolOp():
            return [node]
    return []


def _names(expression: ast.expr) -> Iterator[str]:
    for node in ast.walk(expression):
        if isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.Attribute):
            yield node.attr


def contract_members(source: Source, name: str) -> list[str]:
    """Return the public members of a class of the contract."""
    for path, node in source.nodes():
        bases = [ast.unparse(base) for base in getattr(node, "bases", [])]
        if isinstance(node, ast.ClassDef) and node.name == name and "Protocol" not in bases:
            members = {}
            for each in node.body:
                if isinstance(each, ast.FunctionDef):
                    members[each.name] = each
                elif isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name):
                    members[each.target.id] = each
            return [f"{path}: {member}" for member in members if not member.startswith("_")]
    return []


def most_declared_flag(source: Source) -> list[str]:
    """Return the declarations of the flag that most classes declare: a field, a constant or a property."""
    found: dict[str, list[str]] = {name: [] for name in STRATEGY_FLAGS}
    for path, node in source.nodes():
        for each in node.body if isinstance(node, ast.ClassDef) else ():
            match each:
                case ast.AnnAssign(target=ast.Name(id=name)) | ast.FunctionDef(name=name):
                    if name in found:
                        found[name].append(f"{path}: {node.name}.{name}")
    return max(found.values(), key=len)


def untyped_places(source: Source) -> list[str]:
    return [
        f"{path}:{node.lineno}: {ast.unparse(node)}"
        for path, node in source.nodes()
        if isinstance(node, ast.Subscript)
        and ast.unparse(node)
        in (*("dict[str, Any]", "Mapping[str, Any]", "dict[str, object]", "Mapping[str, object]"),)
    ]


def _message_kinds(source: Source) -> list[str]:
    """Return the strings by which messages are told apart.

    A kind is the value of the key "kind", "order" or "what" in a dict or a match pattern, of an argument with
    such a name in a call, a string that a name `kind` is compared with, or the first argument of a function
    that sends (SENDERS). Files for Kubernetes have a "kind" too, and don't count.
    """
    kinds: set[str] = set()

    def add(path: Path, value: ast.AST | None) -> None:
        if isinstance(value, ast.Constant) and isinstance(value.value, str):
            kinds.add(f"{path.parts[0]}: {value.value}")

    for path, node in source.nodes():
        if "launch" in str(path) and "launchers" not in path.parts:
            continue
        match node:
            case ast.Dict():
                for key, value in zip(node.keys, node.values, strict=True):
                    if isinstance(key, ast.Constant) and key.value in MESSAGE_KEYS:
                        add(path, value)
            case ast.MatchMapping():
                for key, pattern in zip(node.keys, node.patterns, strict=True):
                    if isinstance(key, ast.Constant) and key.value in MESSAGE_KEYS:
                        add(path, getattr(pattern, "value", None))
            case ast.Call():
                sends = getattr(node.func, "attr", "") in SENDERS
                named = [each.value for each in node.keywords if each.arg in MESSAGE_KEYS]
                for value in [*node.args[:1], *named] if sends else ():
                    add(path, value)
            case ast.Compare(left=ast.Name(id="kind") | ast.Attribute(attr="kind")):
                if path.parts[0] == "ps":
                    for value in node.comparators:
                        add(path, value)
    return sorted(kinds)


def long_functions(source: Source) -> list[tuple[int, str]]:
    found = [
        (node.end_lineno - node.lineno + 1, f"{path}: {node.name}")
        for path, node in source.nodes()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno
    ]
    return sorted(found, reverse=True)


def metaphors(source: Source) -> list[str]:
    known = set(METAPHORS.lower().split())
    names = [(path, path.stem) for path in source.trees]
    names += [(path / "__init__.py", path.name) for path in {p.parent for p in source.trees}]
    names += [(path, node.name) for path, node in source.nodes() if isinstance(node, ast.ClassDef)]
    return sorted(
        f"{path}: {name}"
        for path, name in names
        if {name.lower(), f"{path.parts[0]}/{name}".lower()} & known
    )


def rows_of(source: Source) -> dict[str, tuple[str, list[str]]]:
    """Return each row's value and what is behind it."""
    code = code_lines(source)
    functions = long_functions(source)
    lines, name = functions[0]
    rows = {
        "code": (f"{sum(int(line.rpartition(' ')[2]) for line in code):,}", code),
        "longest": (f"{lines} ({name})", [f"{n} {name}" for n, name in functions[:20]]),
    }
    counted = {
        "repeated": [f"{name}: {paths}" for name, paths in repeated_names(source.package).items()],
        "classes": [f"{name}: {excess}" for name, excess in over_limits(source.package).items()],
        "modes": mode_conditions(source),
        "config": contract_members(source, "Strategy"),
        "learner": contract_members(source, "Learner"),
        "flags": most_declared_flag(source),
        "untyped": untyped_places(source),
        "kinds": _message_kinds(source),
        "functions": [f"{n} {name}" for n, name in functions if n > LONG_FUNCTION],
        "metaphors": metaphors(source),
    }
    return rows | {key: (str(len(found)), found) for key, found in counted.items()}


LABELS = {
    "code": "lines of code in src/",
    "repeated": "class names that occur twice",
    "classes": "classes above the limits",
    "modes": "mode conditions in ps/, strategies/, collectives/",
    "config": "members of the contract, config",
    "learner": "members of the contract, learner",
    "flags": "classes that declare the same flag of a strategy",
    "untyped": "places with `dict[str, Any]`",
    "kinds": "message kinds told apart by a string",
    "longest": "longest function, in lines",
    "functions": f"functions of more than {LONG_FUNCTION} lines",
    "metaphors": "modules and classes named by metaphors",
}


def measure(commit: str | None) -> dict[str, tuple[str, list[str]]]:
    if commit is None:
        return rows_of(Source(ROOT))
    packed = subprocess.run(
        ["git", "-C", str(ROOT), "archive", commit, "src"], check=True, capture_output=True
    ).stdout
    with tempfile.TemporaryDirectory() as folder:
        with tarfile.open(fileobj=BytesIO(packed)) as tar:
            tar.extractall(folder, filter="data")
        return rows_of(Source(Path(folder)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("commits", nargs="*", metavar="COMMIT", help="default: the working tree")
    parser.add_argument("--list", choices=list(LABELS), help="print what is behind one row")
    arguments = parser.parse_args()
    columns = {commit or "now": measure(commit) for commit in arguments.commits or [None]}
    if arguments.list:
        for commit, rows in columns.items():
            print(f"{commit}: {rows[arguments.list][0]}", *rows[arguments.list][1], sep="\n  ")
        return
    print("|", " | ".join(["measured", *columns]), "|")
    print("|", " | ".join(["---"] * (len(columns) + 1)), "|")
    for key, label in LABELS.items():
        print("|", " | ".join([label, *(rows[key][0] for rows in columns.values())]), "|")


if __name__ == "__main__":
    main()
