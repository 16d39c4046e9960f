"""As much of YAML as a manifest needs, written with comments for people. Pure.

A key that begins with "#" is a comment: it stands above the key that follows. `Flow` is a dict on one line,
`Script` a text of many lines as a literal block.
"""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

_PLAIN = re.compile(r"[A-Za-z/][\w./-]*")
_RESERVED = {"true", "false", "null", "yes", "no", "on", "off", "y", "n"}
"""What some reader of YAML takes for something else than a text."""


class Flow(dict[str, Any]):
    pass


class Script(str):
    pass


def render(document: Mapping[str, Any]) -> str:
    return "\n".join(_lines(document)) + "\n"


def _lines(value: Any) -> Iterator[str]:
    """The lines of a dict or a list, not indented."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            if key.startswith("#"):
                yield from (f"# {line}" for line in textwrap.wrap(inner, 92))
            else:
                yield from _entry(f"{_scalar(key)}:", inner, indent=2)
    else:
        for inner in value:
            if _is_block(inner) and not isinstance(inner, Script):
                first, *rest = _lines(inner)
                comments = [first] if first.startswith("#") else []
                while comments and rest and rest[0].startswith("#"):
                    comments.append(rest.pop(0))
                if comments:
                    first = rest.pop(0)
                yield from comments
                yield f"- {first}"
                yield from (f"  {line}" for line in rest)
            else:
                yield from _entry("-", inner, indent=2)


def _entry(head: str, value: Any, *, indent: int) -> Iterator[str]:
    if isinstance(value, Script):
        yield f"{head} |"
        yield from (" " * indent + line if line else "" for line in value.rstrip("\n").split("\n"))
    elif _is_block(value):
        yield head
        yield from (" " * indent + line for line in _lines(value))
    else:
        yield f"{head} {_flow(value)}"


def _is_block(value: Any) -> bool:
    """Whether it takes lines of its own."""
    if isinstance(value, Script):
        return True
    if isinstance(value, Flow) or not value or isinstance(value, str):
        return False
    if isinstance(value, Sequence):
        return any(isinstance(inner, Mapping | Script) for inner in value)
    return isinstance(value, Mapping)


def _flow(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_scalar(k)}: {_flow(v)}" for k, v in value.items()) + "}"
    if isinstance(value, Sequence) and not isinstance(value, str):
        return "[" + ", ".join(_flow(inner) for inner in value) + "]"
    return _scalar(value)


def _scalar(value: Any) -> str:
    if isinstance(value, str) and _PLAIN.fullmatch(value) and value.lower() not in _RESERVED:
        return value
    return json.dumps(value, ensure_ascii=False)
