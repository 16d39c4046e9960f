"""`--init-from RUN`: start with the weights of another run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from manyhands.errors import CheckpointError, RunFolderError, UsageError
from manyhands.runs.checkpoints import Manifest, choose, verify
from manyhands.runs.folder import RunFolder

FLAG = "--init-from"


def find_weights(text: str) -> Manifest:
    """Return the checkpoint of RUN, RUN:best, RUN:last or RUN:N."""
    path, _, step = text.rpartition(":")
    named = bool(path) and (step in ("best", "last") or step.isdecimal())
    if not named:
        path, step = text, "best"
    try:
        return choose(RunFolder.open(Path(path)).path, step)
    except (CheckpointError, RunFolderError) as error:
        allowed = (
            "" if named else f" Give a run folder, or a run folder and a step: {FLAG} {path}:last"
        )
        raise UsageError(f"{FLAG} {text}: {error}{allowed}") from error


def note(weights: Manifest) -> dict[str, Any]:
    """Return the entry for config.json. It names the step, since `best` may be another one later."""
    path = weights.path.resolve()
    return {"run": str(path.parents[1]), "step": weights.step, "checkpoint": str(path)}


def noted(config: Mapping[str, Any]) -> Path | None:
    """Return the checkpoint that a run started from; used until the run has its own."""
    if "init_from" not in config:
        return None
    path = Path(config["init_from"]["checkpoint"])
    try:
        return verify(path).path
    except CheckpointError as error:
        raise UsageError(
            f"The run has no checkpoint yet, and the weights that it started with can't be read: {error} "
            "Restore them, or start a new run."
        ) from error
