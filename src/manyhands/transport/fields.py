"""Messages as dataclasses: what arrives is checked field by field before anything inside sees it.

    @dataclass(frozen=True)
    class Saving:
        step: Count
        path: str = ""

    read(Saving, {"step": 20})      Saving(step=20, path="")
    read(Saving, {"step": "x"})     ProtocolError: step is 'x', not a whole number

A message is an object with the fields of its dataclass, or a list of them in order, where many of one kind
travel together. Fields that nobody knows are passed over, so that a newer member may say more. The types are
those of JSON: bool, int, float, str, None, Any, unions, lists, tuples, mappings with string keys, and
dataclasses. A further check is a function in `Annotated`: it returns the value to take, or raises ValueError.

Cost: some microseconds a message; the checks of a class are put together once.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from manyhands.errors import ProtocolError

T = TypeVar("T")
Reader = Callable[[Any, str], Any]
"""(value, its name) to the value that is taken."""

MOST_INT = 1 << 62
MOST_TEXT = 1 << 20
MOST_SECONDS = 1e9
LEAST_SECONDS = 1e-9


def read(kind: type[T], message: object) -> T:
    """The message as that dataclass; ProtocolError says which field is wrong."""
    try:
        return cast(T, _reader(cast(Any, kind))(message, ""))
    except RecursionError as error:
        raise ProtocolError("it is nested too deeply") from error


def _at_least_zero(value: int) -> int:
    if value < 0:
        raise ValueError("is negative")
    return value


def _at_least_one(value: int) -> int:
    if value < 1:
        raise ValueError("is less than 1")
    return value


def _finite(value: float) -> float:
    if not math.isfinite(value):
        raise ValueError("is not finite")
    return value


def _weight(value: float) -> float:
    if not 0 <= value <= 1e300:
        raise ValueError("is no weight")
    return value


def _seconds(value: float) -> float:
    # A difference of clocks may be a little below 0; and nobody divides by what is next to nothing.
    if not -1.0 <= value <= MOST_SECONDS:
        raise ValueError("is no time in seconds")
    return value if value >= LEAST_SECONDS else 0.0


Count = Annotated[int, _at_least_zero]
Positive = Annotated[int, _at_least_one]
Finite = Annotated[float, _finite]
Weight = Annotated[float, _weight]
Seconds = Annotated[float, _seconds]


@functools.cache
def _reader(hint: Any) -> Reader:
    origin, arguments = get_origin(hint), get_args(hint)
    if hint is Any:
        return lambda value, _: value
    if origin is Annotated:
        return _checked(_reader(arguments[0]), arguments[1:])
    if origin in (Union, types.UnionType):
        return _any_of([_reader(each) for each in arguments])
    if hint in (None, type(None)):
        return _plain(type(None), "null")
    if hint is bool:
        return _plain(bool, "true or false")
    if hint is int:
        return _int
    if hint is float:
        return _float
    if hint is str:
        return _str
    if origin is tuple and arguments[-1:] != (...,):
        return _tuple([_reader(each) for each in arguments])
    if origin in (list, tuple, Sequence):
        return _list(_reader(arguments[0]), cast("type[Any]", list if origin is list else tuple))
    if origin in (dict, Mapping):
        return _mapping(_reader(arguments[1]))
    if dataclasses.is_dataclass(hint):
        return _dataclass(cast("type[Any]", hint))
    raise TypeError(f"no message has a field of type {hint}")


def _wrong(value: object, name: str, wanted: str) -> ProtocolError:
    text = repr(value)
    shown = text if len(text) <= 80 else f"{text[:80]}..."
    return ProtocolError(f"{name or 'it'} is {shown}, not {wanted}")


def _plain(kind: type, wanted: str) -> Reader:
    def check(value: Any, name: str) -> Any:
        if not isinstance(value, kind):
            raise _wrong(value, name, wanted)
        return value

    return check


def _int(value: Any, name: str) -> int:
    if type(value) is not int or abs(value) > MOST_INT:
        raise _wrong(value, name, "a whole number")
    return value


def _float(value: Any, name: str) -> float:
    if type(value) is float:
        return value
    if type(value) is not int or abs(value) > MOST_INT:
        raise _wrong(value, name, "a number")
    return float(value)


def _str(value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise _wrong(value, name, "a text")
    if len(value) > MOST_TEXT:
        raise ProtocolError(f"{name} has {len(value)} characters, over the limit of {MOST_TEXT}")
    return value


def _checked(inner: Reader, checks: Sequence[Callable[[Any], Any]]) -> Reader:
    def check(value: Any, name: str) -> Any:
        value = inner(value, name)
        for each in checks:
            try:
                value = each(value)
            except ValueError as error:
                raise ProtocolError(f"{name} {error}: {value!r}") from None
        return value

    return check


def _any_of(readers: Sequence[Reader]) -> Reader:
    def check(value: Any, name: str) -> Any:
        failure: ProtocolError | None = None
        for each in readers:
            try:
                return each(value, name)
            except ProtocolError as error:
                failure = error if failure is None or value is not None else failure
        assert failure is not None
        raise failure

    return check


def _list(inner: Reader, made: type[Any]) -> Reader:
    def check(value: Any, name: str) -> Any:
        if not isinstance(value, list | tuple):
            raise _wrong(value, name, "a list")
        return made(inner(item, f"{name}[{number}]") for number, item in enumerate(value))

    return check


def _tuple(inner: Sequence[Reader]) -> Reader:
    def check(value: Any, name: str) -> Any:
        if not isinstance(value, list | tuple) or len(value) != len(inner):
            raise _wrong(value, name, f"a list of {len(inner)}")
        return tuple(
            each(item, f"{name}[{number}]")
            for number, (each, item) in enumerate(zip(inner, value, strict=True))
        )

    return check


def _mapping(inner: Reader) -> Reader:
    def check(value: Any, name: str) -> Any:
        if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
            raise _wrong(value, name, "an object")
        return {key: inner(item, f"{name}[{key[:80]!r}]") for key, item in value.items()}

    return check


def _dataclass(kind: type[Any]) -> Reader:
    hints = get_type_hints(kind, include_extras=True)
    fields = [field for field in dataclasses.fields(kind) if field.init]
    readers = {field.name: _reader(hints[field.name]) for field in fields}
    needed = [
        field.name
        for field in fields
        if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
    ]

    def check(value: Any, name: str) -> Any:
        prefix = f"{name}." if name else ""
        if isinstance(value, list | tuple):
            if not len(needed) <= len(value) <= len(fields):
                raise ProtocolError(
                    f"{name or 'it'} has {len(value)} fields of {len(needed)} to {len(fields)}"
                )
            value = {field.name: item for field, item in zip(fields, value, strict=False)}
        elif not isinstance(value, Mapping):
            raise _wrong(value, name, "an object")
        for each in needed:
            if each not in value:
                raise ProtocolError(f"{prefix}{each} is missing")
        return kind(
            **{
                each: reader(value[each], f"{prefix}{each}")
                for each, reader in readers.items()
                if each in value
            }
        )

    return check
