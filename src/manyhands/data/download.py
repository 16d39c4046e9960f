"""Downloads files once, with checksums, atomically.

    lock the folder                         others wait here, and then find the files
    for each missing file:
        for each mirror, until one works:   read into NAME.part, hashing
            wrong size or SHA-256:          try the next mirror
            correct:                        rename NAME.part to NAME

A rename is atomic, so a file under its own name is always complete. The lock is `flock` on a file in the
folder: the kernel releases it when its process dies. A process that waited for another one that failed
reports that failure (from the lock file) instead of trying the same dead mirrors again. So eight workers on
a machine without a network wait for one set of timeouts, not for eight.

Cost: each file once over the network, for all processes of a machine together.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import http.client
import os
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING

from manyhands.errors import DataError

if TYPE_CHECKING:
    from rich.progress import Progress

CHUNK_BYTES = 1 << 16
LOCK_NAME = ".lock"


@dataclass(frozen=True)
class RemoteFile:
    """A file that every mirror serves under the same name."""

    name: str
    num_bytes: int
    sha256: str


@dataclass(frozen=True)
class DownloadTimeouts:
    answer_s: float = 20.0
    """For connecting, and between two reads of a response. (DNS has the timeouts of the system.)"""
    file_s: float = 600.0
    """For one file from one mirror, even if it keeps sending slowly."""
    lock_s: float = 1800.0
    """For another process that is downloading the same files."""
    poll_s: float = 0.1
    """Between two attempts to lock."""


DEFAULT_TIMEOUTS = DownloadTimeouts()


class _MirrorFailed(Exception):
    """A mirror could not provide a file; the next one is tried."""


def cache_home() -> Path:
    """Return the cache folder for downloaded and prepared data."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    # The XDG specification: a relative path is invalid and is ignored.
    home = Path(base) if os.path.isabs(base) else Path(os.path.expanduser("~/.cache"))
    return home / "manyhands"


def fetch(
    files: Sequence[RemoteFile],
    *,
    folder: Path,
    mirrors: Sequence[str],
    title: str,
    remedy: str,
    timeouts: DownloadTimeouts = DEFAULT_TIMEOUTS,
) -> None:
    """Download missing files to a folder. Safe to call from many processes at once.

    `title` names the data set and `remedy` tells the user what to do; both are part of errors.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _lock(folder, title, timeouts) as (lock, waited):
            missing = [file for file in files if not (folder / file.name).exists()]
            failure = lock.read() if waited else ""
            if missing and failure:
                raise DataError(f"{failure}\n{remedy}")
            _write_failure(lock, "")
            try:
                _fetch_missing(missing, folder, mirrors, title, timeouts)
            except DataError as error:
                _write_failure(lock, str(error))
                raise DataError(f"{error}\n{remedy}") from error
    except OSError as error:
        raise DataError(f"{title} can't be stored in {folder}: {error}\n{remedy}") from error


@contextlib.contextmanager
def _lock(folder: Path, title: str, timeouts: DownloadTimeouts) -> Iterator[tuple[IO[str], bool]]:
    """Yield the locked lock file of a folder, and whether another process held it before."""
    path = folder / LOCK_NAME
    waited = False
    deadline = time.monotonic() + timeouts.lock_s
    with path.open("a+", encoding="utf-8") as lock:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if not waited:
                    _print(f"Waiting for another process that downloads {title} into {folder}")
                waited = True
            if time.monotonic() > deadline:
                raise DataError(
                    f"Waited {timeouts.lock_s:g} s for another process to download {title} into "
                    f"{folder}, and it still holds {path}. See what it does: fuser -v {path}"
                )
            time.sleep(timeouts.poll_s)
        lock.seek(0)
        yield lock, waited


def _write_failure(lock: IO[str], text: str) -> None:
    lock.seek(0)
    lock.truncate()
    lock.write(text)
    lock.flush()


def _fetch_missing(
    files: Sequence[RemoteFile],
    folder: Path,
    mirrors: Sequence[str],
    title: str,
    timeouts: DownloadTimeouts,
) -> None:
    if not files:
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    name = TextColumn("{task.description}")
    columns = (name, BarColumn(), DownloadColumn(), TransferSpeedColumn())
    terminal = sys.stderr.isatty()
    with Progress(*columns, console=Console(stderr=True), disable=not terminal) as bars:
        for file in files:
            failures = []
            for mirror in mirrors:
                url = f"{mirror.rstrip('/')}/{file.name}"
                try:
                    _fetch_one(url, file, folder, bars, timeouts)
                    break
                except _MirrorFailed as error:
                    failures.append(f"  {url}: {error}")
            else:
                # Other files would fail in the same way.
                raise DataError(f"{title} can't be downloaded. Tried:\n" + "\n".join(failures))


def _fetch_one(
    url: str, file: RemoteFile, folder: Path, bars: Progress, timeouts: DownloadTimeouts
) -> None:
    """Download a file with a progress bar on a terminal, or a line in a log file; both on stderr."""
    # A fixed name: the lock allows one writer, and the file of a killed process is overwritten.
    part = folder / f"{file.name}.part"
    if bars.disable:
        _print(f"Downloading {url} ({file.num_bytes / 1e6:.1f} MB)")
    task = bars.add_task(file.name, total=file.num_bytes)
    digest = hashlib.sha256()
    num_bytes = 0
    try:
        with part.open("wb") as out:
            for chunk in _read(url, file, timeouts):
                digest.update(chunk)
                num_bytes += len(chunk)
                out.write(chunk)
                bars.advance(task, len(chunk))
        if num_bytes != file.num_bytes:
            raise _MirrorFailed(f"expected {file.num_bytes:,} bytes, and got {num_bytes:,}")
        if digest.hexdigest() != file.sha256:
            raise _MirrorFailed(f"expected SHA-256 {file.sha256}, and got {digest.hexdigest()}")
        part.rename(folder / file.name)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def _read(url: str, file: RemoteFile, timeouts: DownloadTimeouts) -> Iterator[bytes]:
    """Yield the chunks of a response. Network errors are raised as _MirrorFailed."""
    deadline = time.monotonic() + timeouts.file_s
    num_bytes = 0
    try:
        with urllib.request.urlopen(url, timeout=timeouts.answer_s) as answer:
            # read1 returns what has arrived, so that the deadline also covers a slow sender.
            while chunk := answer.read1(CHUNK_BYTES):
                num_bytes += len(chunk)
                if num_bytes > file.num_bytes:
                    raise _MirrorFailed(f"expected {file.num_bytes:,} bytes, and got more")
                if time.monotonic() > deadline:
                    raise _MirrorFailed(f"too slow: {num_bytes:,} bytes in {timeouts.file_s:g} s")
                yield chunk
    except urllib.error.HTTPError as error:
        with error:
            raise _MirrorFailed(f"HTTP {error.code} {error.reason}") from error
    except (TimeoutError, urllib.error.URLError) as error:
        reason = getattr(error, "reason", error)  # a URLError may wrap a timeout
        if isinstance(reason, TimeoutError):
            reason = f"no answer within {timeouts.answer_s:g} s"
        raise _MirrorFailed(str(reason)) from error
    except (OSError, http.client.HTTPException) as error:
        raise _MirrorFailed(f"{type(error).__name__}: {error}") from error


def _print(line: str) -> None:
    # One write per line, so that lines of processes that share a log do not mix.
    sys.stderr.write(line + "\n")
    sys.stderr.flush()
