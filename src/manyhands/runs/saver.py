"""Writes and reads checkpoints in a member, in the format of torch.distributed.checkpoint.

`start` copies the state to the CPU; training waits only for that. Then a thread checks that the weights are
finite, writes the copy to the partial folder and computes checksums. The coordinator commits it
(runs/checkpoints.py) once every step up to it is recorded. Optimizer state is saved by parameter name, not
index, so that it fits a model that is split in another way.
"""

from __future__ import annotations

import copy
import os
import shutil
import socket
import threading
import time
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves, tree_map

from manyhands.contract import Learner, State
from manyhands.errors import CheckpointError
from manyhands.runs import safe_reader, table_files
from manyhands.runs.checkpoints import facts_of, member_folder, partial
from manyhands.runs.dense import dense_state, load_dense_state
from manyhands.runs.encoding import from_pairs, to_pairs
from manyhands.runs.layouts import laid_out_as, own_part, whole
from manyhands.runs.table_files import INDEX, Chain, SavableTables, TableFilePart
from manyhands.threads import start_thread

SPARE_BYTES = 1 << 20
"""Disk space that a checkpoint leaves free for logs and events."""


class Trained(Protocol):
    model: nn.Module
    optimizer: Optimizer
    scheduler: Any

    @property
    def tables(self) -> SavableTables: ...
    @property
    def schedule_state(self) -> dict[str, Any]: ...


class Saver:
    """Saves one checkpoint at a time, in the background."""

    def __init__(
        self,
        run: Path,
        writer: str = "",
        *,
        soon: bool = False,
        on_done: Callable[[dict[str, Any]], None] = lambda outcome: None,
    ) -> None:
        """`soon`: import what saving needs now. Members that do not save skip it, which is a quarter of a
        worker's start-up time. `on_done`: called in the writing thread, with the outcome of each
        checkpoint."""
        if soon:
            _load()
        self._run = run
        self._writer = writer
        self.infinite: set[str] = set()
        """Parameters that hold infinities on purpose."""
        self._on_done = on_done
        self._thread: threading.Thread | None = None
        self._chain = Chain()
        self._spare: list[torch.Tensor] = []
        """The copies of the last checkpoint, whose memory is reused."""

    def start(self, step: int, trained: Trained | None, own: State, *, view: int = 0) -> None:
        """Save the state of a step. `trained`: None, if another worker writes it. `own`: the learner's
        snapshot. `view`: for the outcome."""
        assert self._thread is None or not self._thread.is_alive(), "one checkpoint at a time"
        started = time.perf_counter()
        _load()  # not in the writing thread, which would slow down steps
        state = gather_state(trained, own, spare=self._spare)
        self._spare = [leaf for leaf in tree_leaves(state) if isinstance(leaf, torch.Tensor)]
        rows = None
        weights: set[str] = set()
        if trained is not None:
            if trained.tables.specs and self._run.exists():
                folder = partial(self._run, step, self._writer)
                rows = table_files.copy_rows(folder, self._run, trained.tables, self._chain)
            trains = [n for n, p in trained.model.named_parameters() if p.requires_grad]
            weights = set(trains) - self.infinite
        stall_s = time.perf_counter() - started
        which = {"step": step, "view": view}
        self._thread = start_thread(
            *(self._save, which, state, rows, weights, stall_s),
            name="saver",
            on_error=lambda error: self._on_done({**which, "error": _reason(error)}),
        )

    def finish(self, *, timeout_s: float | None = None) -> None:
        """Wait for the current checkpoint."""
        if self._thread is not None:
            self._thread.join(timeout_s)

    def _save(
        self,
        which: dict[str, int],
        state: dict[str, Any],
        rows: TableFilePart | None,
        weights: Collection[str],
        stall_s: float,
    ) -> None:
        started, step = time.perf_counter(), which["step"]
        folder = partial(self._run, step, self._writer)
        try:
            if not self._run.exists():  # a folder on another host's disk would be useless
                raise OSError(
                    f"{self._writer} runs on {socket.gethostname()}, where there is no folder {self._run}; "
                    "keep runs on a file system that all hosts share"
                )
            copied = {name: t for name, t in state.get("model", {}).items() if name in weights}
            if bad := not_finite(copied, rows):
                raise NotFiniteError(bad)
            files = write_state(folder, state, needed=0 if rows is None else _num_bytes(rows.rows))
            if rows is not None:
                self._chain = rows.write(folder)
                self._chain.step = step
                files |= self._chain.facts
                files[INDEX] = facts_of(folder / INDEX)
            outcome = {
                **which,
                "files": files,
                "bytes": sum(facts["bytes"] for facts in files.values()),
                "stall_s": stall_s,
                "write_s": time.perf_counter() - started,
            }
        except BaseException as error:  # torch's CheckpointException is not an Exception
            # Most likely the disk is full: free what was written.
            shutil.rmtree(folder, ignore_errors=True)
            if rows is not None:
                self._chain = Chain()
                rows.discard()
            outcome = {**which, "error": _reason(error)}
            if isinstance(error, NotFiniteError):
                outcome["not_finite"] = error.names
        self._on_done(outcome)


class NotFiniteError(Exception):
    """A checkpoint would hold weights that are not finite."""

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__(", ".join(names))
        self.names = list(names)


def not_finite(weights: Mapping[str, torch.Tensor], rows: TableFilePart | None = None) -> list[str]:
    """Return the names of weights and tables that hold NaN or infinity. Reads each tensor once."""
    found = [name for name, weight in weights.items() if not _is_finite(weight)]
    tables = rows.rows if rows is not None else {}
    return found + [name for name, table in tables.items() if not _is_finite(table["rows"])]


def _is_finite(weight: torch.Tensor) -> bool:
    if not weight.numel() or not (weight.is_floating_point() or weight.is_complex()):
        return True
    weight = own_part(weight)
    if not weight.numel():
        return True
    numbers = torch.view_as_real(weight.resolve_conj()) if weight.is_complex() else weight
    low, high = torch.aminmax(numbers.detach())  # propagates NaN
    return bool(torch.isfinite(low) and torch.isfinite(high))


def _load() -> None:
    """Import what writes checkpoints. Takes half a second, once."""
    import torch.distributed.checkpoint  # noqa: F401


def gather_state(
    trained: Trained | None, own: State, *, spare: Sequence[torch.Tensor] = ()
) -> dict[str, Any]:
    """Copy everything that resume needs of this member to the CPU: into `spare` where it fits.

    `trained`: None, if others have it. `own`: the learner's snapshot.
    """
    there = iter(spare)

    def copied(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return copy.deepcopy(leaf)
        leaf = whole(leaf)
        target = next(there, None)
        if target is None or (target.shape, target.dtype) != (leaf.shape, leaf.dtype):
            return leaf.detach().to("cpu", copy=True)
        return target.copy_(leaf.detach())

    state = _state_of(trained) if trained is not None else {}
    return tree_map(copied, {**state, "learner": own})


def help_gather_state(trained: Trained) -> None:
    """Send this worker's parts of a state that is laid out over workers, while another one gathers it."""
    for leaf in tree_leaves(_state_of(trained)):
        whole(leaf)


def _state_of(trained: Trained) -> dict[str, Any]:
    return {
        "model": dense_state(trained.model),
        "optimizer": optimizer_state(trained.model, trained.optimizer),
        "scheduler": trained.scheduler.state_dict() if trained.scheduler is not None else {},
        "schedule": trained.schedule_state,
    }


def write_state(
    folder: Path, state: dict[str, Any], *, needed: int = 0
) -> dict[str, dict[str, Any]]:
    """Write the state and flush it to the disk. Returns size and CRC-32 of each file. `needed`: further bytes
    that will be written."""
    import torch.distributed.checkpoint as dcp

    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    needed += _num_bytes(state) + SPARE_BYTES
    free = os.statvfs(folder).f_bavail * os.statvfs(folder).f_frsize
    if free < needed:
        raise OSError(f"no space left on the disk: {needed:,} bytes are needed and {free:,} free")
    packed = to_pairs(state)
    for value in tree_leaves(packed, is_leaf=lambda node: type(node) not in (dict, list, tuple)):
        safe_reader.check_value(value)
    writer = dcp.FileSystemWriter(folder, single_file_per_rank=True, sync_files=True)
    sums = torch.serialization.get_crc32_options()
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore"
        )  # a warning that it saves from a single process, as intended
        torch.serialization.set_crc32_options(False)  # the file as a whole gets one
        try:
            dcp.save(packed, storage_writer=writer, no_dist=True)
        finally:
            torch.serialization.set_crc32_options(sums)
    return {name: facts_of(folder / name) for name in sorted(os.listdir(folder))}


def read_state(folder: Path) -> dict[str, Any]:
    """Read the whole state of a checkpoint, on the CPU."""
    state = open_state(folder)
    if "tables" in state:
        state["tables"] = {name: table.read() for name, table in state["tables"].items()}
    return state


def open_state(folder: Path) -> dict[str, Any]:
    """Read the state of a checkpoint, without the rows of tables, which are SavedTables."""
    if not folder.is_dir():
        raise CheckpointError(
            f"{folder} does not exist on {socket.gethostname()}. Every host reads the checkpoint when a run "
            "is resumed: keep runs on a shared file system."
        )
    try:
        # Without a template: a parameter that never had a gradient has no optimizer state, which a
        # template could not know.
        state = safe_reader.read(folder)
        tables = table_files.find(folder)
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(f"{folder} does not read: {_reason(error)}") from error
    return from_pairs(state) | ({"tables": tables} if tables else {})


def _reason(error: BaseException) -> str:
    """Describe an error in one line. torch's own exception hides it behind a traceback."""
    for cause, _ in getattr(error, "failures", {}).values():
        return _reason(cause)
    return f"{type(error).__name__}: {error}"


def load_state(folder: str | Path, trained: Trained) -> dict[str, Any]:
    """Load a checkpoint into the model, the optimizer and the scheduler. Returns its state, with tables as
    SavedTables."""
    state = open_state(Path(folder))
    try:
        put_state(state, trained, None)
    except (KeyError, RuntimeError, ValueError) as error:
        raise CheckpointError(
            f"{folder} does not fit this job: {error}\nHas the model or the optimizer of the job "
            "changed since? Resume with the job file as it was, or start a new run."
        ) from error
    return state


def learner_states(folder: Path, state: Mapping[str, Any], ranks: Iterable[int]) -> list[State]:
    """Return the states that the learners of these ranks have saved in a checkpoint. `state`: the result of
    `load_state`, which has that of the first worker."""
    found = (
        (open_state(member_folder(folder, rank)) if rank else state).get("learner")
        for rank in ranks
    )
    return [each for each in found if each]


def put_state(
    state: Mapping[str, Any], trained: Trained, learner: Learner | None, *, tables: bool = True
) -> None:
    """Load what `gather_state` returned, and the tables unless they are elsewhere."""
    load_dense_state(trained.model, state["model"])
    load_optimizer_state(trained.model, trained.optimizer, state["optimizer"])
    if trained.scheduler is not None and state["scheduler"]:
        trained.scheduler.load_state_dict(state["scheduler"])
    if learner is not None and (own := state.get("learner")):
        learner.restore([own])
    saved = state.get("tables", {})
    if tables and (saved or trained.tables.specs):  # raises if they are not the job's
        trained.tables.load_state_dict(saved)


def optimizer_state(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """Return the optimizer's state_dict with parameter names in place of indices."""
    names = _names(model, optimizer)
    state = optimizer.state_dict()
    groups = [{**g, "params": [names[i] for i in g["params"]]} for g in state["param_groups"]]
    return {
        "kind": type(optimizer).__name__,
        "state": {names[i]: s for i, s in state["state"].items()},
        "param_groups": groups,
    }


def load_optimizer_state(model: nn.Module, optimizer: Optimizer, state: dict[str, Any]) -> None:
    kind = type(optimizer).__name__
    if state.get("kind", kind) != kind:
        raise ValueError(
            f"it holds the state of {state['kind']}, and the job's optimizer is {kind}"
        )
    numbers = {name: number for number, name in _names(model, optimizer).items()}
    saved, mine = state["param_groups"], optimizer.state_dict()["param_groups"]
    if unknown := [n for group in saved for n in group["params"] if n not in numbers]:
        raise ValueError(f"the job's optimizer does not have {', '.join(unknown)}")
    if len(saved) != len(mine):
        raise ValueError(f"different number of parameter groups: {len(saved)}, and {len(mine)} now")
    # torch identifies parameters by their order, which may have changed in the job.
    groups = [{**s, "params": own["params"]} for s, own in zip(saved, mine, strict=True)]
    parameters = dict(model.named_parameters())
    per_parameter = {
        numbers[name]: {
            key: laid_out_as(value, parameters.get(name)) for key, value in values.items()
        }
        for name, values in state.get("state", {}).items()
    }
    optimizer.load_state_dict({"state": per_parameter, "param_groups": groups})


def _names(model: nn.Module, optimizer: Optimizer) -> dict[int, str]:
    """Map the optimizer's index of each parameter to the model's name for it."""
    name_of = {id(parameter): name for name, parameter in model.named_parameters()}
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    return {number: name_of.get(id(p), f"#{number}") for number, p in enumerate(parameters)}


def _num_bytes(state: Any) -> int:
    leaves = tree_leaves(state)
    return sum(
        leaf.numel() * leaf.element_size() for leaf in leaves if isinstance(leaf, torch.Tensor)
    )
