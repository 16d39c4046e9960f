"""Reads text files in pieces, compressed or not, and writes files atomically."""

from __future__ import annotations

import bz2
import gzip
import lzma
import os
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from manyhands.errors import DataError

BLOCK_BYTES = 4 << 20
MAX_WORD_BYTES = 1 << 20
"""A longer word is not text, and would have to be in memory as a whole."""

COMPRESSIONS: dict[str, tuple[Callable[..., Any], str]] = {
    ".gz": (gzip.open, "gunzip"),
    ".bz2": (bz2.open, "bunzip2"),
    ".xz": (lzma.open, "unxz"),
}
"""By suffix: the function that opens the file, and the command that decompresses it."""


def is_compressed(path: Path) -> bool:
    return path.suffix in COMPRESSIONS


def check_readable(path: Path) -> None:
    if path.is_dir():
        raise DataError(f"{path} is a folder. Give a text file.")
    try:
        with open(path, "rb"):
            empty = path.stat().st_size == 0
    except FileNotFoundError as error:
        here = (
            f"{path.parent} has no such file"
            if path.parent.is_dir()
            else "its folder does not exist either"
        )
        raise DataError(f"{path} does not exist: {here}. Give the path of a text file.") from error
    except PermissionError as error:
        raise DataError(
            f"{path} can't be read: permission denied. Allow it: chmod u+r {path}"
        ) from error
    except OSError as error:
        raise DataError(f"{path} can't be read: {error.strerror}.") from error
    if empty:
        raise DataError(f"{path} is empty: 0 bytes. Give a file with text in it.")


@dataclass
class TextPiece:
    """A piece of the file. The reader continues after `done`."""

    bytes: NDArray[np.uint8]
    done: int = 0


def pieces(path: Path, start: int, stop: int | None) -> Iterator[tuple[TextPiece, int, int, bool]]:
    """Yield pieces of the text: (piece, start, limit for beginnings of words, whether it is the last).

    The bytes after `piece.done`, an unfinished word, are repeated at the start of the next piece.
    """
    from manyhands.data.text_scan import between_words

    check_readable(path)
    with _opened(path) as file:
        # Start a little earlier, to see whether a word crosses the border.
        before = min(start, 3)
        if start:
            file.seek(start - before)
        begin, place, left = before, start - before, b""
        while True:
            block = file.read(BLOCK_BYTES)
            _check_text(block, path, place)
            whole = left + block
            text = TextPiece(np.frombuffer(whole, np.uint8))
            ended = not block
            if begin:
                begin = between_words(text.bytes, begin)
            origin = place - len(left)
            limit = len(whole) if stop is None else min(len(whole), stop - origin)
            text.done = max(begin, limit)
            if begin < limit:
                yield text, begin, limit, ended
            begin = 0
            place += len(block)
            if ended or (stop is not None and origin + text.done >= stop):
                return
            left = whole[text.done :]
            if len(left) > MAX_WORD_BYTES:
                raise DataError(
                    f"{path}, byte {place - len(left):,}: a word of more than {MAX_WORD_BYTES:,} bytes. "
                    "It is not text with spaces between words."
                )


def _check_text(block: bytes, path: Path, place: int) -> None:
    zero = block.find(b"\0")
    if zero >= 0:
        raise DataError(
            f"{path} is binary, not text: byte {place + zero:,} is zero. Give a text file in UTF-8 "
            "(plain, or compressed with the name ending in .gz, .bz2 or .xz)."
        )


def decoded(word: bytes, path: Path) -> str:
    try:
        return word.decode()
    except UnicodeDecodeError as error:
        shown = word[:40].decode(errors="backslashreplace")
        raise DataError(
            f"{path} is not UTF-8: it has the word {shown!r}. Convert it, for example from Latin-1: "
            f"iconv -f latin1 -t utf-8 {path} > {path.stem}.utf8.txt"
        ) from error


@contextmanager
def _opened(path: Path) -> Iterator[IO[bytes]]:
    """Open a file and decompress it. Errors of compression are raised as DataError."""
    plain: Callable[..., Any] = partial(open, buffering=0)
    opener = COMPRESSIONS[path.suffix][0] if is_compressed(path) else plain
    try:
        with opener(path, "rb") as file:
            yield file
    except EOFError as error:
        raise DataError(
            f"{path} ends too early: it is truncated. Fetch or make it again."
        ) from error
    except (zlib.error, lzma.LZMAError, OSError) as error:
        raise DataError(
            f"{path} can't be read as {path.suffix or 'a file'}: {error}. Fetch or make it again."
        ) from error


def unpacking(path: Path) -> str:
    """Return the command that decompresses a file."""
    return f"{COMPRESSIONS[path.suffix][1]} -k {path}"


@contextmanager
def written_beside(path: Path) -> Iterator[IO[bytes]]:
    """Write a file atomically: under another name, flushed, then renamed."""
    beside = path.with_name(f".{path.name}.{os.getpid()}.new")
    try:
        with open(beside, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
    except OSError as error:
        raise DataError(f"{path} can't be written: {error.strerror}.") from error
    finally:
        beside.unlink(missing_ok=True)
