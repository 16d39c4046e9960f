"""All strategies by name; turns a spec into a checked config, with the closest match in errors."""

from __future__ import annotations

import dataclasses
import shlex
import typing
from types import NoneType
from typing import Any

from manyhands.codecs.codec import PLAIN, Codec
from manyhands.codecs.registry import CODECS
from manyhands.codecs.registry import PLANNED as PLANNED_CODECS
from manyhands.contract import Strategy
from manyhands.errors import SpecError, closest
from manyhands.strategies.allreduce import AllReduce
from manyhands.strategies.local import Local
from manyhands.strategies.parameter_server import PsAsync, PsBackup, PsSsp, PsSync
from manyhands.strategies.single import Single
from manyhands.strategies.spec import Spec, SpecPart, Value, parse_spec

STRATEGIES: dict[str, type[Strategy]] = {
    cls.name: cls for cls in (Single, AllReduce, Local, PsSync, PsAsync, PsSsp, PsBackup)
}

CODEC_FIELD = "codec"
"""The field of a strategy that takes codecs. It is not an option: `+ NAME` sets it."""

PLANNED = {
    "diloco": "local",
    "gossip": "local",
    "sharded": "allreduce",
    "mesh": "allreduce",
}
"""Strategies that don't exist yet, and for each the nearest one that does."""
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
    """Make the config of a spec such as `allreduce(bucket_mb=10)` or `allreduce + int8`."""
    spec = parse_spec(text)
    cls = STRATEGIES.get(spec.strategy.name)
    if cls is None:
        raise SpecError(_no_strategy(spec.strategy.name))
    config = cls(**_options(cls, spec.strategy))
    if not spec.codecs:
        return config
    codec = _make_codec(config, spec)
    if takes_codec(cls):
        return with_codec(config, codec)
    from manyhands.strategies.pairs import refused_codec  # which imports this module

    raise refused_codec(config, codec)


def takes_codec(cls: type[Strategy]) -> bool:
    """If true, the strategy has a field `codec` for the codec that follows it in a spec."""
    return any(field.name == CODEC_FIELD for field in dataclasses.fields(cls))


def codec_of(config: Strategy) -> Codec:
    """Return the codec of a config; `PLAIN` if it has none."""
    codec: Codec = getattr(config, CODEC_FIELD, PLAIN)
    return codec


def with_codec(config: Strategy, codec: Codec) -> Strategy:
    """Return the same config with another codec, which it must take unless it is `PLAIN`."""
    if not takes_codec(type(config)):
        assert codec == PLAIN, f"{config} takes no codec"
        return config
    changed: dict[str, Any] = {CODEC_FIELD: codec}
    return dataclasses.replace(config, **changed)


def spec_of(config: Strategy) -> str:
    """Return the shortest spec that makes this config."""
    codec = codec_of(config)
    codecs = () if codec == PLAIN else (_part_of(codec),)
    return str(Spec(_part_of(config), codecs))


def _part_of(config: Strategy | Codec) -> SpecPart:
    changed = {
        field.name: getattr(config, field.name)
        for field in dataclasses.fields(config)
        if field.name != CODEC_FIELD and getattr(config, field.name) != field.default
    }
    return SpecPart(config.name, changed)


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
    if lower in CODECS:
        return (
            f"{name!r} is a codec, which is added to a strategy. Type  --strategy allreduce+{lower}"
        )
    return f"There is no strategy {name!r}{closest(name, [*STRATEGIES, *PLANNED])} {there}"


def _make_codec(config: Strategy, spec: Spec) -> Codec:
    """Make the codec of a spec; it has at least one."""
    first = spec.codecs[0]
    cls = CODECS.get(first.name)
    if cls is None:
        raise SpecError(_no_codec(first.name, config))
    if len(spec.codecs) > 1:
        alone = shlex.quote(str(Spec(spec.strategy, spec.codecs[:1])))
        raise SpecError(
            f"{spec}: one codec can be used, not {len(spec.codecs)}. Type  --strategy {alone}"
        )
    codec = cls(**_options(cls, first))
    codec.check()
    return codec


def _no_codec(name: str, config: Strategy) -> str:
    """Say what to type instead."""
    from manyhands.strategies.pairs import nearest_with  # which imports this module

    there, lower = f"There are: {', '.join(CODECS)}.", name.lower()
    if lower in CODECS:
        meant = lower
        begin = f"There is no codec {name!r}: it is called {meant!r} here."
    elif lower in PLANNED_CODECS:
        meant = PLANNED_CODECS[lower]
        begin = f"The codec {name!r} is planned and doesn't exist yet. {there}"
    else:
        known = [*CODECS, *PLANNED_CODECS]
        return f"There is no codec {name!r}{closest(name, known)} {there}"
    near = nearest_with(config, CODECS[meant]())
    return f"{begin} Type  --strategy {shlex.quote(near)}" if near else begin


def _options(cls: type[Strategy] | type[Codec], part: SpecPart) -> dict[str, Any]:
    fields = {field.name for field in dataclasses.fields(cls)} - {CODEC_FIELD}
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
