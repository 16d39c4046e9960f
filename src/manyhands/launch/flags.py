"""Flags of `manyhands launch`: each field of a job declares its flag, its help and the values it accepts.

The command line adds the flags to its parser (`add_flags`), and a job checks its own fields (`check_fields`).
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from dataclasses import MISSING, Field, dataclass, field, fields
from typing import Any

from manyhands.errors import UsageError


@dataclass(frozen=True)
class Flag:
    group: str
    """The heading in the help."""
    name: str
    metavar: str
    help: str = ""
    pattern: str = ""
    """A regular expression for the value; empty: any line of text."""
    example: str = ""
    """A value that matches the pattern; empty: the default does."""
    least: int = field(default=1, kw_only=True)
    """The smallest allowed number."""


def flag(*declaration: str, default: Any = None, least: int = 1) -> Any:
    """Declare a field that a Flag sets; the flag is required if the default is MISSING."""
    return field(default=default, metadata={"flag": Flag(*declaration, least=least)})


def _flags(job: Any) -> Iterator[tuple[Field[Any], Flag]]:
    return ((each, each.metadata["flag"]) for each in fields(job) if each.metadata)


def add_flags(parser: argparse.ArgumentParser, job_type: Any) -> None:
    """Add the flags of all fields, under their headings."""
    groups: dict[str, Any] = {}
    for each, its in _flags(job_type):
        if its.group not in groups:
            groups[its.group] = parser.add_argument_group(its.group)
        help, default, required = its.help, each.default, each.default is MISSING
        if default and not required:
            help = f"{help} (default: {default})"
        groups[its.group].add_argument(
            its.name,
            dest=each.name,
            metavar=its.metavar,
            help=help,
            type=int if str(each.type).startswith("int") else str,
            action="append" if default == () else "store",
            default=[] if default == () else default,
            required=required,
        )


def check_fields(job: Any) -> None:
    for each, its in _flags(job):
        value = getattr(job, each.name)
        for one in value if isinstance(value, tuple) else (value,):
            if isinstance(one, int) and one < its.least:
                raise UsageError(f"{its.name} {one}: it must be at least {its.least}.")
            if isinstance(one, str) and its.pattern:
                matching(its.name, one, its.pattern, its.example or str(each.default))
            elif isinstance(one, str):
                one_line(its.name, one)


def one_line(name: str, text: str) -> None:
    """Refuse an empty value, line breaks and other control characters."""
    if not text.strip():
        raise UsageError(f"{name} is empty.")
    if not text.isprintable():
        raise UsageError(f"{name} {text!r}: line breaks and control characters are not allowed.")


def matching(name: str, text: str, pattern: str, example: str) -> None:
    if not re.fullmatch(pattern, text):
        raise UsageError(f"{name} {text!r}: it must look like {example}.")
