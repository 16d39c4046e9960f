"""A checkpoint is data: whatever a stranger has written into it, nothing runs, and the error names it."""

from __future__ import annotations

import io
import os
import pickle
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorProperties

from manyhands.errors import CheckpointError
from manyhands.runs import safe_reader
from manyhands.runs.saver import read_state, write_state

STATE = {"model": {"weight": torch.arange(6.0).reshape(2, 3)}, "round": 7}


class Touch:
    """Pickled, it makes a file when it is read."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


def rewrite(folder: Path, change: Callable[[Any], Any]) -> None:
    """Let somebody change the metadata of a checkpoint."""
    path = folder / ".metadata"
    path.write_bytes(pickle.dumps(change(pickle.loads(path.read_bytes()))))


def set_field(name: str, value: Any) -> Callable[[Any], Any]:
    def change(metadata: Any) -> Any:
        setattr(metadata, name, value)
        return metadata

    return change


def test_metadata_that_calls_a_function_runs_nothing(tmp_path: Path) -> None:
    folder, trap = tmp_path / "saved", tmp_path / "trap"
    for change in (lambda _: Touch(trap), set_field("planner_data", {"round": Touch(trap)})):
        write_state(folder, STATE)
        rewrite(folder, change)
        with pytest.raises(CheckpointError, match=r"saved/\.metadata names posix\.mkdir.*refused"):
            read_state(folder)
        assert not trap.exists()


def test_a_value_that_calls_a_function_runs_nothing(tmp_path: Path) -> None:
    """Torch reads such values with weights_only=False; here one takes the place of a number."""
    folder, trap = tmp_path / "saved", tmp_path / "trap"
    write_state(folder, STATE)
    evil = io.BytesIO()
    torch.save(Touch(trap), evil)
    with open(folder / "__0_0.distcp", "ab") as file:
        start = file.tell()
        file.write(evil.getvalue())

    def elsewhere(metadata: Any) -> Any:
        for index, info in metadata.storage_data.items():
            if index.fqn == "round":
                info.offset, info.length = start, len(evil.getvalue())
        return metadata

    rewrite(folder, elsewhere)
    with pytest.raises(CheckpointError, match=r"\(round\) names posix\.mkdir.*refused"):
        read_state(folder)
    assert not trap.exists()


def test_a_pickle_can_not_change_torch_s_classes(tmp_path: Path) -> None:
    """The state of a class, given as for an object with slots, would be set on the class itself."""
    name = f"{Metadata.__module__}\n{Metadata.__name__}\n".encode()
    changes = pickle.dumps((None, {"stolen": 1}), protocol=2)[2:-1]
    (tmp_path / ".metadata").write_bytes(b"\x80\x02c" + name + changes + b"b.")
    with pytest.raises(CheckpointError, match=r"\.metadata is not what torch writes"):
        read_state(tmp_path)
    assert not hasattr(Metadata, "stolen")
    assert not hasattr(safe_reader._Record, "stolen")


def outside(metadata: Any) -> Any:
    for info in metadata.storage_data.values():
        info.relative_path = "../other"
    return metadata


def half(metadata: Any) -> Any:
    metadata.state_dict_metadata["model.weight"].size = torch.Size([4, 3])
    return metadata


def object_tensor(metadata: Any) -> Any:
    metadata.state_dict_metadata["model.weight"].properties = TensorProperties
    return metadata


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (outside, r"'\.\./other', which is not a file of this checkpoint"),
        (half, r"parts of model\.weight are missing"),
        (object_tensor, "expected a TensorProperties"),
        (set_field("storage_data", None), "expected dict, got NoneType"),
        (set_field("storage_data", {}), "KeyError"),
        (set_field("planner_data", {"round": ()}), "not a path in a state"),
        (set_field("planner_data", {"round": ("model.weight", "x")}), "not a path in a state"),
        (set_field("planner_data", {"round": ("list", 10**12)}), "not a path in a state"),
        (lambda _: [1, 2], "expected a Metadata, got list"),
    ],
)
def test_invalid_metadata_is_explained(
    tmp_path: Path, change: Callable[[Any], Any], says: str
) -> None:
    folder = tmp_path / "saved"
    write_state(folder, STATE)
    rewrite(folder, change)
    with pytest.raises(CheckpointError, match=says):
        read_state(folder)


def test_a_tensor_in_several_chunks_is_put_together(tmp_path: Path) -> None:
    """As a run over several writers would have saved it."""
    folder = tmp_path / "saved"
    write_state(folder, {"top": torch.ones(1, 3), "low": torch.zeros(2, 3)})

    def together(metadata: Any) -> Any:
        entries = metadata.state_dict_metadata
        whole, low = entries.pop("top"), entries.pop("low")
        low.chunks[0].offsets, whole.size = torch.Size([1, 0]), torch.Size([3, 3])
        whole.chunks += low.chunks
        entries["whole"] = whole
        metadata.planner_data = {"whole": ("whole",)}
        metadata.storage_data = {
            type(index)("whole", [1 * (index.fqn == "low"), 0]): info
            for index, info in metadata.storage_data.items()
        }
        return metadata

    rewrite(folder, together)
    assert read_state(folder)["whole"].sum(dim=1).tolist() == [3, 0, 0]


def test_numbers_and_arrays_of_numpy_come_back(tmp_path: Path) -> None:
    state = {
        "number": np.float64(0.5),
        "swapped": np.arange(3, dtype=">i2"),
        "flags": np.array([True, False]),
        "columns": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        "nested": [np.int64(3), (np.float32(2), "x")],
    }
    write_state(tmp_path / "saved", state)
    found = read_state(tmp_path / "saved")
    for name in ("swapped", "flags", "columns"):
        assert np.array_equal(found[name], state[name])
        assert found[name].dtype == state[name].dtype  # type: ignore[attr-defined]
    assert (found["number"], found["nested"]) == (0.5, [3, (2, "x")])
    assert type(found["number"]) is np.float64


def numpy_value(code: str, data: Any) -> io.BytesIO:
    """A number of NumPy whose type a stranger has chosen."""

    class Kind:
        def __reduce__(self) -> tuple[Any, ...]:
            return np.dtype, (code, False, True)

    class Number:
        def __reduce__(self) -> tuple[Any, ...]:
            return np.float64(1).__reduce__()[0], (Kind(), data)

    file = io.BytesIO()
    torch.save(Number(), file)
    file.seek(0)
    return file


@pytest.mark.parametrize(("code", "data"), [("O", b"12345678"), ("V8", b"12345678"), ("f8", 3)])
def test_array_sizes_of_a_pickle_are_not_trusted(code: str, data: Any) -> None:
    assert safe_reader.load_value(numpy_value("f8", bytes(8)), "value") == 0
    with pytest.raises((CheckpointError, TypeError)):
        safe_reader.load_value(numpy_value(code, data), "value")


class Own:
    """What a job might keep in its model's extra state."""

    def __init__(self) -> None:
        self.number = 3


def test_a_class_of_the_job_is_refused_when_it_is_saved_until_it_is_allowed(tmp_path: Path) -> None:
    state = {"extra": {"own": [1, Own()]}}
    with pytest.raises(CheckpointError, match=r"saves a .*Own.*add_safe_globals\(\[Own\]\)"):
        write_state(tmp_path / "saved", state)
    with pytest.raises(CheckpointError, match=r"saves a collections\.deque"):
        write_state(tmp_path / "saved", {"last": deque([1.0])})
    with torch.serialization.safe_globals([Own]):
        write_state(tmp_path / "saved", state)
        assert read_state(tmp_path / "saved")["extra"]["own"][1].number == 3
    with pytest.raises(CheckpointError, match=r"\.Own, which is not plain data"):
        read_state(tmp_path / "saved")


def test_tables_are_read_from_their_own_folder_only(tmp_path: Path) -> None:
    folder = tmp_path / "saved"
    write_state(folder, STATE)
    (folder / "tables.json").write_text('{"users": ["../table-0-0.npz"]}')
    with pytest.raises(CheckpointError, match=r"tables\.json names '\.\./table-0-0\.npz'"):
        read_state(folder)
