"""The language of specs: `name(option=value, ...) + codec(option=value) + ...`. Pure.

spec   = part ("+" part)*          the first names the strategy, the rest what is on the wire
part   = name ["(" [option ("," option)*] ")"]
option = key "=" value
name   = letters, digits, "_" and "-", with ":" between words: ps:async
value  = a number, true, false, none, or a word
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field

from manyhands.errors import SpecError

Value = int | float | bool | str | None

_NAME = r"[A-Za-z][\w-]*(?::[A-Za-z][\w-]*)*"
_KEY = r"[A-Za-z_]\w*"
_VALUE = r"[^\s,()=+]+(?:\+\d+)?"  # 1e+3 has a plus of its own
_WORDS: dict[str, Value] = {"true": True, "false": False, "none": None}


@dataclass(frozen=True)
class SpecPart:
    name: str
    options: Mapping[str, Value] = field(default_factory=dict)

    def __str__(self) -> str:
        inside = ",".join(f"{key}={_show(value)}" for key, value in self.options.items())
        return f"{self.name}({inside})" if inside else self.name


@dataclass(frozen=True)
class Spec:
    strategy: SpecPart
    codecs: tuple[SpecPart, ...] = ()

    def __str__(self) -> str:
        return "+".join(str(part) for part in (self.strategy, *self.codecs))


def parse_spec(text: str) -> Spec:
    """Parse a spec; an error points at the character where parsing failed."""
    reader = _Reader(text)
    parts = [reader.part()]
    while reader.accept("+"):
        parts.append(reader.part())
    if not reader.at_end:
        raise reader.error("expected '+', '(' or the end")
    return Spec(parts[0], tuple(parts[1:]))


class _Reader:
    def __init__(self, text: str) -> None:
        self._text = text
        self._at = len(text) - len(text.lstrip())

    @property
    def at_end(self) -> bool:
        return self._at == len(self._text)

    def part(self) -> SpecPart:
        name = self._match(_NAME, "a name such as allreduce")
        options: dict[str, Value] = {}
        if self.accept("(") and not self.accept(")"):
            while True:
                start = self._at
                key = self._match(_KEY, "an option such as bucket_mb=10")
                if key in options:
                    self._at = start
                    raise self.error(f"{key} was given twice; expected it once")
                if not self.accept("="):
                    raise self.error(f"expected '=' after {key}")
                options[key] = _value(self._match(_VALUE, f"a value for {key}"))
                if self.accept(")"):
                    break
                if not self.accept(","):
                    raise self.error("expected ',' or ')'")
        return SpecPart(name, options)

    def accept(self, symbol: str) -> bool:
        return self._take(re.escape(symbol)) is not None

    def error(self, what: str) -> SpecError:
        return SpecError(
            f"The strategy {self._text!r} does not parse: {what}.\n"
            f"    {self._text}\n    {' ' * self._at}^\n"
            "Write it like  allreduce  or  allreduce(bucket_mb=10)."
        )

    def _match(self, pattern: str, wanted: str) -> str:
        found = self._take(pattern)
        if found is None:
            raise self.error(f"expected {wanted}")
        return found

    def _take(self, pattern: str) -> str | None:
        """Read what matches and the space behind it, or nothing."""
        found = re.compile(rf"({pattern})\s*").match(self._text, self._at)
        if found is None:
            return None
        self._at = found.end()
        return found.group(1)


def _value(text: str) -> Value:
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    for kind in (int, float):
        with suppress(ValueError):
            return kind(text)
    return text


def _show(value: Value) -> str:
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)
