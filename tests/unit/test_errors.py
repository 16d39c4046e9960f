"""The exception tree: drawn in its docstring as it is, each with the exit code that it says."""

from __future__ import annotations

import re

import pytest

from manyhands import errors
from manyhands.errors import ManyhandsError, closest

CLASSES = {name: getattr(errors, name) for name in errors.__all__ if name != "closest"}


def drawn() -> dict[str, tuple[str | None, str]]:
    """Each name of the docstring's tree: its parent there, and its exit code."""
    found: dict[str, tuple[str | None, str]] = {}
    above: list[str] = []
    for line in (errors.__doc__ or "").splitlines():
        match = re.match(r"([│├└─ ]*)(\w+) +(\d+|\*)   \S", line)
        if match:
            depth = len(match.group(1)) // 4
            del above[depth:]
            found[match.group(2)] = (above[-1] if above else None, match.group(3))
            above.append(match.group(2))
    return found


def test_the_tree_is_as_drawn() -> None:
    tree = drawn()
    assert tree.keys() == CLASSES.keys()
    for name, (parent, _) in tree.items():
        assert CLASSES[name].__bases__[0].__name__ == (parent or "Exception")


def test_every_error_has_the_exit_code_that_is_drawn() -> None:
    for name, (_, code) in drawn().items():
        if code != "*":
            assert CLASSES[name]("x").exit_code == int(code)
    assert errors.MemberError("x").exit_code == 1
    assert errors.MemberError("x", exit_code=137).exit_code == 137
    assert errors.Interrupted("x", exit_code=75).exit_code == 75


def test_every_error_of_ours_is_exported_and_says_its_message() -> None:
    ours = {name for name, value in vars(errors).items() if _is_error(value)}
    assert ours == CLASSES.keys()
    for cls in CLASSES.values():
        extra = {"exit_code": 1} if cls is errors.Interrupted else {}
        error = cls("what was given, what is allowed", **extra)
        assert isinstance(error, ManyhandsError)
        assert str(error) == "what was given, what is allowed"


def _is_error(value: object) -> bool:
    return isinstance(value, type) and issubclass(value, Exception)


@pytest.mark.parametrize(
    ("name", "ending"),
    [
        ("alreduce", "; did you mean 'allreduce'?"),
        ("ALLREDUCE", "; did you mean 'allreduce'?"),
        ("singel", "; did you mean 'single'?"),
        ("zzz", "."),
        ("", "."),
    ],
)
def test_the_closest_name(name: str, ending: str) -> None:
    assert closest(name, ["single", "allreduce"]) == ending
    assert closest(name, iter(())) == "."
