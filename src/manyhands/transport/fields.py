"""Messages as frozen dataclasses: checks and JSON are derived from the annotations.

    @dataclass(frozen=True)
    class Saving:
        step: Count
        path: str = ""

    write(Saving(20))               {"step": 20, "path": ""}
    read(Saving, {"step": 20})      Saving(step=20, path="")
    read(Saving, {"step": "x"})     ProtocolError: step is 'x', not a whole number

Both ends of a link use the same classes. A MessageSet holds all messages of one direction by their kind:

    REPORTS = MessageSet({"saving": Saving, "stopped": Stopped})

    link.send(REPORTS.write(Saving(20)))        {"kind": "saving", "step": 20, "path": ""}
    match REPORTS.read(link.recv().head):
        case Saving(step, path): ...

`read` checks each field before any other code sees the message. Unknown fields are ignored, so a newer
member may send more; a strict MessageSet refuses them. The types are those of JSON: bool, int, float, str,
None, Any, Literal, unions, lists, tuples, mappings with string keys, dataclasses, and Fraction (as
[numerator, denominator]). Further checks are functions in `Annotated`: each returns the value to use, or
raises ValueError. Checks over several fields belong in `__post_init__`, which raises ValueError too.
Where many dataclasses of one kind travel together, `as_list: ClassVar[bool] = True` in the class sends each
as a list of its fields in order; `read` takes both forms.

Cost: some microseconds per message; the readers and writers of a class are built once.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
import types
from collections.abc import Callable, Mapping, Sequence
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
Writer = Callable[[Any], Any] | None
"""From the value of a field to JSON; None: it is JSON already."""

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


def write(message: Any) -> dict[str, Any]:
    """The fields of a message, ready for JSON."""
    writer = _writer(cast(Any, type(message)))
    assert writer is not None
    return cast("dict[str, Any]", writer(message))


class MessageSet:
    """The messages that one side of a link may send, by their kind."""

    def __init__(self, kinds: Mapping[str, type[Any]], *, strict: bool = False) -> None:
        """If `strict` is true, unknown fields are refused."""
        self.kinds = dict(kinds)
        self._names = {kind: name for name, kind in kinds.items()}
        self._allowed = {
            name: {"kind", *(field.name for field in dataclasses.fields(kind))}
            for name, kind in kinds.items()
            if strict
        }

    def read(self, head: Mapping[str, Any]) -> Any:
        """Parse a message as the dataclass of its kind."""
        name = head.get("kind")
        if not isinstance(name, str) or name not in self.kinds:
            raise ProtocolError(
                f"its kind is {str(name)[:80]!r}, not one of {', '.join(self.kinds)}"
            )
        allowed = self._allowed.get(name)
        if allowed is not None and not head.keys() <= allowed:
            unknown = ", ".join(sorted(head.keys() - allowed))[:200]
            raise ProtocolError(f"{name!r} has unknown fields: {unknown}")
        try:
            return read(self.kinds[name], head)
        except ProtocolError as error:
            raise ProtocolError(f"{name!r}: {error}") from None

    def write(self, message: Any) -> dict[str, Any]:
        """The message as a JSON object with its kind."""
        return {"kind": self._names[type(message)], **write(message)}

    def name_of(self, message: Any) -> str:
        """The kind of a message, as it is sent."""
        return self._names[type(message)]


# Checks -------------------------------------------------------------------------------------------


def at_least(least: float) -> Callable[[Any], Any]:
    """A check for `Annotated`: the value is `least` or more."""

    def check(value: Any) -> Any:
        if not value >= least:
            raise ValueError("is negative" if least == 0 else f"is less than {least}")
        return value

    return check


def at_most(most: float) -> Callable[[Any], Any]:
    """A check for `Annotated`: the value is `most` or less."""

    def check(value: Any) -> Any:
        if not value <= most:
            raise ValueError(f"is more than {most}")
        return value

    return check


def max_length(most: int) -> Callable[[Any], Any]:
    """A check for `Annotated`: at most so many characters or items."""

    def check(value: Any) -> Any:
        if len(value) > most:
            raise ValueError(f"has a length of {len(value)}, over the limit of {most}")
        return value

    return check


def _finite(value: float) -> float:
    if not math.isfinite(value):
        raise ValueError("is not finite")
    return value


def _weight(value: float) -> float:
    if not 0 <= value <= 1e300:
        raise ValueError("is not a weight")
    return value


def _seconds(value: float) -> float:
    # A difference of clocks may be slightly negative. Tiny values become 0, so that nobody divides by them.
    if not -1.0 <= value <= MAX_SECONDS:
        raise ValueError("is not a time in seconds")
    return value if value >= MIN_SECONDS else 0.0


Count = Annotated[int, at_least(0)]
Positive = Annotated[int, at_least(1)]
Finite = Annotated[float, _finite]
Weight = Annotated[float, _weight]
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
    if hint is Any:
        return lambda value: value
    if origin is Annotated:
        return _checked(_reader(arguments[0]), arguments[1:])
    if origin is Literal:
        return _literal(arguments)
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
    if hint is Fraction:
        return _fraction
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


def _any_of(readers: Sequence[Reader]) -> Reader:
    def parse(value: Any) -> Any:
        failure: _FieldError | None = None
        for each in readers:
            try:
                return each(value)
            except _FieldError as error:
                failure = failure or error
        assert failure is not None
        raise failure

    return parse


def _list(inner: Reader, made: type[Any]) -> Reader:
    def parse(value: Any) -> Any:
        if not isinstance(value, list | tuple):
            raise _wrong(value, "a list")
        items: list[Any] = []
        try:
            for item in value:
                items.append(inner(item))
        except _FieldError as error:
            raise error.within(f"[{len(items)}]") from None
        return made(items)

    return parse


def _tuple(inner: Sequence[Reader]) -> Reader:
    def parse(value: Any) -> Any:
        if not isinstance(value, list | tuple) or len(value) != len(inner):
            raise _wrong(value, f"a list of {len(inner)}")
        items: list[Any] = []
        try:
            for each, item in zip(inner, value, strict=True):
                items.append(each(item))
        except _FieldError as error:
            raise error.within(f"[{len(items)}]") from None
        return tuple(items)

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

    def parse(value: Any) -> Any:
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
def _writer(hint: Any) -> Writer:
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return _writer(arguments[0])
    if hint is Fraction:
        return lambda value: (value.numerator, value.denominator)
    if origin in (Union, types.UnionType):
        return _write_union(arguments)
    if origin is tuple and arguments[-1:] != (...,):
        return _write_tuple([_writer(each) for each in arguments])
    if origin in (list, tuple, Sequence):
        inner = _writer(arguments[0])
        return None if inner is None else lambda value: [inner(item) for item in value]
    if origin in (dict, Mapping):
        item = _writer(arguments[1])
        return dict if item is None else lambda value: {k: item(v) for k, v in value.items()}
    if dataclasses.is_dataclass(hint):
        return _write_dataclass(cast("type[Any]", hint))
    return None


def _write_union(hints: Sequence[Any]) -> Writer:
    choices: list[tuple[type[Any], Callable[[Any], Any]]] = []
    for hint in hints:
        if (writer := _writer(hint)) is not None:
            bare = get_args(hint)[0] if get_origin(hint) is Annotated else hint
            choices.append((get_origin(bare) or bare, writer))
    if not choices:
        return None

    def convert(value: Any) -> Any:
        for kind, writer in choices:
            if isinstance(value, kind):
                return writer(value)
        return value

    return convert


def _write_tuple(writers: Sequence[Writer]) -> Writer:
    if not any(writers):
        return None
    return lambda value: [
        item if writer is None else writer(item)
        for writer, item in zip(writers, value, strict=True)
    ]


def _write_dataclass(kind: type[Any]) -> Writer:
    hints = get_type_hints(kind, include_extras=True)
    names = [field.name for field in dataclasses.fields(kind) if field.init]
    converted = [(name, writer) for name in names if (writer := _writer(hints[name])) is not None]
    values_of = operator.attrgetter(*names) if len(names) > 1 else None
    if getattr(kind, "as_list", False):
        assert values_of is not None, f"{kind.__name__} has a single field"
        to_convert = [(names.index(name), writer) for name, writer in converted]

        def convert_to_list(message: Any) -> list[Any]:
            values = list(values_of(message))
            for index, writer in to_convert:
                values[index] = writer(values[index])
            return values

        return convert_to_list

    def convert(message: Any) -> dict[str, Any]:
        if values_of is None:
            fields = {name: getattr(message, name) for name in names}
        else:
            fields = dict(zip(names, values_of(message), strict=True))
        for name, writer in converted:
            fields[name] = writer(fields[name])
        return fields

    return convert
