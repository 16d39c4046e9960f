"""Derives messages from the annotations of their dataclasses: good, senseless and broken ones.

    examples(kind)     well-formed messages: legal values, the largest and smallest among them
    broken(kind)       one flaw each, at any depth: a field missing, of a wrong type, out of range, too long

A value is legal if `read` accepts it, so that every check in an annotation counts, also one that is written
tomorrow. Deterministic: the same seed gives the same messages.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import random
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from manyhands.errors import ProtocolError
from manyhands.transport.fields import MAX_INT, MAX_TEXT, read

Vocabulary = Mapping[str, Sequence[Any]]
"""By the name of a field: values that make sense on this link, so that some messages get further."""
Accepts = Callable[[dict[str, Any]], bool]

INTS = (0, 1, 2, 3, 7, 127, 1 << 16, 1 << 31, (1 << 53) - 1, MAX_INT, -1, -255, -MAX_INT)
FLOATS = (0.0, 1.0, 0.5, 2, -1.0, 1e-300, 1e9, 1e300, -1e300, math.nan, math.inf, -math.inf)
TEXTS = (
    "",
    "worker-0",
    "worker-1",
    "worker-999",
    "server-0",
    "own",
    "0",
    "{}",
    "[[[",
    "\x00\n\x1b[2J",
    "\N{SNOWMAN}" * 9,
    "../../etc/passwd",
    "unix:/nowhere/at/all",
    "tcp://127.0.0.1:1",
    "x" * 5000,
)
WRONG = (None, True, "x", 1, 1.5, [], {}, [[]], {"a": 1}, [None], 10**400)
"""Of each type, what some other field has."""
ODD_INTS = (-1, -(1 << 62), (1 << 62) + 1, 1 << 80, 10**400)
ODD_FLOATS = (math.nan, math.inf, -math.inf, -1e308, 1e308, 10**400)
TOO_LONG = "x" * (MAX_TEXT + 1)
MANY = 20_000
"""Items of a list that is too long, or of a legal list that is long."""
DEEP: Any = functools.reduce(lambda inner, _: [inner], range(900), None)
"""Nested as deeply as Python's JSON writes."""
TRIES = 400


@dataclass(frozen=True)
class Variant:
    """One message to send."""

    kind: str
    flaw: str
    """What is wrong with it; empty if it is well-formed."""
    head: dict[str, Any]
    payload: bytes | None = None

    def __str__(self) -> str:
        shown = json.dumps(self.head, default=str)
        size = "" if self.payload is None else f" + {len(self.payload)} bytes"
        return f"{self.kind} ({self.flaw or 'well-formed'}): {shown[:300]}{size}"


@functools.cache
def _holder(hint: Any) -> type[Any]:
    return dataclasses.make_dataclass("Holder", [("value", hint)], frozen=True)


def accepts(hint: Any, value: Any) -> bool:
    try:
        read(_holder(hint), {"value": value})
    except ProtocolError:
        return False
    return True


class Generator:
    def __init__(self, seed: int, vocabulary: Vocabulary | None = None) -> None:
        self.chance = random.Random(seed)
        self._vocabulary = vocabulary or {}

    # Well-formed --------------------------------------------------------------------------------

    def example(self, kind: type[Any], accepted: Accepts, *, wild: float = 0.3) -> dict[str, Any]:
        """A legal message of that class. `wild`: how often a value is any legal one, and not a plain one."""
        for attempt in range(TRIES):
            # Checks over several fields are met by plain values sooner or later.
            head = self._fields(kind, wild * (1 - attempt / TRIES))
            if accepted(head):
                return head
        raise AssertionError(f"{kind.__name__}: none of {TRIES} messages fits its own annotations")

    def _fields(self, kind: type[Any], wild: float) -> dict[str, Any]:
        hints = get_type_hints(kind, include_extras=True)
        return {
            field.name: self.value(hints[field.name], field.name, wild)
            for field in dataclasses.fields(kind)
            if field.init and (_required(field) or self.chance.random() < 0.8)
        }

    def value(self, hint: Any, name: str, wild: float) -> Any:
        """A legal value for a field."""
        known = [each for each in self._vocabulary.get(name, ()) if accepts(hint, each)]
        if known and self.chance.random() < 0.7:
            return self.chance.choice(known)
        try:
            return self._legal(hint, name, wild)
        except AssertionError:  # a format that only the vocabulary has
            if not known:
                raise
            return self.chance.choice(known)

    def _legal(self, hint: Any, name: str, wild: float) -> Any:
        origin, arguments = get_origin(hint), get_args(hint)
        if origin is Annotated:
            for _ in range(TRIES):
                value = self._legal(arguments[0], name, wild)
                if accepts(hint, value):
                    return value
            raise AssertionError(f"{name}: no legal value was found")
        if origin is Literal:
            return self.chance.choice(arguments)
        if origin in (Union, types.UnionType):
            return self._legal(self.chance.choice(arguments), name, wild)
        if origin in (dict, Mapping):
            keys = self.chance.sample(TEXTS, self._count(wild))
            return {key[:80]: self._legal(arguments[1], name, wild) for key in keys}
        if origin is tuple and arguments[-1:] != (...,):
            return [self._legal(each, name, wild) for each in arguments]
        if origin in (list, tuple, Sequence):
            return [self._legal(arguments[0], name, wild) for _ in range(self._count(wild))]
        if dataclasses.is_dataclass(hint):
            return self._fields(hint, wild)  # type: ignore[arg-type]
        return self._plain(hint, self.chance.random() < wild)

    def _plain(self, hint: Any, any_legal: bool) -> Any:
        choices: Sequence[Any]
        if hint is bool:
            choices = (True, False)
        elif hint is int:
            choices = INTS if any_legal else INTS[:4]
        elif hint is float:
            choices = FLOATS if any_legal else FLOATS[:4]
        elif hint is str:
            choices = TEXTS if any_legal else TEXTS[:4]
        elif hint is Fraction:
            choices = ([0, 1], [1, 3], [MAX_INT, 1], [1, MAX_INT], [-5, 2])
        elif hint in (None, type(None)):
            choices = (None,)
        else:
            assert hint is Any, f"no examples of {hint}"
            choices = (None, 1, "x", [], {"a": [1, {}]}, DEEP)
        return self.chance.choice(choices)

    def _count(self, wild: float) -> int:
        return self.chance.choice((0, 1, 2, 3, 9) if self.chance.random() < wild else (0, 1, 2))

    # Broken -------------------------------------------------------------------------------------

    def broken(self, kind: type[Any], good: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
        """The fields of a good message with one flaw each, and what it is."""
        hints = get_type_hints(kind, include_extras=True)
        for field in dataclasses.fields(kind):
            if not field.init:
                continue
            if _required(field):
                rest = {name: value for name, value in good.items() if name != field.name}
                yield f"{field.name} is missing", rest
            value = good.get(field.name)
            for flaw, wrong in self._wrong(hints[field.name], value):
                yield f"{field.name} {flaw}", {**good, field.name: wrong}

    def _wrong(self, hint: Any, good: Any) -> Iterator[tuple[str, Any]]:
        """Illegal values for a field."""
        for value in WRONG:
            if not accepts(hint, value):
                yield "is of a wrong type", value
        for flaw, values in (
            ("is out of range", (*ODD_INTS, *ODD_FLOATS, *INTS, *FLOATS)),
            ("is none of its values", TEXTS),
            ("is too long", (TOO_LONG,)),
            ("is nested too deeply", (DEEP,)),
        ):
            for value in values:
                if not accepts(hint, value):
                    yield flaw, value
        yield from self._wrong_inside(hint, good)

    def _wrong_inside(self, hint: Any, good: Any) -> Iterator[tuple[str, Any]]:
        origin, arguments = get_origin(hint), get_args(hint)
        if origin is Annotated:
            yield from self._wrong_inside(arguments[0], good)
            inner = get_origin(arguments[0])
            if inner in (list, tuple, Sequence, dict, Mapping):
                one = self._legal(
                    get_args(arguments[0])[-1 if inner in (dict, Mapping) else 0], "", 0
                )
                many = (
                    [one] * MANY
                    if inner not in (dict, Mapping)
                    else dict.fromkeys(map(str, range(MANY)), one)
                )
                if not accepts(hint, many):
                    yield "is too long", many
        elif origin in (Union, types.UnionType):
            for each in arguments:
                if each is not type(None):
                    part = good if accepts(each, good) else self._legal(each, "", 0.0)
                    for flaw, value in self._wrong_inside(each, part):
                        if not accepts(hint, value):
                            yield flaw, value
        elif origin in (dict, Mapping):
            for flaw, value in self._wrong(arguments[1], self._legal(arguments[1], "", 0.0)):
                yield f"has an item that {flaw}", {"a": value}
        elif origin is tuple and arguments[-1:] != (...,):
            items = [self._legal(each, "", 0.0) for each in arguments]
            yield "has an item too few", items[:-1]
            yield "has an item too many", [*items, items[0]]
            for i, each in enumerate(arguments):
                for flaw, value in self._wrong(each, items[i]):
                    yield f"has an item that {flaw}", [*items[:i], value, *items[i + 1 :]]
        elif origin in (list, tuple, Sequence):
            one = self._legal(arguments[0], "", 0.0)
            for flaw, value in self._wrong(arguments[0], one):
                yield f"has an item that {flaw}", [one, value]
        elif dataclasses.is_dataclass(hint):
            inner = good if isinstance(good, Mapping) else self._fields(hint, 0.0)  # type: ignore[arg-type]
            for flaw, value in self.broken(hint, inner):  # type: ignore[arg-type]
                yield f"has {flaw}", value
            if getattr(hint, "as_list", False):
                yield "is a list that is too short", [1]
                yield "is a list that is too long", [1] * 99


def _required(field: dataclasses.Field[Any]) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
