"""Sparse tables in checkpoints: all rows once, then only those that changed since.

    tables.json             which files make up each table, in order
    table-0-0.npz           all rows of the first table
    table-0-1.npz, ...      rows touched since the previous checkpoint; the last one counts

Each checkpoint folder is complete: files of the previous one are hard-linked into it, not copied. When the
changes together are as large as the first file, all rows are written again.
"""

from __future__ import annotations

import json
import os
import shutil
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.lib import format as numpy_format
from torch import Tensor

from manyhands.errors import CheckpointError
from manyhands.runs.checkpoints import facts_of, final

INDEX = "tables.json"

Rows = Mapping[str, Mapping[str, Tensor]]
"""By table: the arrays of some of its rows, `ids` and others."""


class SavableTables(Protocol):
    @property
    def specs(self) -> Mapping[str, Any]:
        """The tables by name; empty if the model has none."""

    @property
    def incremental(self) -> bool:
        """If true, the rows touched since a step are known, and none is evicted."""

    def state_dict(self, since: int | None = None) -> dict[str, Any]: ...
    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


@dataclass
class Chain:
    """The files of the last checkpoint."""

    step: int = -1
    files: dict[str, list[str]] = field(default_factory=dict)
    facts: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Size and CRC-32 of each file."""

    @property
    def grown(self) -> bool:
        """If true, the changes together are as large as all rows were."""
        first = sum(self.facts[names[0]]["bytes"] for names in self.files.values())
        return sum(facts["bytes"] for facts in self.facts.values()) > 2 * first


@dataclass(frozen=True)
class TableFilePart:
    """The rows that one checkpoint adds to a chain."""

    rows: Rows
    chain: Chain
    """The chain that it is added to; empty if it has all rows."""
    links: Path

    def write(self, folder: Path) -> Chain:
        """Write the files to the folder of a checkpoint. Returns the new chain."""
        files = {name: list(self.chain.files.get(name, ())) for name in self.rows}
        facts = dict(self.chain.facts)
        for name in facts:
            os.rename(self.links / name, folder / name)
        for number, (table, arrays) in enumerate(sorted(self.rows.items())):
            name = f"table-{number}-{len(files[table])}.npz"
            with open(folder / name, "wb") as file:
                np.savez(file, **{key: t.numpy() for key, t in arrays.items()})  # type: ignore[arg-type]
                file.flush()
                os.fsync(file.fileno())
            files[table].append(name)
            facts[name] = facts_of(folder / name)
        (folder / INDEX).write_text(json.dumps(files, indent=1))
        self.discard()
        return Chain(-1, files, facts)

    def discard(self) -> None:
        shutil.rmtree(self.links, ignore_errors=True)


def copy_rows(folder: Path, run: Path, tables: SavableTables, chain: Chain) -> TableFilePart:
    """Copy the rows that a checkpoint adds, while no step changes them."""
    links = folder.with_suffix(".tables")
    shutil.rmtree(links, ignore_errors=True)
    if tables.incremental and chain.files and not chain.grown:
        try:
            links.mkdir(parents=True)
            for name in chain.facts:
                os.link(final(run, chain.step) / name, links / name)
            # From the previous step on: rows that are saved twice do no harm.
            return TableFilePart(tables.state_dict(since=chain.step - 1), chain, links)
        except OSError:
            pass  # the previous one is gone, or the disk has no hard links: save all rows
    return TableFilePart(tables.state_dict(), Chain(), links)


@dataclass(frozen=True)
class SavedTable:
    """A table of a checkpoint. Of several workers that share it, only the first reads it."""

    files: tuple[Path, ...]

    @property
    def dim(self) -> int:
        """Numbers in a row. Reads only the header."""
        try:
            with zipfile.ZipFile(self.files[0]) as arrays, arrays.open("rows.npy") as head:
                numpy_format.read_magic(head)
                shape, _, _ = numpy_format.read_array_header_1_0(head)
            return int(shape[1])
        except Exception as error:
            raise self._unreadable(error) from error

    def read(self) -> dict[str, Tensor]:
        """Read all rows."""
        try:
            return _merge([_load(file) for file in self.files])
        except Exception as error:
            raise self._unreadable(error) from error

    def _unreadable(self, error: Exception) -> CheckpointError:
        where = self.files[0].parent
        return CheckpointError(f"{where} does not read: {type(error).__name__}: {error}")


def find(folder: Path) -> dict[str, SavedTable]:
    """Return the tables of a checkpoint. Reads no rows."""
    if not (folder / INDEX).exists():
        return {}
    files = json.loads((folder / INDEX).read_text())
    for file in (file for names in files.values() for file in names):
        if Path(file).name != file:
            raise CheckpointError(f"{folder / INDEX} names {file!r}, which is not a file of it.")
    return {
        name: SavedTable(tuple(folder / file for file in names)) for name, names in files.items()
    }


def _load(path: Path) -> dict[str, np.ndarray[Any, Any]]:
    with np.load(path, allow_pickle=False) as arrays:
        return dict(arrays)


def _merge(parts: Sequence[dict[str, np.ndarray[Any, Any]]]) -> dict[str, Tensor]:
    whole = parts[0]
    for part in parts[1:]:
        for by, keys in KEYED.items():
            kept = ~np.isin(whole[by], part[by])
            whole |= {key: np.concatenate([whole[key][kept], part[key]]) for key in keys}
        # An id with a row waits no longer.
        waits = ~np.isin(whole["waiting_ids"], whole["ids"])
        whole |= {key: whole[key][waits] for key in KEYED["waiting_ids"]}
        whole["shared"] = part["shared"]
    for by, keys in KEYED.items():
        order = np.argsort(whole[by], kind="stable")
        whole |= {key: whole[key][order] for key in keys}
    return {key: torch.from_numpy(array) for key, array in whole.items()}


KEYED = {
    "ids": ("ids", "rows", "state", "counts", "last_used"),
    "waiting_ids": ("waiting_ids", "waiting_counts"),
}
"""Arrays of a table by the ids that they are ordered by."""
