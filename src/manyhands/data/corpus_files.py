"""A text as a data set of word ids, prepared once by all processes together.

    corpus = manyhands.data.corpus("text.txt", min_count=5)
    corpus.vocabulary, corpus[0]

Each process that opens a text that is not prepared yet takes part: a plain file is counted in pieces, each by
the first process that locks it, so that the workers of a run read it once together. The kernel releases the
locks of a process that dies, and another process takes its piece.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from manyhands.data.download import cache_home
from manyhands.data.text import Corpus, Vocabulary, count_words, encode
from manyhands.data.text_files import check_readable, is_compressed
from manyhands.errors import DataError

FORMAT = 1
"""Version of the files in the cache."""
PIECE_BYTES = 16 << 20
"""Bytes that a process counts at a time: about a fifth of a second."""


class WordCorpus(Corpus):
    """A Corpus with its vocabulary."""

    def __init__(self, path: Path, vocabulary: Vocabulary, *, chunk: int) -> None:
        super().__init__(path, chunk=chunk)
        self.vocabulary = vocabulary


def corpus(
    path: str | os.PathLike[str],
    *,
    min_count: int = 5,
    max_words: int | None = None,
    chunk: int = 1_000,
    cache: str | os.PathLike[str] | None = None,
) -> WordCorpus:
    """Return the text in chunks of about `chunk` words, with the words that occur `min_count` times or
    more."""
    folder = Path(cache) if cache is not None else cache_home() / "text"
    vocabulary, ids = prepare(path, folder, min_count=min_count, max_words=max_words)
    return WordCorpus(ids, vocabulary, chunk=chunk)


def prepare(
    path: str | os.PathLike[str],
    cache: str | os.PathLike[str],
    *,
    min_count: int = 5,
    max_words: int | None = None,
) -> tuple[Vocabulary, Path]:
    """Return the vocabulary of a text and the file of its ids, from the cache or made now."""
    text = Path(path)
    folder = Path(cache) / _key(text, min_count, max_words)
    words_file, ids_file = folder / "vocabulary.txt", folder / "ids.int32"
    if not ids_file.exists():
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise DataError(
                f"The cache folder {folder} can't be created: {error.strerror}."
            ) from error
        counts = _count_together(text, folder)
        if not counts:
            raise DataError(f"{text} has no words, only spaces. Is it the right file?")
        vocabulary = Vocabulary.of(counts, min_count=min_count, max_words=max_words)
        with _claim(folder / "encode", wait=True):
            if not ids_file.exists():
                vocabulary.save(words_file)
                encode(text, vocabulary, ids_file)
    return Vocabulary.load(words_file), ids_file


def _key(path: Path, min_count: int, max_words: int | None) -> str:
    check_readable(path)
    stat = path.stat()
    facts = [FORMAT, str(path.resolve()), stat.st_size, stat.st_mtime_ns, min_count, max_words]
    return f"{path.name}-{hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]}"


def _count_together(text: Path, folder: Path) -> Counter[str]:
    pieces: list[tuple[int, int | None]] = [(0, None)]
    if not is_compressed(text):
        size = text.stat().st_size
        pieces = [(at, min(at + PIECE_BYTES, size)) for at in range(0, size, PIECE_BYTES)]
    # First the pieces that no process has begun; then the others, in case one of them died.
    for wait in (False, True):
        for number, (start, stop) in enumerate(pieces):
            counted = folder / f"counts-{number}"
            if counted.exists():
                continue
            with _claim(counted, wait=wait) as mine:
                if mine and not counted.exists():
                    found = count_words(text, start, stop)
                    counts = np.fromiter(found.values(), np.int64, len(found))
                    Vocabulary(tuple(found), counts).save(counted)
    total: Counter[str] = Counter()
    for number in range(len(pieces)):
        piece = Vocabulary.load(folder / f"counts-{number}")
        total.update(dict(zip(piece.words, piece.counts.tolist(), strict=True)))
    return total


@contextmanager
def _claim(target: Path, *, wait: bool) -> Iterator[bool]:
    """Lock `target`; yield false if another process holds the lock, unless `wait` is true."""
    with open(target.with_name(f".{target.name}.lock"), "a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            yield False
            return
        yield True
