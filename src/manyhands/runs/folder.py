"""The folder of a run: its history, and everything that resume needs.

config.json      the resolved settings, and where each value came from
events.jsonl     every event, in order
summary.json     how it ended
logs/            one file per member
tb/              TensorBoard
checkpoints/     step-N/, see runs/checkpoints.py
run.lock         held by the coordinator while it trains
"""

from __future__ import annotations

import fcntl
import json
import os
import pwd
import re
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from manyhands.errors import ProtocolError, RunFolderError
from manyhands.job_length import source_of
from manyhands.runs.files import opened_here, write_json
from manyhands.transport.fields import read, write

CONFIG, EVENTS, SUMMARY = "config.json", "events.jsonl", "summary.json"
REQUEST = "request.json"
MAX_REQUEST_CHARS = 4096


@dataclass(frozen=True)
class ScaleRequest:
    """Asks a run for another number of workers (`manyhands scale`)."""

    workers: int


class RunFolder:
    """The folder of one run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock: Any = None
        self._identity: tuple[int, int] | None = None
        """Device and inode of the folder, once it is locked."""

    @classmethod
    def create(
        cls, job_name: str, *, root: Path = Path("runs"), path: Path | None = None
    ) -> RunFolder:
        """Create `path`, or runs/<job>-<time>, with a suffix if two start in the same second."""
        try:
            if path is not None:
                if path.exists() and any(path.iterdir()):
                    raise RunFolderError(
                        f"{path} is not empty. Give a new --run-dir, or resume the run in it: "
                        f"manyhands resume {path}"
                    )
                path.mkdir(parents=True, exist_ok=True)
            else:
                path = _create_unique(root, job_name)
            run = cls(path)
            for name in ("logs", "tb", "checkpoints"):
                (path / name).mkdir(exist_ok=True)
        except OSError as error:
            raise RunFolderError(
                f"The run folder {path or root} can't be created: {error.strerror}. "
                "Give another one with --run-dir."
            ) from error
        return run

    @classmethod
    def open(cls, path: Path) -> RunFolder:
        """Open an existing run."""
        if not (path / CONFIG).is_file():
            hint = "manyhands list  shows the runs here."
            if not path.is_dir():
                raise RunFolderError(f"There is no run {path}. {hint}")
            raise RunFolderError(f"{path} is not a run: it has no {CONFIG}. {hint}")
        return cls(path)

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    def lock(self) -> None:
        """Lock the folder: only one coordinator at a time may write. The kernel unlocks it when the process
        ends."""
        if self._lock is not None:
            return
        try:
            file = open(  # noqa: SIM115 - open as long as the run is
                self.path / "run.lock", "a+", opener=opened_here
            )
        except OSError as error:
            raise RunFolderError(f"{self.path} can't be written: {error.strerror}.") from error
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            file.seek(0)
            holder = (file.read().splitlines() or ["?"])[0]
            file.close()
            raise RunFolderError(
                f"{self.path} is being trained right now, by process {holder}."
            ) from None
        file.truncate(0)
        file.write(f"{os.getpid()}\n")
        file.flush()
        self._lock = file
        self._identity = self._inode()

    @property
    def is_gone(self) -> bool:
        """If true, the folder was deleted or moved since it was locked. A disk that does not answer is not
        gone."""
        if self._identity is None:
            return False
        try:
            return self._inode() != self._identity
        except (FileNotFoundError, NotADirectoryError):
            return True
        except OSError:
            return False

    def _inode(self) -> tuple[int, int]:
        found = self.path.stat()
        return found.st_dev, found.st_ino

    @property
    def locked(self) -> bool:
        """If true, a coordinator is training in it."""
        try:
            with open(self.path / "run.lock") as file:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except FileNotFoundError:
            return False
        except OSError:
            return True
        return False

    def unlock(self) -> None:
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def owner_warning(self) -> str | None:
        """Return a warning if another user made this run: its job file is code of that user."""
        owners = {self.path.stat().st_uid, (self.path / CONFIG).stat().st_uid} - {os.geteuid()}
        if not owners:
            return None
        made_by = " and ".join(_user(uid) for uid in sorted(owners))
        return (
            f"{self.path} was made by {made_by}, not by you ({_user(os.geteuid())}). Its checkpoints "
            "can't run code, but its job file is code, and is run as you"
        )

    @property
    def config(self) -> dict[str, Any]:
        return self._read(CONFIG)

    @property
    def summary(self) -> dict[str, Any] | None:
        """How the run ended; None if it has not ended, or was killed."""
        return self._read(SUMMARY) if (self.path / SUMMARY).is_file() else None

    def write_config(self, config: dict[str, Any]) -> None:
        write_json(self.path / CONFIG, config)

    def note_fields(
        self, fields: Mapping[str, Any], settings: Mapping[str, str], job: str = ""
    ) -> None:
        """Save the job's class and hyperparameters, and where each came from, once a worker has loaded it."""
        if (self.path / CONFIG).is_file():
            noted = {
                name: {"value": value, "from": source_of(name, settings)}
                for name, value in fields.items()
            }
            config = self.config
            if job and isinstance(config.get("job"), dict):
                config["job"] = {**config["job"], "class": job}
            self.write_config({**config, "fields": noted})

    def write_summary(self, summary: dict[str, Any]) -> None:
        write_json(self.path / SUMMARY, summary)

    def forget_summary(self) -> None:
        """Delete the summary, because the run continues; events.jsonl keeps how it ended before."""
        (self.path / SUMMARY).unlink(missing_ok=True)

    def request(self, workers: int) -> None:
        """Ask the coordinator that trains in it for another number of workers."""
        write_json(self.path / REQUEST, write(ScaleRequest(workers)))

    def take_request(self) -> ScaleRequest | None:
        """Return the request since the last call, if any. One that can't be read asks for 0 workers."""
        path = self.path / REQUEST
        if not path.is_file():
            return None
        try:
            with open(path) as file:
                request = read(ScaleRequest, json.loads(file.read(MAX_REQUEST_CHARS)))
        except (OSError, ValueError, RecursionError, ProtocolError):
            request = ScaleRequest(0)
        path.unlink(missing_ok=True)
        return request

    def discard(self) -> None:
        """Delete a run in which nothing was trained, unless another coordinator is training in it."""
        if not self.locked:
            shutil.rmtree(self.path, ignore_errors=True)

    def _read(self, name: str) -> dict[str, Any]:
        try:
            value = json.loads((self.path / name).read_text())
        except (OSError, ValueError) as error:
            raise RunFolderError(f"{self.path / name} can't be read: {error}") from error
        if not isinstance(value, dict):
            raise RunFolderError(f"{self.path / name} is not what manyhands writes.")
        return value


def runs_in(root: Path) -> list[RunFolder]:
    """Return the runs in a folder, oldest first."""
    folders = [path.parent for path in root.glob(f"*/{CONFIG}")]
    return [RunFolder(path) for path in sorted(folders, key=lambda p: (p / CONFIG).stat().st_mtime)]


def _user(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"the user with id {uid}"


def _create_unique(root: Path, job_name: str) -> Path:
    name = re.sub(r"[^a-z0-9]+", "-", job_name.lower()).strip("-") or "run"
    stamp = time.strftime("%Y%m%d-%H%M%S")
    root.mkdir(parents=True, exist_ok=True)
    for suffix in ["", *(f"-{n}" for n in range(2, 1000))]:
        path = root / f"{name}-{stamp}{suffix}"
        try:
            path.mkdir()
        except FileExistsError:
            continue
        return path
    raise RunFolderError(f"{root} has a thousand runs of this second already.")
