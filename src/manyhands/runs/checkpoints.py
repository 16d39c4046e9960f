"""The checkpoints of a run: where they lie, when one counts, which one to go on from. No torch here.

    checkpoints/.step-120.worker-0.partial/    being written by that member
    checkpoints/step-120/      whole: renamed after its manifest, the last file, was on disk
        __0_0.distcp, .metadata        by torch.distributed.checkpoint: model, optimizer, scheduler
        manifest.json                  sizes and CRC-32 of the files, and the state of the course

A folder without a manifest, or whose files are not what the manifest says, is never loaded.
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

    @property
    def name(self) -> str:
        return self.path.name


def partial(run: Path, step: int, writer: str = "") -> Path:
    """Each writer has its own: after a death another may begin with a step that one is not done with."""
    return run / "checkpoints" / f".step-{step}{writer and '.'}{writer}.partial"


def final(run: Path, step: int) -> Path:
    return run / "checkpoints" / f"step-{step}"


def checkpoint_step(folder: str | Path) -> int:
    """The step of a checkpoint, by the name of its folder."""
    return int(Path(folder).name.removeprefix("step-"))


def commit(
    run: Path,
    step: int,
    *,
    files: Mapping[str, Mapping[str, Any]],
    training_plan: Mapping[str, Any],
    strategy: str,
    workers: int,
    writer: str = "",
) -> Path:
    """Make a written checkpoint count: manifest last, then one rename."""
    source, target = partial(run, step, writer), final(run, step)
    manifest = {
        "format": FORMAT,
        "step": step,
        "time": time.time(),
        "strategy": strategy,
        "workers": workers,
        "course": dict(training_plan),
        "files": dict(files),
    }
    try:
        write_json(source / MANIFEST, manifest)
        if target.exists():
            # In one go, so that a kill in between leaves the one or the other, never neither.
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
    """The steps that have a checkpoint, oldest first; whether each is sound is for `verify`."""
    names = [path.name for path in (run / "checkpoints").glob("step-*")]
    return sorted(int(n[5:]) for n in names if n[5:].isdecimal())


def verify(path: Path) -> Manifest:
    """The manifest of a checkpoint whose every file is what it should be."""
    try:
        manifest = json.loads((path / MANIFEST).read_text())
    except OSError as error:
        raise CheckpointError(f"{path} is not a whole checkpoint: {error}") from error
    except ValueError as error:
        raise CheckpointError(f"{path / MANIFEST} is damaged: {error}") from error
    try:
        if manifest["format"] > FORMAT:
            raise CheckpointError(
                f"{path} was written by a newer manyhands (format {manifest['format']}, "
                f"this one reads up to {FORMAT})."
            )
        for name, facts in manifest["files"].items():
            size = (path / name).stat().st_size
            if size != facts["bytes"]:
                raise CheckpointError(
                    f"{path / name} has {size:,} bytes and should have {facts['bytes']:,}."
                )
            if not _sound(path / name, facts):
                raise CheckpointError(
                    f"{path / name} is damaged: its checksum is not the one written."
                )
        return Manifest(
            path, manifest["step"], manifest["course"], manifest["strategy"], manifest["workers"]
        )
    except OSError as error:
        raise CheckpointError(f"{path} is not a whole checkpoint: {error}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        problem = f"{type(error).__name__}: {error}"
        raise CheckpointError(f"{path / MANIFEST} is not a manifest: {problem}") from error


def newest(run: Path) -> tuple[Manifest | None, list[str]]:
    """The newest sound checkpoint, and what is wrong with each newer one."""
    complaints: list[str] = []
    for step in reversed(steps(run)):
        try:
            return verify(final(run, step)), complaints
        except CheckpointError as error:
            complaints.append(str(error))
    return None, complaints


def last_sound(run: Path) -> tuple[Manifest | None, list[str]]:
    """As `newest`, to go on from it; None only if nothing was ever saved."""
    checkpoint, complaints = newest(run)
    if checkpoint is None and complaints:
        raise CheckpointError(
            "No checkpoint of this run is sound:\n  " + "\n  ".join(complaints) + "\n"
            "Nothing was changed. To begin anew, move the folder checkpoints/ away."
        )
    return checkpoint, complaints


def choose(run: Path, step: str | int) -> Manifest:
    """The checkpoint of a step: a number, "last", or "best" by the job's monitor. In a run that has
    evaluated nothing the best is the last."""
    there = steps(run)
    if not there:
        raise CheckpointError(f"{run} has no checkpoint.")
    known = f"{run} has the checkpoints of steps {', '.join(map(str, there))}."
    match str(step):
        case "last":
            number = there[-1]
        case "best":
            number = _best(run, there)
            if number not in there:
                raise CheckpointError(
                    f"The best evaluation of {run} was at step {number}, and its checkpoint is gone. {known}"
                )
        case text if text.isdecimal():
            number = int(text)
        case _:
            raise UsageError(
                f'The step {step!r} can\'t be: give "best", "last" or a number. {known}'
            )
    if number not in there:
        raise CheckpointError(f"There is no checkpoint of step {number}. {known}")
    try:
        return verify(final(run, number))
    except CheckpointError as error:
        raise CheckpointError(f"{error} {known}") from error


def _best(run: Path, there: Sequence[int]) -> int:
    """The step of the best evaluation, as the newest checkpoint that can be read knows it."""
    for step in reversed(there):
        try:
            best = json.loads((final(run, step) / MANIFEST).read_text())["course"]["best"]
            return int(best["step"]) if best["metrics"] else there[-1]
        except (OSError, ValueError, KeyError, TypeError):
            continue  # what is wrong with it is told when it is asked for
    return there[-1]


def set_aside(path: Path) -> None:
    """Out of the way, not deleted: it may be all that somebody has."""
    os.rename(path, _aside(path))


def _aside(path: Path) -> Path:
    return path.with_name(f".{path.name}.aside-{time.time_ns()}")


def prune(run: Path, *, keep: int, also: int | None) -> None:
    """Delete all but the newest `keep` checkpoints and the one of step `also`."""
    found = steps(run)
    for step in found[: max(0, len(found) - keep)]:
        if step != also:
            # Out of sight first, so that a kill in between never leaves half a checkpoint in sight.
            doomed = final(run, step).with_name(f".step-{step}.old")
            shutil.rmtree(doomed, ignore_errors=True)
            os.rename(final(run, step), doomed)
            shutil.rmtree(doomed, ignore_errors=True)


def clear_partials(run: Path) -> None:
    """What a killed run was writing or deleting counts for nothing."""
    for pattern in (".step-*.partial", ".step-*.tables", ".step-*.old"):
        for path in (run / "checkpoints").glob(pattern):
            shutil.rmtree(path, ignore_errors=True)


def facts_of(path: Path) -> dict[str, Any]:
    """What a manifest says of a file."""
    return {"bytes": path.stat().st_size, "crc32": checksum(path)}


def checksum(path: Path) -> str:
    """CRC-32, against disks and networks: a third of the time that SHA-256 takes, on cores that train."""
    value, block = 0, memoryview(bytearray(1 << 20))
    with open(path, "rb", buffering=0) as file:
        while size := file.readinto(block):
            value = zlib.crc32(block[:size], value)
    return f"{value:08x}"


def _sound(path: Path, facts: Mapping[str, Any]) -> bool:
    if "crc32" in facts:
        return bool(checksum(path) == facts["crc32"])
    with open(path, "rb") as file:  # as checkpoints of the first format have it
        return bool(hashlib.file_digest(file, "sha256").hexdigest() == facts["sha256"])
