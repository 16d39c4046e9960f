"""All strategies by name, and the way from a spec to a config: checked, with the closest match in errors."""

from __future__ import annotations

import dataclasses
import types
import typing
from typing import Any

from manyhands.errors import SpecError, closest
from manyhands.strategies.allreduce import AllReduce
from manyhands.strategies.base import Strategy
from manyhands.strategies.ps import PsAsync, PsBackup, PsSsp, PsSync
from manyhands.strategies.single import Single
from manyhands.strategies.spec import Part, Value, parse_spec

STRATEGIES: dict[str, type[Strategy]] = {
    cls.name: cls for cls in (Single, AllReduce, PsSync, PsAsync, PsSsp, PsBackup)
}

_UNIONS = (types.UnionType, typing.Union)
"""`int | None` is the one, `int | Literal["auto"]` the other."""


def make_strategy(text: str) -> Strategy:
    """The config of a spec such as `allreduce(bucket_mb=10)`."""
    spec = parse_spec(text)
    cls = STRATEGIES.get(spec.strategy.name)
    if cls is None:
        raise SpecError(
            f"There is no strategy {spec.strategy.name!r}{closest(spec.strategy.name, STRATEGIES)} "
            f"There are: {', '.join(STRATEGIES)}."
        )
    if spec.codecs:
        names = " + ".join(part.name for part in spec.codecs)
        raise SpecError(
            f"{text}: {cls.name} sends plain gradients and can't be combined with {names}. "
            f"Write  {spec.strategy}"
        )
    return cls(**_options(cls, spec.strategy))


def spec_of(strategy: Strategy) -> str:
    """The shortest spec that makes this config."""
    changed = {
        field.name: getattr(strategy, field.name)
        for field in dataclasses.fields(strategy)
        if getattr(strategy, field.name) != field.default
    }
    return str(Part(strategy.name, changed))


def _options(cls: type[Strategy], part: Part) -> dict[str, Any]:
    fields = {field.name for field in dataclasses.fields(cls)}
    hints = typing.get_type_hints(cls)
    for key, value in part.options.items():
        if key not in fields:
            has = f"Its options: {', '.join(sorted(fields))}." if fields else "It has none."
            raise SpecError(f"{part}: {cls.name} has no option {key!r}{closest(key, fields)} {has}")
        if not _fits(value, hints[key]):
            raise SpecError(f"{part}: {key} must be {_kind(hints[key])}, and is {value!r}.")
    return dict(part.options)


def _fits(value: Value, kind: Any) -> bool:
    if typing.get_origin(kind) in _UNIONS:
        return any(_fits(value, option) for option in typing.get_args(kind))
    if typing.get_origin(kind) is typing.Literal:
        return value in typing.get_args(kind)
    if kind is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if kind is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, kind)


def _kind(kind: Any) -> str:
    if typing.get_origin(kind) in _UNIONS:
        return " or ".join(_kind(option) for option in typing.get_args(kind))
    if typing.get_origin(kind) is typing.Literal:
        return " or ".join(str(option) for option in typing.get_args(kind))
    names = {
        int: "a whole number",
        float: "a number",
        bool: "true or false",
        types.NoneType: "none",
    }
    return names.get(kind, "a word")
