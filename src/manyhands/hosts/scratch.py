"""Private folders for sockets and similar files, deleted soon after their processes have ended.

A scratch folder is in the temporary folder, with mode 0700. Its processes hold a lock on a file in it,
which the kernel releases when a process ends, however it ends. So a folder that nobody has locked was left
by a killed process, and the next process that creates a scratch folder deletes it. Only folders of the same
user, directly in the temporary folder and with the lock file in them, are deleted: no file lists paths to
delete, so none can be changed to delete something else.

If the lock file is deleted by the time it is locked, another process has just cleaned up: try again.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
import tempfile
from contextlib import suppress
from pathlib import Path

from manyhands.errors import ManyhandsError

PREFIX = "manyhands-"
LOCK = ".manyhands-scratch"
"""Only scratch folders have this file."""


class Scratch:
    """A private folder. Deleted by `close`, or by a later process if this one is killed."""

    def __init__(self, name: str | None = None) -> None:
        """Open the folder called `name`. Processes share it, and the last one to close it deletes it."""
        remove_abandoned()
        self._shared = name is not None
        while True:
            self.path = _make(name)
            lock = _locked(self.path, fcntl.LOCK_SH, os.O_CREAT)
            if lock is not None:
                self._lock: int | None = lock
                return

    def __enter__(self) -> Path:
        return self.path

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        if self._lock is None:
            return
        with suppress(OSError):
            if self._shared:  # others may use it
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _delete(self.path)
        os.close(self._lock)
        self._lock = None


def remove_abandoned() -> None:
    """Delete this user's scratch folders that no process uses."""
    with suppress(OSError), os.scandir(tempfile.gettempdir()) as entries:
        for entry in entries:
            if entry.name.startswith(PREFIX) and _is_ours(entry.path):
                lock = _locked(Path(entry.path), fcntl.LOCK_EX | fcntl.LOCK_NB)
                if lock is not None:
                    _delete(Path(entry.path))
                    os.close(lock)


def _make(name: str | None) -> Path:
    # Short: the path of a unix socket is limited to about a hundred bytes.
    if name is None:
        return Path(tempfile.mkdtemp(prefix=PREFIX))
    path = Path(tempfile.gettempdir()) / f"{PREFIX}{name}"
    with suppress(FileExistsError):
        path.mkdir(mode=0o700)
    if not _is_ours(path) and os.path.lexists(path):
        raise ManyhandsError(f"{path} belongs to another user.")
    return path


def _is_ours(path: str | Path) -> bool:
    with suppress(OSError):
        found = os.lstat(path)  # not the target of a symlink
        return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid()
    return False


def _locked(folder: Path, how: int, create: int = 0) -> int | None:
    """Lock the file of a folder. None if another process has locked it, or it does not exist (any more)."""
    try:
        lock = os.open(folder / LOCK, os.O_RDWR | os.O_NOFOLLOW | create, 0o600)
    except OSError:
        if create and folder.exists():
            raise
        return None
    try:
        fcntl.flock(lock, how)
    except OSError:
        if create:  # a file system without locks: no process will consider this folder abandoned
            return lock
        os.close(lock)
        return None
    with suppress(FileNotFoundError):
        if os.path.samestat(os.fstat(lock), os.lstat(folder / LOCK)):
            return lock
    os.close(lock)
    return None


def _delete(folder: Path) -> None:
    """Delete a folder, its lock file last: if this process is killed in between, another can continue."""
    with suppress(OSError):
        for entry in list(os.scandir(folder)):
            if entry.is_dir(follow_symlinks=False):
                shutil.rmtree(entry.path, ignore_errors=True)
            elif entry.name != LOCK:
                os.unlink(entry.path)
        os.unlink(folder / LOCK)
        os.rmdir(folder)
