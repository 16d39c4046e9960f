"""The checkpoints of a run: paths, commit, verification, and which one to resume from. No torch here.

    checkpoints/.step-120.worker-0.partial/    being written by that member
    checkpoints/step-120/      complete: renamed after its manifest, the last file, was on disk
        __0_0.distcp, .metadata        by torch.distributed.checkpoint: model, optimizer, scheduler
        members/1/, members/2/, ...    the same format: state that only the worker of that rank had
        manifest.json                  sizes and CRC-32 of the files, and the state of the training plan

The state that the first worker held alone is beside the weights. A folder without a manifest, or with files
that differ from the manifest, is never loaded.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from manyhands.errors import CheckpointError, UsageError
from manyhands.runs.files import exchange, sync_folder, write_json

FORMAT = 2
MANIFEST = "manifest.json"


@dataclass(frozen=True)
class Manifest:
    path: Path
    step: int
    training_plan: Mapping[str, Any]
    strategy: str
    workers: int
    states: int = 0
    """Number of workers whose own state it holds; 0: they held none, or the same."""

    @property
    def name(self) -> str:
        return self.path.name


def partial(run: Path, step: int, writer: str = "") -> Path:
    """Return the folder of a checkpoint that is being written. Each writer has its own: after a worker died,
    another one may save the same step."""
    return run / "checkpoints" / f".step-{step}{writer and '.'}{writer}.partial"


def final(run: Path, step: int) -> Path:
    return run / "checkpoints" / f"step-{step}"


def member_folder(checkpoint: Path, rank: int) -> Path:
    """Return the folder with the state that only the worker of this rank had; not of the first."""
    return checkpoint / "members" / str(rank)


def checkpoint_step(folder: str | Path) -> int:
    """Return the step of a checkpoint from the name of its folder."""
    return int(Path(folder).name.removeprefix("step-"))


def commit(
    run: Path,
    step: int,
    *,
    files: Sequence[Mapping[str, Mapping[str, Any]]],
    training_plan: Mapping[str, Any],
    strategy: str,
    workers: int,
    writers: Sequence[str] = ("",),
    holds_state: bool = False,
) -> Path:
    """Commit a written checkpoint: combine the folders of its writers, write the manifest, and rename the
    folder.

    `files`: those of each writer. If `holds_state` is true, each has written a state that it held alone.
    """
    source, target = partial(run, step, writers[0]), final(run, step)
    all_files = dict(files[0])
    for rank, own in enumerate(files[1:], 1):
        folder = member_folder(source, rank).relative_to(source)
        all_files |= {str(folder / name): facts for name, facts in own.items()}
    manifest = {
        "format": FORMAT,
        "step": step,
        "time": time.time(),
        "strategy": strategy,
        "workers": workers,
        "states": len(writers) if holds_state else 0,
        "course": dict(training_plan),
        "files": all_files,
    }
    try:
        for rank, writer in enumerate(writers[1:], 1):
            folder = member_folder(source, rank)
            folder.parent.mkdir(exist_ok=True)
            os.rename(partial(run, step, writer), folder)
            sync_folder(folder.parent)
        write_json(source / MANIFEST, manifest)
        if target.exists():
            # Atomically, so that a kill leaves one of the two, never none.
            exchange(source, target)
            os.rename(source, _aside(target))
        else:
            os.rename(source, target)
        sync_folder(target.parent)
    except OSError as error:
        raise CheckpointError(
            f"The checkpoint of step {step} can't be finished: {error}"
        ) from error
    return target


def steps(run: Path) -> list[int]:
    """Return the steps with a checkpoint, oldest first. `verify` tells whether one is intact."""
    names = [path.name for path in (run / "checkpoints").glob("step-*")]
    return sorted(int(n[5:]) for n in names if n[5:].isdecimal())


def verify(path: Path) -> Manifest:
    """Check all files of a checkpoint and return its manifest."""
    return read_manifest(path, verify=True)


def read_manifest(path: Path, *, verify: bool = False) -> Manifest:
    """Return the manifest of a checkpoint. If `verify` is true, check its files."""
    try:
        manifest = json.loads((path / MANIFEST).read_text())
    except OSError as error:
        raise CheckpointError(f"{path} is not a complete checkpoint: {error}") from error
    except ValueError as error:
        raise CheckpointError(f"{path / MANIFEST} is damaged: {error}") from error
    try:
        if manifest["format"] > FORMAT:
            raise CheckpointError(
                f"{path} was written by a newer manyhands (format {manifest['format']}, "
                f"this one reads up to {FORMAT})."
            )
        _check_files(path, manifest["files"] if verify else {})
        return Manifest(
            path,
            manifest["step"],
            manifest["course"],
            manifest["strategy"],
            manifest["workers"],
            int(manifest.get("states", 0)),
        )
    except OSError as error:
        raise CheckpointError(f"{path} is not a complete checkpoint: {error}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        problem = f"{type(error).__name__}: {error}"
        raise CheckpointError(f"{path / MANIFEST} is not a manifest: {problem}") from error


def _check_files(path: Path, files: Mapping[str, Mapping[str, Any]]) -> None:
    for name, facts in files.items():
        size = (path / name).stat().st_size
        if size != facts["bytes"]:
            raise CheckpointError(
                f"{path / name} has {size:,} bytes and should have {facts['bytes']:,}."
            )
        if not _is_intact(path / name, facts):
            raise CheckpointError(f"{path / name} is damaged: its checksum is not the one written.")


def newest(run: Path) -> tuple[Manifest | None, list[str]]:
    """Return the newest intact checkpoint, and what is wrong with each newer one."""
    problems: list[str] = []
    for step in reversed(steps(run)):
        try:
            return verify(final(run, step)), problems
        except CheckpointError as error:
            problems.append(str(error))
    return None, problems


def last_intact(run: Path) -> tuple[Manifest | None, list[str]]:
    """Like `newest`, for resuming: None only if nothing was ever saved."""
    checkpoint, problems = newest(run)
    if checkpoint is None and problems:
        raise CheckpointError(
            "No checkpoint of this run is intact:\n  " + "\n  ".join(problems) + "\n"
            "Nothing was changed. To start from scratch, move the folder checkpoints/ away."
        )
    return checkpoint, problems


def choose(run: Path, step: str | int) -> Manifest:
    """Return the checkpoint of a step: a number, "last", or "best" by the job's monitor. In a run without
    evaluations the best is the last."""
    found = steps(run)
    if not found:
        raise CheckpointError(f"{run} has no checkpoint.")
    known = f"{run} has the checkpoints of steps {', '.join(map(str, found))}."
    match str(step):
        case "last":
            number = found[-1]
        case "best":
            number = _best(run, found)
            if number not in found:
                raise CheckpointError(
                    f"The best evaluation of {run} was at step {number}, and its checkpoint is gone. {known}"
                )
        case text if text.isdecimal():
            number = int(text)
        case _:
            raise UsageError(
                f'The step {step!r} is not valid: give "best", "last" or a number. {known}'
            )
    if number not in found:
        raise CheckpointError(f"There is no checkpoint of step {number}. {known}")
    try:
        return verify(final(run, number))
    except CheckpointError as error:
        raise CheckpointError(f"{error} {known}") from error


def _best(run: Path, found: Sequence[int]) -> int:
    """Return the step of the best evaluation, from the newest readable manifest."""
    for step in reversed(found):
        try:
            best = json.loads((final(run, step) / MANIFEST).read_text())["course"]["best"]
            return int(best["step"]) if best["metrics"] else found[-1]
        except (OSError, ValueError, KeyError, TypeError):
            continue  # `verify` reports what is wrong with it
    return found[-1]


def set_aside(path: Path) -> None:
    """Rename a checkpoint instead of deleting it: it may be the only one."""
    os.rename(path, _aside(path))


def _aside(path: Path) -> Path:
    return path.with_name(f".{path.name}.aside-{time.time_ns()}")


def prune(run: Path, *, keep: int, also: int | None) -> None:
    """Delete all but the newest `keep` checkpoints and the one of step `also`."""
    found = steps(run)
    for step in found[: max(0, len(found) - keep)]:
        if step != also:
            # Rename first, so that a kill never leaves half a checkpoint under its name.
            doomed = final(run, step).with_name(f".step-{step}.old")
            shutil.rmtree(doomed, ignore_errors=True)
            os.rename(final(run, step), doomed)
            shutil.rmtree(doomed, ignore_errors=True)


def clear_partials(run: Path) -> None:
    """Delete the folders that a killed run was writing or deleting."""
    for pattern in (".step-*.partial", ".step-*.tables", ".step-*.old"):
        for path in (run / "checkpoints").glob(pattern):
            shutil.rmtree(path, ignore_errors=True)


def facts_of(path: Path) -> dict[str, Any]:
    """Return the entry of a file in a manifest."""
    return {"bytes": path.stat().st_size, "crc32": checksum(path)}


def checksum(path: Path) -> str:
    """Return the CRC-32, against errors of disks and networks. It takes a third of the time of SHA-256, on
    cores that train."""
    value, block = 0, memoryview(bytearray(1 << 20))
    with open(path, "rb", buffering=0) as file:
        while size := file.readinto(block):
            value = zlib.crc32(block[:size], value)
    return f"{value:08x}"


def _is_intact(path: Path, facts: Mapping[str, Any]) -> bool:
    if "crc32" in facts:
        return bool(checksum(path) == facts["crc32"])
    with open(path, "rb") as file:  # format 1
        return bool(hashlib.file_digest(file, "sha256").hexdigest() == facts["sha256"])
