"""Reads a checkpoint of torch.distributed.checkpoint without running code from it.

torch pickles two things: `.metadata`, and every value that is not a tensor. A pickle may call any function,
and a run folder may come from another person. So torch's own reader is not used:

    .metadata     Names are looked up in a list and stand for a record that only stores its arguments, not
                  for torch's class: a pickle can change the attributes of a class that it may name.
    values        `torch.load(weights_only=True)`: plain values, containers, tensors, and what the job file
                  has allowed with `torch.serialization.add_safe_globals`. NumPy numbers and arrays are
                  rebuilt from their bytes: NumPy's own functions trust what a pickle says about memory.
    tensors       the same, chunk by chunk.

Only files in the folder of the checkpoint are read. The format is the same from torch 2.11 to 2.14.
"""

from __future__ import annotations

import io
import math
import pickle
import re
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor

from manyhands.errors import CheckpointError

METADATA = ".metadata"
PACKAGE = "torch.distributed.checkpoint"
RECORDS = {
    f"{PACKAGE}.metadata": (
        *("Metadata", "MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING", "TensorProperties"),
        *("TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata"),
    ),
    f"{PACKAGE}.filesystem": ("_StorageInfo",),
    "torch": ("Size",),
    "torch.serialization": ("_get_layout",),
    "pathlib": ("PosixPath",),
    "pathlib._local": ("PosixPath",),
}
"""The names that torch writes into `.metadata`, by module; and its dtypes."""


def read(folder: Path) -> dict[str, Any]:
    """Read a checkpoint, nested as it was saved."""
    entries = read_metadata(folder / METADATA)
    state: dict[str, Any] = {}
    with ExitStack() as stack:
        files = {
            name: stack.enter_context(open(folder / name, "rb"))
            for name in {chunk.file for entry in entries for chunk in entry.chunks}
        }

        def load(chunk: TensorChunk, name: str) -> Any:
            files[chunk.file].seek(chunk.start)
            content = io.BytesIO(files[chunk.file].read(chunk.num_bytes))
            return load_value(content, f"{folder / chunk.file} ({name})")

        for entry in entries:
            if entry.dtype is None:
                value = load(entry.chunks[0], entry.name)
            else:
                value = torch.empty(entry.shape, dtype=entry.dtype)
                for chunk in entry.chunks:
                    part = value
                    for axis, (start, length) in enumerate(chunk.place):
                        part = part.narrow(axis, start, length)
                    saved = load(chunk, entry.name)
                    if not isinstance(saved, Tensor) or saved.shape != part.shape:
                        raise CheckpointError(
                            f"{folder / chunk.file} has no such part of {entry.name}."
                        )
                    part.copy_(saved)
            _put(state, entry.path, value, limit=len(entries))
    return state


def _put(state: dict[str, Any], path: tuple[Any, ...], value: Any, *, limit: int) -> None:
    """Set a value at a path in a state, creating missing dicts and lists."""
    place: Any = state
    for key, after in zip(path, (*path[1:], None), strict=True):
        if isinstance(place, list):
            if type(key) is not int or not 0 <= key < limit:
                raise CheckpointError(f"{path!r} is not a path in a state")
            place += [None] * (key + 1 - len(place))
        elif not isinstance(place, dict) or type(key) is not str:
            raise CheckpointError(f"{path!r} is not a path in a state")
        if after is None:
            place[key] = value
            return
        inner: Any = place[key] if isinstance(place, list) else place.get(key)
        if inner is None:
            inner = place[key] = {} if type(after) is str else []
        place = inner


# .metadata ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TensorChunk:
    """Bytes in a file; for a part of a tensor, also its start and length in each dimension."""

    file: str
    start: int
    num_bytes: int
    place: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class MetadataEntry:
    name: str
    path: tuple[str | int, ...]
    """Keys and list indices from the top of the state."""
    chunks: tuple[TensorChunk, ...]
    shape: tuple[int, ...] = ()
    dtype: torch.dtype | None = None
    """None: not a tensor."""


class _Record:
    """Stores what a pickle says about an object; does nothing."""

    arguments: tuple[Any, ...]
    state: Any

    def __new__(cls, *arguments: Any) -> _Record:
        record = super().__new__(cls)
        record.arguments, record.state = arguments, {}
        return record

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _MetadataUnpickler(pickle.Unpickler):
    def __init__(self, file: Any, path: Path) -> None:
        super().__init__(file)
        self._path = path
        self.kinds: dict[str, type[_Record]] = {}
        """New classes for each file, so that a pickle can't change those of another."""

    def find_class(self, module: str, name: str) -> Any:
        if name in RECORDS.get(module, ()):
            return self.kinds.setdefault(name, type(name, (_Record,), {}))
        if module == "torch" and isinstance(dtype := getattr(torch, name, None), torch.dtype):
            return dtype
        return self._refuse(f"{module}.{name}")

    def persistent_load(self, pid: Any) -> NoReturn:
        self._refuse(f"something outside of it ({pid!r})")

    def _refuse(self, name: str) -> NoReturn:
        raise CheckpointError(
            f"{self._path} names {name}, which no checkpoint needs: reading it could run code. "
            "It was refused, and none of its code was run."
        )


def read_metadata(path: Path) -> list[MetadataEntry]:
    """Return the entries of a checkpoint in the order in which they were saved."""
    with open(path, "rb") as file:
        unpickler = _MetadataUnpickler(file, path)
        try:
            saved = unpickler.load()
            return _Checked(unpickler.kinds).entries(saved)
        except CheckpointError:
            raise
        except Exception as error:  # a pickle can be wrong in any way
            reason = f"{type(error).__name__}: {error}"
            raise CheckpointError(f"{path} is not what torch writes: {reason}") from error


class _Checked:
    """Converts records to entries and checks each field."""

    def __init__(self, kinds: Mapping[str, type[_Record]]) -> None:
        self._kinds = kinds

    def entries(self, saved: Any) -> list[MetadataEntry]:
        fields = self._fields(saved, "Metadata")
        paths = _expect(dict, fields.get("planner_data") or {})
        stored = {
            self._index(index): self._stored(info)
            for index, info in _expect(dict, fields["storage_data"]).items()
        }
        found = []
        for name, entry in _expect(dict, fields["state_dict_metadata"]).items():
            path = _expect(tuple, paths.get(name, (_expect(str, name),)))
            if not path or not all(type(key) in (str, int) for key in path):
                raise TypeError(f"{path!r} is not a path in a state")
            if type(entry) is self._kinds.get("BytesStorageMetadata"):
                found.append(MetadataEntry(name, path, (stored[name, None],)))
                continue
            found.append(self._tensor(name, path, entry, stored))
        return found

    def _tensor(
        self, name: str, path: tuple[str | int, ...], saved: Any, stored: Mapping[Any, TensorChunk]
    ) -> MetadataEntry:
        fields = self._fields(saved, "TensorStorageMetadata")
        dtype, *_ = self._record(fields["properties"], "TensorProperties").state
        chunks = []
        for chunk in _expect(list, fields["chunks"]):
            part = self._fields(chunk, "ChunkStorageMetadata")
            starts, lengths = self._size(part["offsets"]), self._size(part["sizes"])
            place = tuple(zip(starts, lengths, strict=True))
            chunks.append(replace(stored[name, starts], place=place))
        shape = self._size(fields["size"])
        if sum(math.prod(n for _, n in chunk.place) for chunk in chunks) != math.prod(shape):
            raise ValueError(f"parts of {name} are missing")
        return MetadataEntry(name, path, tuple(chunks), shape, _expect(torch.dtype, dtype))

    def _index(self, saved: Any) -> tuple[str, tuple[int, ...] | None]:
        fields = self._fields(saved, "MetadataIndex")
        offset = fields.get("offset")
        return _expect(str, fields["fqn"]), None if offset is None else self._size(offset)

    def _stored(self, saved: Any) -> TensorChunk:
        fields = self._fields(saved, "_StorageInfo")
        name = _expect(str, fields["relative_path"])
        if Path(name).name != name:
            raise ValueError(f"it names {name!r}, which is not a file of this checkpoint")
        if fields.get("transform_descriptors"):
            raise ValueError(f"it is transformed: {fields['transform_descriptors']!r}")
        return TensorChunk(name, _expect(int, fields["offset"]), _expect(int, fields["length"]))

    def _size(self, saved: Any) -> tuple[int, ...]:
        (numbers,) = self._record(saved, "Size").arguments
        return tuple(_expect(int, number) for number in _expect(tuple, numbers))

    def _fields(self, saved: Any, kind: str) -> dict[str, Any]:
        fields: dict[str, Any] = _expect(dict, self._record(saved, kind).state)
        return fields

    def _record(self, saved: Any, kind: str) -> _Record:
        if type(saved) is not self._kinds.get(kind):
            raise TypeError(f"expected a {kind}, got {type(saved).__name__}")
        assert isinstance(saved, _Record)
        return saved


def _expect(kind: type, value: Any) -> Any:
    if type(value) is not kind:
        raise TypeError(f"expected {kind.__name__}, got {type(value).__name__}")
    return value


# Values -------------------------------------------------------------------------------------------


def load_value(file: io.BytesIO, where: str) -> Any:
    """Read a value that torch.save wrote. `where`: for the error."""
    try:
        with torch.serialization.safe_globals(ALLOWED):
            value = torch.load(file, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        if found := re.search(r"GLOBAL ([\w.]+\w)", str(error)):
            raise CheckpointError(
                f"{where} names {found[1]}, which is not plain data: reading it could run code. "
                "It was refused, and none of its code was run. If it is a class of your own that you "
                "trust, allow it in the job file:  torch.serialization.add_safe_globals([...])"
            ) from error
        reason = str(error).rpartition("WeightsUnpickler error: ")[2].splitlines()[0]
        raise CheckpointError(f"{where} does not read: {reason}") from error
    return _with_arrays(value)


def check_value(value: Any) -> None:
    """Raise if a value could not be read back, so that the checkpoint would be useless."""
    if type(value) in PLAIN or isinstance(value, Tensor):
        return
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    try:
        load_value(file, f"{kind}:")
    except CheckpointError as error:
        raise CheckpointError(
            f"the job saves a {kind}, which could not be loaded again. Save tensors, numbers, text, "
            "lists and dicts, or allow the class in the job file:  "
            f"torch.serialization.add_safe_globals([{type(value).__name__}])"
        ) from error


PLAIN = {bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size}


class _NumpyType:
    """Stands for numpy.dtype: only numbers, booleans and text, whose memory has no pointers."""

    def __init__(self, code: str, *_: Any) -> None:
        if not re.fullmatch(r"[biufcSU][0-9]{1,9}", code):
            raise pickle.UnpicklingError(f"numpy.dtype({code!r}) is none of numbers or text")
        self.dtype = np.dtype(code)

    def __setstate__(self, state: Any) -> None:
        self.dtype = self.dtype.newbyteorder(state[1])


def _numpy_number(kind: Any, data: bytes) -> Any:
    return np.frombuffer(_expect(bytes, data), _expect(_NumpyType, kind).dtype, count=1)[0]


class _NumpyArray:
    """Stands for numpy.ndarray until its bytes are known."""

    def __init__(self, *_: Any) -> None:
        self.array = np.empty(0)

    def __setstate__(self, state: Any) -> None:
        _, shape, kind, by_columns, data = state
        flat = np.frombuffer(_expect(bytes, data), _expect(_NumpyType, kind).dtype)
        self.array = flat.reshape(shape, order="F" if by_columns else "C").copy(order="K")


class _ArrayClass:
    """Stands for the class numpy.ndarray, which a pickle names and never calls."""


ALLOWED: list[Any] = [
    (frozenset, "builtins.frozenset"),
    (_NumpyType, "numpy.dtype"),
    (_ArrayClass, "numpy.ndarray"),
    (_NumpyArray, "manyhands numpy array"),  # allows its state to be set
    *((_numpy_number, f"numpy.{core}.multiarray.scalar") for core in ("core", "_core")),
    *((_NumpyArray, f"numpy.{core}.multiarray._reconstruct") for core in ("core", "_core")),
]


def _with_arrays(value: Any) -> Any:
    """Replace placeholders in a value by NumPy arrays."""
    if isinstance(value, _NumpyArray):
        return value.array
    if type(value) is _NumpyType:
        return value.dtype
    if isinstance(value, dict):
        for key, item in value.items():
            value[key] = _with_arrays(item)
        return value
    if type(value) in (list, tuple, set):
        return type(value)(_with_arrays(item) for item in value)
    return value
