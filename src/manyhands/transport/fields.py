"""Messages as frozen dataclasses: checks and JSON are derived from the annotations.

    @dataclass(frozen=True)
    class Saving:
        step: Count
        path: str = ""

    write(Saving(20))               {"step": 20, "path": ""}
    read(Saving, {"step": 20})      Saving(step=20, path="")
    read(Saving, {"step": "x"})     ProtocolError: step is 'x', not a whole number

Both ends of a link use the same classes. The kind of a message on the wire is the name of its class; a
MessageSet has all messages that may arrive on a link:

    REPORTS = MessageSet(Saving, Stopped)

    link.send(Saving(20))                       {"kind": "Saving", "step": 20, "path": ""}
    match link.recv(REPORTS).message:
        case Saving(step, path): ...

`read` checks each field before any other code sees the message. Unknown fields are ignored, so a newer
member may send more; a strict MessageSet refuses them. The types are those of JSON: bool, int, float, str,
None, Any, Literal, unions, lists, tuples, mappings with string keys, dataclasses, and Fraction (as
[numerator, denominator]). Further checks are functions in `Annotated`: each returns the value to use, or
raises ValueError. Checks over several fields belong in `__post_init__`, which raises ValueError too.
Where many dataclasses of one kind travel together, `as_list: ClassVar[bool] = True` in the class sends each
as a list of its fields in order; `read` takes both forms.

Cost: some microseconds per message; the readers of a class are built once.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import math
import operator
import sys
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from fractions import Fraction
from typing import (
    Annotated,
    Any,
    Literal,
    TypeVar,
    Union,
    cast,
    get_args,
    get_origin,
    get_type_hints,
)

from manyhands.errors import ProtocolError

T = TypeVar("T")
Reader = Callable[[Any], Any]
"""From JSON to the value of a field; raises _FieldError."""

MAX_INT = 1 << 62
MAX_TEXT = 1 << 20
MAX_SECONDS = 1e9
MIN_SECONDS = 1e-9


def read(kind: type[T], message: object) -> T:
    """Parse a message as that dataclass; ProtocolError says which field is wrong."""
    try:
        return cast(T, _reader(cast(Any, kind))(message))
    except _FieldError as error:
        raise ProtocolError(str(error)) from None
    except RecursionError as error:
        raise ProtocolError("it is nested too deeply") from error


def to_json(message: object) -> str:
    """Return the fields of a message as JSON text."""
    return _ENCODER.encode(message)


def encode(message: object) -> str:
    """Return a message with its kind, as JSON text: MessageSet.read takes it."""
    return to_json({"kind": kind_of(message), **_fields_of(cast(Any, type(message)))(message)})


def write(message: object) -> dict[str, Any]:
    """Return the fields of a message as plain JSON values."""
    return cast("dict[str, Any]", json.loads(to_json(message)))


def kind_of(message: object) -> str:
    """Return the kind of a message on the wire."""
    return type(message).__name__


class MessageSet:
    """The messages that may arrive on a link, by their kind."""

    def __init__(self, *kinds: type[Any], strict: bool = False) -> None:
        """If `strict` is true, unknown fields are refused."""
        self.kinds = {kind.__name__: kind for kind in kinds}
        self._known = {
            name: frozenset({"kind", *_field_names(cast(Any, kind))}) if strict else None
            for name, kind in self.kinds.items()
        }
        """By kind, the fields that a message may have; None: any."""

    def read(self, head: Mapping[str, Any]) -> Any:
        """Parse a message as the dataclass of its kind."""
        name = head.get("kind")
        if not isinstance(name, str) or name not in self.kinds:
            raise ProtocolError(
                f"its kind is {str(name)[:80]!r}, not one of {', '.join(self.kinds)}"
            )
        kind = self.kinds[name]
        if (known := self._known[name]) is not None and not known >= head.keys():
            unknown = ", ".join(sorted(head.keys() - known))
            raise ProtocolError(f"{name!r} has unknown fields: {unknown[:200]}")
        try:
            return read(kind, head)
        except ProtocolError as error:
            raise ProtocolError(f"{name!r}: {error}") from None


# Checks -------------------------------------------------------------------------------------------


def check(passes: Callable[[Any], bool], problem: str) -> Callable[[Any], Any]:
    """Return a check for `Annotated`: a value for which `passes` is false has this problem."""

    def checked(value: Any) -> Any:
        if not passes(value):
            raise ValueError(problem)
        return value

    return checked


@dataclasses.dataclass(frozen=True)
class Bounds:
    """A check for `Annotated`: a number from `least` to `most`. Another one has this problem."""

    least: float
    most: float
    problem: str

    def __call__(self, value: Any) -> Any:
        if not self.least <= value <= self.most:
            raise ValueError(self.problem)
        return value


def at_least(least: float) -> Bounds:
    return Bounds(least, math.inf, "is negative" if least == 0 else f"is less than {least}")


def at_most(most: float) -> Bounds:
    return Bounds(-math.inf, most, f"is more than {most}")


def max_length(most: int) -> Callable[[Any], Any]:
    """Return a check for `Annotated`: at most so many characters or items."""
    return check(lambda value: len(value) <= most, f"has a length over the limit of {most}")


def _seconds(value: float) -> float:
    # A difference of clocks may be slightly negative. Tiny values become 0, so that nobody divides by them.
    if not -1.0 <= value <= MAX_SECONDS:
        raise ValueError("is not a time in seconds")
    return value if value >= MIN_SECONDS else 0.0


Count = Annotated[int, at_least(0)]
Positive = Annotated[int, at_least(1)]
Finite = Annotated[float, Bounds(-sys.float_info.max, sys.float_info.max, "is not finite")]
Weight = Annotated[float, Bounds(0, 1e300, "is not a weight")]
Seconds = Annotated[float, _seconds]


# From JSON ----------------------------------------------------------------------------------------


class _FieldError(Exception):
    """A wrong field. The path grows while the error passes from the field out to the message."""

    def __init__(self, problem: str) -> None:
        super().__init__(problem)
        self.problem = problem
        self.path = ""

    def within(self, step: str) -> _FieldError:
        self.path = step + self.path
        return self

    def __str__(self) -> str:
        return f"{self.path.removeprefix('.') or 'it'} {self.problem}"


@functools.cache
def _reader(hint: Any) -> Reader:
    origin, arguments = get_origin(hint), get_args(hint)
    if hint in _SIMPLE:
        return _SIMPLE[hint]
    if origin is Annotated:
        checked = _checked(_reader(arguments[0]), arguments[1:])
        if arguments[0] in (int, float) and all(isinstance(c, Bounds) for c in arguments[1:]):
            return _bounded(cast("type[Any]", arguments[0]), arguments[1:], checked)
        return checked
    if origin is Literal:
        return _literal(arguments)
    if origin in (Union, types.UnionType):
        readers = [_reader(each) for each in arguments if each is not type(None)]
        return _any_of(readers, or_none=len(readers) < len(arguments))
    if origin is tuple and arguments[-1:] != (...,):
        return _tuple([_reader(each) for each in arguments])
    if origin in (list, tuple, Sequence):
        return _list(_reader(arguments[0]), cast("type[Any]", list if origin is list else tuple))
    if origin in (dict, Mapping):
        return _mapping(_reader(arguments[1]))
    if dataclasses.is_dataclass(hint):
        return _dataclass(cast("type[Any]", hint))
    raise TypeError(f"a message can't have a field of type {hint}")


def _wrong(value: object, expected: str) -> _FieldError:
    text = repr(value)
    shown = text if len(text) <= 80 else f"{text[:80]}..."
    return _FieldError(f"is {shown}, not {expected}")


def _plain(kind: type, expected: str) -> Reader:
    def parse(value: Any) -> Any:
        if not isinstance(value, kind):
            raise _wrong(value, expected)
        return value

    return parse


def _int(value: Any) -> int:
    if type(value) is not int or abs(value) > MAX_INT:
        raise _wrong(value, "a whole number")
    return value


def _float(value: Any) -> float:
    if type(value) is float:
        return value
    if type(value) is not int or abs(value) > MAX_INT:
        raise _wrong(value, "a number")
    return float(value)


def _str(value: Any) -> str:
    if not isinstance(value, str):
        raise _wrong(value, "a text")
    if len(value) > MAX_TEXT:
        raise _FieldError(f"has {len(value)} characters, over the limit of {MAX_TEXT}")
    return value


def _fraction(value: Any) -> Fraction:
    if not isinstance(value, list | tuple) or len(value) != 2:
        raise _wrong(value, "a fraction")
    numerator, denominator = map(_int, value)
    if denominator < 1:
        raise _wrong(value, "a fraction")
    return Fraction(numerator, denominator)


_SIMPLE: Mapping[Any, Reader] = {
    Any: lambda value: value,
    type(None): _plain(type(None), "null"),
    bool: _plain(bool, "true or false"),
    int: _int,
    float: _float,
    str: _str,
    Fraction: _fraction,
}


def _literal(allowed: Sequence[Any]) -> Reader:
    def parse(value: Any) -> Any:
        if not any(value == each and type(value) is type(each) for each in allowed):
            raise _wrong(value, f"one of {', '.join(map(repr, allowed))}")
        return value

    return parse


def _checked(inner: Reader, checks: Sequence[Callable[[Any], Any]]) -> Reader:
    def parse(value: Any) -> Any:
        value = inner(value)
        for check in checks:
            try:
                value = check(value)
            except ValueError as error:
                raise _FieldError(f"{error}: {repr(value)[:80]}") from None
        return value

    return parse


def _bounded(kind: type[Any], checks: Sequence[Bounds], checked: Reader) -> Reader:
    """Read a number with one comparison; `checked` reads all that this does not accept."""
    least = max(check.least for check in checks)
    most = min(check.most for check in checks)
    if kind is int:
        least, most = max(least, -MAX_INT), min(most, MAX_INT)

    def parse(value: Any) -> Any:
        return value if type(value) is kind and least <= value <= most else checked(value)

    return parse


def _any_of(readers: Sequence[Reader], *, or_none: bool) -> Reader:
    def parse(value: Any) -> Any:
        if or_none and value is None:
            return None
        failure: _FieldError | None = None
        for each in readers:
            try:
                return each(value)
            except _FieldError as error:
                failure = failure or error
        assert failure is not None
        raise failure

    return parse


def _items(readers: Iterable[Reader], value: Iterable[Any]) -> list[Any]:
    items: list[Any] = []
    try:
        for reader, item in zip(readers, value):  # noqa: B905  # the readers of a list have no end
            items.append(reader(item))
    except _FieldError as error:
        raise error.within(f"[{len(items)}]") from None
    return items


def _list(inner: Reader, made: type[Any]) -> Reader:
    def parse(value: Any) -> Any:
        if not isinstance(value, list | tuple):
            raise _wrong(value, "a list")
        return made(_items(itertools.repeat(inner), value))

    return parse


def _tuple(inner: Sequence[Reader]) -> Reader:
    def parse(value: Any) -> Any:
        if not isinstance(value, list | tuple) or len(value) != len(inner):
            raise _wrong(value, f"a list of {len(inner)}")
        return tuple(_items(inner, value))

    return parse


def _mapping(inner: Reader) -> Reader:
    def parse(value: Any) -> Any:
        if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
            raise _wrong(value, "an object")
        parsed: dict[str, Any] = {}
        for key, item in value.items():
            try:
                parsed[key] = inner(item)
            except _FieldError as error:
                raise error.within(f"[{key[:80]!r}]") from None
        return parsed

    return parse


def _dataclass(kind: type[Any]) -> Reader:
    hints = get_type_hints(kind, include_extras=True)
    fields = [field for field in dataclasses.fields(kind) if field.init]
    readers = [(field.name, _reader(hints[field.name])) for field in fields]
    required = {
        field.name
        for field in fields
        if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
    }

    whole = not any(field.kw_only for field in fields)

    def parse(value: Any) -> Any:
        if whole and type(value) is dict:
            try:
                return kind(*[reader(value[name]) for name, reader in readers])
            except (KeyError, _FieldError, ValueError):
                pass  # a field is missing or wrong: read again, with defaults, or to name it
        return parse_each(value)

    def parse_each(value: Any) -> Any:
        if isinstance(value, list | tuple):
            if not len(required) <= len(value) <= len(fields):
                raise _FieldError(f"has {len(value)} fields of {len(required)} to {len(fields)}")
            try:
                return kind(*[reader(item) for (_, reader), item in zip(readers, value)])  # noqa: B905
            except (_FieldError, ValueError):
                pass  # read again, to name the field
            value = {field.name: item for field, item in zip(fields, value, strict=False)}
        elif not isinstance(value, Mapping):
            raise _wrong(value, "an object")
        parsed: dict[str, Any] = {}
        for name, reader in readers:
            if name in value:
                try:
                    parsed[name] = reader(value[name])
                except _FieldError as error:
                    raise error.within(f".{name}") from None
            elif name in required:
                raise _FieldError("is missing").within(f".{name}")
        try:
            return kind(**parsed)
        except ValueError as error:
            raise _FieldError(f"is wrong: {error}") from None

    return parse


# To JSON ------------------------------------------------------------------------------------------


@functools.cache
def _field_names(kind: Any) -> tuple[str, ...]:
    return tuple(field.name for field in dataclasses.fields(kind) if field.init)


@functools.cache
def _fields_of(kind: Any) -> Callable[[Any], dict[str, Any]]:
    """Return a function from a message of this class to its fields."""
    names = _field_names(kind)
    if len(names) < 2:
        return lambda message: {name: getattr(message, name) for name in names}
    values = operator.attrgetter(*names)
    return lambda message: dict(zip(names, values(message), strict=True))


@functools.cache
def _plain_of(kind: Any) -> Callable[[Any], Any]:
    """Return the conversion of a class that JSON does not have; dataclasses inside follow by themselves."""
    if kind is Fraction:
        return lambda value: (value.numerator, value.denominator)
    if issubclass(kind, Mapping):
        return lambda value: dict(value)
    if not dataclasses.is_dataclass(kind):
        raise TypeError(f"{kind.__name__} can't be sent as JSON")
    fields = _fields_of(cast(Any, kind))
    if getattr(kind, "as_list", False):
        return lambda value: list(fields(value).values())
    return fields


_ENCODER = json.JSONEncoder(
    separators=(",", ":"),
    check_circular=False,
    default=lambda value: _plain_of(cast(Any, type(value)))(value),
)
