"""Files from the network, fetched once, checked, and never seen half done.

    take the folder's lock                  the others wait here, and then find the files
    for each file that is not there:
        for each mirror, until one serves:  read into NAME.part, hashing
            wrong size or SHA-256:          on to the next mirror
            right:                          rename NAME.part to NAME

A rename is atomic, so a file under its own name is always whole. The lock is `flock` on a file in
the folder: it goes away with the process that holds it, however that dies. Whoever waited for a
holder that failed reports that failure (it stands in the lock file) instead of knocking on the same
dead mirrors again; so eight workers on a machine without a network wait for one set of timeouts,
not for eight.

Costs each file's bytes once over the network, for all processes of a machine together.
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
from typing import IO, Protocol

from manyhands.errors import DataError

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
    """To connect, and between two pieces of an answer. (Looking up a name is the system's time.)"""
    file_s: float = 600.0
    """For one whole file from one mirror, however steadily it drips."""
    lock_s: float = 1800.0
    """For another process that is downloading the same files."""
    poll_s: float = 0.1
    """Between two looks at the lock."""


DEFAULT_TIMEOUTS = DownloadTimeouts()


class _MirrorFailed(Exception):
    """Why one mirror did not give one file; the next one is tried."""


def cache_home() -> Path:
    """Where data that was fetched or prepared is kept."""
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
    """Have all of `files` in `folder`. Safe to call from many processes at once.

    `title` names the data set and `remedy` says what a person can do; both end up in the errors.
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
    """The folder's lock file, locked and at its start; and whether another process had it."""
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
                    _say(f"Waiting for another process that downloads {title} into {folder}")
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
    with _progress() as progress:
        for file in files:
            failures = []
            for mirror in mirrors:
                url = f"{mirror.rstrip('/')}/{file.name}"
                try:
                    _fetch_one(url, file, folder, progress, timeouts)
                    break
                except _MirrorFailed as error:
                    failures.append(f"  {url}: {error}")
            else:
                # The other files would meet the same mirrors: one file's failures say it all.
                raise DataError(f"{title} can't be downloaded. Tried:\n" + "\n".join(failures))


def _fetch_one(
    url: str, file: RemoteFile, folder: Path, progress: _Progress, timeouts: DownloadTimeouts
) -> None:
    # One fixed name: under the lock there is one writer, and what a killed one left is overwritten.
    part = folder / f"{file.name}.part"
    progress.start(url, file)
    digest = hashlib.sha256()
    num_bytes = 0
    try:
        with part.open("wb") as out:
            for chunk in _read(url, file, timeouts):
                digest.update(chunk)
                num_bytes += len(chunk)
                out.write(chunk)
                progress.advance(len(chunk))
        if num_bytes != file.num_bytes:
            raise _MirrorFailed(f"expected {file.num_bytes:,} bytes, and got {num_bytes:,}")
        if digest.hexdigest() != file.sha256:
            raise _MirrorFailed(f"expected SHA-256 {file.sha256}, and got {digest.hexdigest()}")
        part.rename(folder / file.name)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def _read(url: str, file: RemoteFile, timeouts: DownloadTimeouts) -> Iterator[bytes]:
    """The pieces of an answer; whatever the network does wrong comes out as _MirrorFailed."""
    deadline = time.monotonic() + timeouts.file_s
    num_bytes = 0
    try:
        with urllib.request.urlopen(url, timeout=timeouts.answer_s) as answer:
            # read1 returns what has come, so that a drip is seen by the deadline.
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
    except TimeoutError as error:
        raise _MirrorFailed(f"no answer within {timeouts.answer_s:g} s") from error
    except urllib.error.URLError as error:
        if isinstance(error.reason, TimeoutError):
            raise _MirrorFailed(f"no answer within {timeouts.answer_s:g} s") from error
        raise _MirrorFailed(str(error.reason)) from error
    except (OSError, http.client.HTTPException) as error:
        raise _MirrorFailed(f"{type(error).__name__}: {error}") from error


class _Progress(Protocol):
    def start(self, url: str, file: RemoteFile) -> None: ...

    def advance(self, num_bytes: int) -> None: ...


class _Lines:
    """For a log file: a line when a file starts, none while it runs."""

    def start(self, url: str, file: RemoteFile) -> None:
        _say(f"Downloading {url} ({file.num_bytes / 1e6:.1f} MB)")

    def advance(self, num_bytes: int) -> None:
        pass


@contextlib.contextmanager
def _progress() -> Iterator[_Progress]:
    """A bar a file on a terminal, plain lines elsewhere; both on stderr, beside any output."""
    if not sys.stderr.isatty():
        yield _Lines()
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    class Bars:
        def start(self, url: str, file: RemoteFile) -> None:
            self.task = bars.add_task(file.name, total=file.num_bytes)

        def advance(self, num_bytes: int) -> None:
            bars.advance(self.task, num_bytes)

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn())
    with Progress(*columns, TransferSpeedColumn(), console=Console(stderr=True)) as bars:
        yield Bars()


def _say(line: str) -> None:
    # One write a line: the lines of processes that share a log stay whole.
    sys.stderr.write(line + "\n")
    sys.stderr.flush()
