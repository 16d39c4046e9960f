"""`events.jsonl`: one line per event, appended; the source of truth about a run.

Each event is one write, newline included, on an append-only descriptor: what was emitted before a
SIGKILL is in the file, and only the last line can be torn. A line counts once its newline is there:
readers skip a torn tail, and opening the file for appending cuts it off, so that no line in the middle
fails to parse. There is no fsync: a power loss may cost the last seconds, never what is before them.

JSON has no NaN and no infinities; they are written as the strings "NaN", "Infinity" and "-Infinity"
and are read back as floats. A step of a few members costs about 300 bytes and 20 microseconds.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

from manyhands.errors import RunFolderError
from manyhands.events.events import Event, to_record
from manyhands.events.sinks import Sink

Record = dict[str, Any]

_NO_JSON = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


class JsonlSink(Sink):
    """Appends every event to `path`. Raises OSError, such as for a full disk."""

    essential: ClassVar[bool] = True

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
        self._file: int | None = os.open(self.path, flags, 0o644)
        try:
            _cut_torn_tail(self._file)
        except BaseException:
            self.close()
            raise

    def handle(self, event: Event) -> None:
        if self._file is None:
            raise ValueError(f"{self.path} is closed")
        line = encode(to_record(event))
        written = os.write(self._file, line)
        try:
            # A nearly full disk takes part of it; writing the rest either works or raises.
            while written < len(line):
                written += os.write(self._file, line[written:])
        except OSError:
            os.ftruncate(self._file, os.fstat(self._file).st_size - written)
            raise

    def close(self) -> None:
        if self._file is not None:
            file, self._file = self._file, None
            os.close(file)


def encode(record: Mapping[str, Any]) -> bytes:
    """Encode the record as one line of valid, compact JSON, newline included."""
    try:
        text = _dumps(record)
    except ValueError:  # NaN or infinity: rare, so values are checked one by one only then
        text = _dumps(_without_nan(record))
    return text.encode() + b"\n"


def read_events(path: str | os.PathLike[str], *, leave_out: bytes = b"") -> Iterator[Record]:
    """Yield the records of the file in order, without a torn last line, and without lines that contain
    `leave_out` near their beginning."""
    with open(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                return
            if leave_out and leave_out in line[:80]:
                continue
            try:
                record = json.loads(line)
            except ValueError as error:
                raise RunFolderError(
                    f"{os.fspath(path)}, line {number}, is not an event: {error}. "
                    "Remove that line to read the rest."
                ) from error
            yield _with_nan(record) if b'NaN"' in line or b'Infinity"' in line else record


def committed_steps(records: Iterable[Mapping[str, Any]]) -> list[Record]:
    """Return the StepCommitted records that count, by step: without lockstep they come in any order.

    A Resumed record with step N voids every StepCommitted before it with a step above N.
    """
    steps: list[Record] = []
    for record in records:
        if record["event"] == "StepCommitted":
            steps.append(dict(record))
        elif record["event"] == "Resumed":
            steps = [step for step in steps if step["step"] <= record["step"]]
    return sorted(steps, key=lambda step: step["step"])


def _dumps(record: Mapping[str, Any]) -> str:
    return json.dumps(record, allow_nan=False, separators=(",", ":"), default=_plain)


def _plain(value: Any) -> Any:
    """Convert types that an event may hold but the json module does not know."""
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    raise TypeError(f"an event can't hold a {type(value).__name__}: {value!r}")


def _without_nan(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return _map(value, _without_nan)


def _with_nan(value: Any) -> Any:
    return _NO_JSON.get(value, value) if isinstance(value, str) else _map(value, _with_nan)


def _map(value: Any, change: Callable[[Any], Any]) -> Any:
    """Change the items of a mapping or a list. Other values stay."""
    if isinstance(value, Mapping):
        return {key: change(item) for key, item in value.items()}
    return [change(item) for item in value] if isinstance(value, list | tuple) else value


def _cut_torn_tail(file: int, chunk_bytes: int = 65_536) -> None:
    """Truncate the file after its last complete line, searching backward from the end."""
    end = size = os.fstat(file).st_size
    while end > 0:
        start = max(0, end - chunk_bytes)
        newline = os.pread(file, end - start, start).rfind(b"\n")
        if newline >= 0:
            end = start + newline + 1
            break
        end = start
    if end < size:
        os.ftruncate(file, end)
