"""The exception tree is as drawn in the module's docstring, with the exit codes shown there."""

from __future__ import annotations

import re

import pytest

from manyhands import errors
from manyhands.errors import ManyhandsError, closest

CLASSES = {
    name: value
    for name, value in vars(errors).items()
    if isinstance(value, type) and issubclass(value, Exception)
}


def drawn() -> dict[str, tuple[str | None, str]]:
    """Parse the docstring's tree: name to parent and exit code."""
    found: dict[str, tuple[str | None, str]] = {}
    above: list[str] = []
    for line in (errors.__doc__ or "").splitlines():
        match = re.match(r"([│├└─ ]*)(\w+) +(\d+|\*)", line)
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


def test_exit_codes_are_as_drawn() -> None:
    for name, (_, code) in drawn().items():
        if code != "*":
            assert CLASSES[name]("x").exit_code == int(code)
    assert errors.MemberError("x").exit_code == 1
    assert errors.MemberError("x", exit_code=137).exit_code == 137
    assert errors.Interrupted("x", exit_code=75).exit_code == 75


def test_every_error_has_its_message() -> None:
    for cls in CLASSES.values():
        error = cls("what was given, what is allowed")
        assert isinstance(error, ManyhandsError)
        assert str(error) == "what was given, what is allowed"


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
