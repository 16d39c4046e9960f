"""Loads trained weights from a run folder: into a model for inference, or to start another run.

model = mh.load("runs/clicks-20260101-120000")
with torch.no_grad():
    clicked = model(ids, numbers).sigmoid()
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from manyhands.embeddings.local_tables import LocalTables, OwnTables
from manyhands.embeddings.modules import ANCHOR
from manyhands.embeddings.spec import Table
from manyhands.errors import CheckpointError, JobError, RunFolderError, UsageError
from manyhands.job import Job, job_of_run, load_job
from manyhands.runs.checkpoints import choose
from manyhands.runs.dense import dense_state, load_dense_state
from manyhands.runs.files import file_digest
from manyhands.runs.folder import RunFolder
from manyhands.runs.saver import open_state, read_state
from manyhands.runs.table_files import SavedTable


def load(
    run: str | os.PathLike[str],
    *,
    step: str | int = "best",
    job: str | os.PathLike[str] | Job | None = None,
    device: str | torch.device = "cpu",
) -> nn.Module:
    """Return the trained model of a run with its tables, in evaluation mode.

    `step`: "best" by the job's monitor, "last", or a number. `job`: path.py:Name or a Job, if the file
    named in the run's config.json is gone or should not be used; a job given by name gets the run's
    settings.
    """
    folder = RunFolder.open(Path(run))
    checkpoint = choose(folder.path, step)
    made = job if isinstance(job, Job) else _load_job(folder, job)
    state = read_state(checkpoint.path)
    with torch.random.fork_rng(devices=[]):
        # For random numbers that the model draws and does not save.
        torch.default_generator.manual_seed(made.seed)
        model = made.model()
    if not isinstance(model, nn.Module):
        raise JobError(
            f"{type(made).__name__}.model() must return a model, and returned {model!r}."
        )
    tables = OwnTables.of(model, seed=made.seed)
    put_weights(
        state, model, tables, source=str(checkpoint.path), model_of=type(made).__name__, anew=False
    )
    return model.to(device).eval()


def _load_job(folder: RunFolder, given: str | os.PathLike[str] | None) -> Job:
    config = folder.config
    if given is not None:
        return load_job(os.fspath(given), config["settings"])
    try:
        found = job_of_run(config, folder.path)
    except RunFolderError as error:
        raise RunFolderError(
            f'{error} Or give its new path:  mh.load({str(folder.path)!r}, job="path.py:Name")'
        ) from error
    if (warning := folder.owner_warning()) is not None:
        warnings.warn(f"{warning}: {found.path}", stacklevel=3)
    saved = config["job"].get("sha256")
    if saved and file_digest(found.path) != saved:
        warnings.warn(
            f"{found.path} has changed since {folder.path} was started: the model is built from the file as "
            "it is now.",
            stacklevel=3,
        )
    return load_job(found.anywhere, config["settings"])


def begin_with(folder: str, model: nn.Module, tables: LocalTables, *, model_of: str) -> None:
    """Start training with the weights of a checkpoint; nothing else of it is used."""
    try:
        put_weights(
            open_state(Path(folder)), model, tables, source=folder, model_of=model_of, anew=True
        )
    except CheckpointError as error:
        raise UsageError(f"--init-from: {error}") from error


def put_weights(
    state: Mapping[str, Any],
    model: nn.Module,
    tables: LocalTables,
    *,
    source: str,
    model_of: str,
    anew: bool,
) -> None:
    """Load the weights of a checkpoint into a model and its tables. `anew`: to train from step 0 on."""
    saved_tables = state.get("tables", {})
    current = dense_state(model)
    saved = {name: value for name, value in state["model"].items() if name != ANCHOR}
    saved |= {name: value for name, value in current.items() if name == ANCHOR}
    problems = [
        *_differences("parameter", _shapes(current), _shapes(saved)),
        *_differences("table", _rows_in(tables.specs), _rows_in(saved_tables)),
    ]
    if problems:
        raise CheckpointError(
            f"The weights of {source} don't fit the model of {model_of}:\n  "
            + "\n  ".join(problems)
        )
    load_dense_state(model, saved)
    tables.stores.load_rows(saved_tables, anew=anew)


def _shapes(state: Mapping[str, Any]) -> dict[str, str]:
    return {
        name: "x".join(map(str, value.shape)) or "one number"
        for name, value in state.items()
        if isinstance(value, Tensor)
    }


def _rows_in(tables: Mapping[str, Table | SavedTable | Mapping[str, Tensor]]) -> dict[str, str]:
    dims = {
        name: table.dim if isinstance(table, Table | SavedTable) else table["rows"].shape[1]
        for name, table in tables.items()
    }
    return {name: f"rows of {dim}" for name, dim in dims.items()}


def _differences(what: str, here: Mapping[str, str], saved: Mapping[str, str]) -> Iterator[str]:
    if missing := here.keys() - saved.keys():
        yield f"missing {what}s, which the model has: {_listed(missing)}"
    if unexpected := saved.keys() - here.keys():
        yield f"unexpected {what}s, which the model does not have: {_listed(unexpected)}"
    both = [name for name in here if name in saved and here[name] != saved[name]]
    if both:
        differing = [f"{name} ({saved[name]} saved, {here[name]} in the model)" for name in both]
        yield f"{what}s of another shape: {_listed(differing)}"


def _listed(names: Iterable[str], most: int = 12) -> str:
    names = sorted(names)
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
