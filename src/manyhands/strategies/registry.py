"""All strategies by name; turns a spec into a checked config, with the closest match in errors."""

from __future__ import annotations

import dataclasses
import shlex
import typing
from types import NoneType
from typing import Any

from manyhands.contract import Strategy
from manyhands.errors import SpecError, closest
from manyhands.strategies.allreduce import AllReduce
from manyhands.strategies.parameter_server import PsAsync, PsBackup, PsSsp, PsSync
from manyhands.strategies.single import Single
from manyhands.strategies.spec import Spec, SpecPart, Value, parse_spec

STRATEGIES: dict[str, type[Strategy]] = {
    cls.name: cls for cls in (Single, AllReduce, PsSync, PsAsync, PsSsp, PsBackup)
}

PLANNED = {
    "local": "allreduce",
    "diloco": "allreduce",
    "gossip": "ps:async",
    "sharded": "allreduce",
    "mesh": "allreduce",
}
"""Strategies that don't exist yet, and for each the nearest one that does."""
PLANNED_CODECS = ("int8", "fp8", "fp16", "bf16", "topk", "randomk", "powersgd", "signsgd", "onebit")
OTHER_NAMES = {
    **dict.fromkeys(
        ("ddp", "dp", "dataparallel", "horovod", "mirrored", "all-reduce"), "allreduce"
    ),
    **dict.fromkeys(("fsdp", "fsdp2", "zero", "zero1", "zero2", "zero3", "deepspeed"), "sharded"),
    **dict.fromkeys(("tp", "pp", "megatron", "pipeline", "tensor"), "mesh"),
    **dict.fromkeys(("localsgd", "local-sgd"), "local"),
    **dict.fromkeys(("asgd", "hogwild", "downpour"), "ps:async"),
    **dict.fromkeys(("none", "one", "cpu"), "single"),
}
"""Names that other frameworks use."""

REMOVED_OPTIONS = {
    "allreduce(drop)": "Use  --strategy ps:backup, which makes a step without its slowest workers."
}
"""Options that existed once, and what to use instead."""


def make_strategy(text: str) -> Strategy:
    """Make the config of a spec such as `allreduce(bucket_mb=10)`."""
    spec = parse_spec(text)
    cls = STRATEGIES.get(spec.strategy.name)
    if cls is None:
        raise SpecError(_no_strategy(spec.strategy.name))
    if spec.codecs:
        raise SpecError(_no_codec(text, spec))
    return cls(**_options(cls, spec.strategy))


def spec_of(config: Strategy) -> str:
    """Return the shortest spec that makes this config."""
    changed = {
        field.name: getattr(config, field.name)
        for field in dataclasses.fields(config)
        if getattr(config, field.name) != field.default
    }
    return str(SpecPart(config.name, changed))


def _no_strategy(name: str) -> str:
    """Say what to type instead."""
    there = f"There are: {', '.join(STRATEGIES)}."
    lower = name.lower()
    meant = OTHER_NAMES.get(lower, lower)
    called = "" if meant == lower else f"There is no strategy {name!r}: it is called {meant!r} here"
    if meant in PLANNED:
        subject = f"{called}, which" if called else f"The strategy {name!r}"
        return (
            f"{subject} is planned and doesn't exist yet. The nearest that works:  "
            f"--strategy {PLANNED[meant]}. {there}"
        )
    if called:
        return f"{called}. Type  --strategy {meant}. {there}"
    family = [known for known in STRATEGIES if known.startswith("ps:")]
    if lower in ("ps", "parameter-server", "parameterserver", "parameter_server"):
        return (
            f"{name!r} is a family of strategies: say how it treats slow workers, with --strategy "
            f"{', '.join(family[:-1])} or {family[-1]}. Most like all-reduce is ps:sync."
        )
    return f"There is no strategy {name!r}{closest(name, [*STRATEGIES, *PLANNED])} {there}"


def _no_codec(text: str, spec: Spec) -> str:
    names = [part.name for part in spec.codecs]
    unknown = [name for name in names if name.lower() not in PLANNED_CODECS]
    if unknown:
        known = closest(unknown[0], PLANNED_CODECS)
        planned = f"there is no codec {unknown[0]!r}{known} Codecs are planned. Today"
    else:
        planned = f"{' + '.join(names)} is planned. Today"
    return (
        f"{text}: {planned} {spec.strategy.name} sends plain gradients and can't be combined with "
        f"{' + '.join(names)}. Write  --strategy {shlex.quote(str(spec.strategy))}"
    )


def _options(cls: type[Strategy], part: SpecPart) -> dict[str, Any]:
    fields = {field.name for field in dataclasses.fields(cls)}
    hints = typing.get_type_hints(cls)
    for key, value in part.options.items():
        if instead := REMOVED_OPTIONS.get(f"{cls.name}({key})"):
            raise SpecError(f"{part}: the option {key!r} was removed. {instead}")
        if key not in fields:
            has = f"Its options: {', '.join(sorted(fields))}." if fields else "It has none."
            raise SpecError(f"{part}: {cls.name} has no option {key!r}{closest(key, fields)} {has}")
        if not _fits(value, hints[key]):
            raise SpecError(f"{part}: {key} must be {_kind(hints[key])}, and is {value!r}.")
    return dict(part.options)


def _fits(value: Value, kind: Any) -> bool:
    options = typing.get_args(kind)
    if typing.get_origin(kind) is typing.Literal:
        return value in options
    if options:
        return any(_fits(value, option) for option in options)
    if isinstance(value, bool):
        return kind is bool
    return isinstance(value, int | float if kind is float else kind)


def _kind(kind: Any) -> str:
    if options := typing.get_args(kind):
        of_literal = typing.get_origin(kind) is typing.Literal
        return " or ".join(map(str if of_literal else _kind, options))
    names = {int: "a whole number", float: "a number", bool: "true or false", NoneType: "none"}
    return names.get(kind, "a word")
