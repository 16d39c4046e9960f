"""`Vectors`: words and their vectors, in the file formats of word2vec and gensim.

The text format has a line with the number of words and columns, then one line per word with its numbers. The
binary format has the same first line, then word, space, float32 numbers (little-endian) and, from word2vec
itself, a newline. The format is detected from the content, not from the name.

Cost: the matrix, and the same again for the normalized rows when similarities are computed.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import IO

import numpy as np
from numpy.typing import NDArray

from manyhands.errors import DataError, UsageError

HEADER_BYTES = 64
"""Maximum length of the first line: two numbers."""
LONGEST_WORD = 1 << 16

WordsAndRows = tuple[list[str], NDArray[np.float32]]


class Vectors:
    """Row i of `matrix` is the vector of word i. Words are ordered by frequency."""

    def __init__(self, words: Sequence[str], matrix: NDArray[np.float32]) -> None:
        if matrix.ndim != 2 or len(words) != len(matrix):
            raise UsageError(
                f"Vectors: {len(words):,} words and a matrix of shape {matrix.shape} do not match: "
                "give one row per word."
            )
        self.words = tuple(words)
        self.matrix = matrix
        if len(self.ids) != len(self.words):
            raise UsageError("Vectors: some words occur twice. Give each word once.")

    @cached_property
    def ids(self) -> dict[str, int]:
        return {word: number for number, word in enumerate(self.words)}

    @cached_property
    def unit(self) -> NDArray[np.float32]:
        """The rows normalized to length 1; rows of zeros stay zero."""
        lengths = np.sqrt(np.einsum("ij,ij->i", self.matrix, self.matrix, dtype=np.float64))
        lengths[lengths == 0] = 1.0
        return (self.matrix / lengths[:, None]).astype(np.float32)

    def __len__(self) -> int:
        return len(self.words)

    def __contains__(self, word: object) -> bool:
        return word in self.ids

    def __getitem__(self, word: str) -> NDArray[np.float32]:
        return self.matrix[self.id_of(word)]

    def __repr__(self) -> str:
        return f"Vectors({len(self):,} words of {self.matrix.shape[1]} numbers)"

    def id_of(self, word: str) -> int:
        number = self.ids.get(word)
        if number is not None:
            return number
        folded = {known.lower(): known for known in self.words}
        similar = difflib.get_close_matches(word.lower(), folded, n=3, cutoff=0.6)
        listed = ", ".join(repr(folded[name]) for name in similar)
        hint = f"the closest are {listed}" if similar else "nothing is similar to it"
        raise UsageError(
            f"{word!r} is not among the {len(self):,} words; {hint}. Rare words are left out by min_count: "
            "train with a lower one to include it."
        )

    def similarity(self, a: str, b: str) -> float:
        """Return the cosine of the angle between two words: 1 for the same direction."""
        return float(self.unit[self.id_of(a)] @ self.unit[self.id_of(b)])

    def most_similar(
        self,
        positive: str | Iterable[str],
        negative: str | Iterable[str] = (),
        count: int = 10,
    ) -> list[tuple[str, float]]:
        """Return the words nearest to the sum of `positive` minus `negative`, nearest first.

        `most_similar(["king", "woman"], ["man"])`. The given words are left out.
        """
        plus = [self.id_of(word) for word in _listed(positive)]
        minus = [self.id_of(word) for word in _listed(negative)]
        if not plus and not minus:
            raise UsageError(
                'most_similar was given no word. Give one or more: most_similar("king").'
            )
        if count < 1:
            raise UsageError(f"most_similar: count={count} is too small: give 1 or more.")
        query = self.unit[plus].sum(axis=0) - self.unit[minus].sum(axis=0)
        length = float(np.linalg.norm(query))
        scores = self.unit @ (query / (length or 1.0))
        given = np.array([*plus, *minus])
        scores[given] = -np.inf
        count = min(count, len(self) - len(set(plus + minus)))
        best = np.argpartition(-scores, count - 1)[:count] if count else np.array([], dtype=int)
        best = best[np.lexsort((best, -scores[best]))]
        return [(self.words[number], float(scores[number])) for number in best]

    def save(self, path: str | os.PathLike[str], *, binary: bool | None = None) -> None:
        """Save in a word2vec format: binary for a name that ends in .bin, else text, unless `binary` is
        given."""
        path = Path(path)
        spaced = next((word for word in self.words if not word or word.split() != [word]), None)
        if spaced is not None:
            raise UsageError(
                f"The word {spaced!r} is empty or has a space in it, which separates fields in the "
                "word2vec formats. Replace spaces by underscores before saving."
            )
        binary = path.suffix == ".bin" if binary is None else binary
        rows = np.ascontiguousarray(self.matrix, dtype="<f4")
        beside = path.with_name(f".{path.name}.{os.getpid()}.new")
        try:
            with open(beside, "wb") as file:
                file.write(f"{len(self)} {rows.shape[1]}\n".encode())
                for word, row in zip(self.words, rows, strict=True):
                    if binary:
                        file.write(word.encode() + b" " + row.tobytes() + b"\n")
                    else:
                        # The shortest digits that give the same float32 back.
                        numbers = " ".join(map(str, row))
                        file.write(f"{word} {numbers}\n".encode())
                file.flush()
                os.fsync(file.fileno())
            os.replace(beside, path)
        except OSError as error:
            raise DataError(f"{path} can't be written: {error.strerror}.") from error
        finally:
            beside.unlink(missing_ok=True)

    @classmethod
    def load(cls, path: str | os.PathLike[str], *, binary: bool | None = None) -> Vectors:
        """Load a file in a word2vec format, detected from its first row unless `binary` is given."""
        path = Path(path)
        try:
            with open(path, "rb") as file:
                count, width = _header(file, path)
                start = file.tell()
                if binary is None:
                    binary = _looks_binary(file.read(LONGEST_WORD + 4 * width), width)
                    file.seek(start)
                read = _read_binary if binary else _read_text
                words, matrix = read(file, count, width, path)
        except OSError as error:
            raise DataError(f"{path} can't be read: {error.strerror}.") from error
        return cls(words, matrix)


def _listed(words: str | Iterable[str]) -> list[str]:
    return [words] if isinstance(words, str) else list(words)


def _header(file: IO[bytes], path: Path) -> tuple[int, int]:
    line = file.readline(HEADER_BYTES)
    parts = line.split()
    if not line.endswith(b"\n") or len(parts) != 2 or not all(part.isdigit() for part in parts):
        raise DataError(
            f"{path}: expected a first line with the number of words and of columns, as '71291 100', "
            f"and found {line[:40]!r}. It is not a file of word vectors in a word2vec format."
        )
    count, width = int(parts[0]), int(parts[1])
    if width == 0:
        raise DataError(f"{path}: its first line says vectors of 0 numbers. Save them again.")
    return count, width


def _looks_binary(sample: bytes, width: int) -> bool:
    """Return whether the sample is binary: text begins with a line of a word and `width` numbers."""
    fields = sample.split(b"\n", 1)[0].split()
    if len(fields) != width + 1:
        return True
    try:
        [float(field) for field in fields[1:]]
    except ValueError:
        return True
    return False


def _read_text(file: IO[bytes], count: int, width: int, path: Path) -> WordsAndRows:
    words, matrix = [], np.empty((count, width), dtype=np.float32)
    for number in range(count):
        fields = file.readline().rstrip(b"\r\n ").split(b" ")
        if len(fields) != width + 1:
            raise DataError(
                f"{path}, line {number + 2}: expected a word and {width} numbers, and found "
                f"{len(fields)} fields. The file is truncated, or not in the word2vec text format."
            )
        words.append(_word(fields[0], path))
        try:
            matrix[number] = np.array(fields[1:], dtype=np.float64)
        except ValueError as error:
            raise DataError(f"{path}, line {number + 2}: {error}. Save it again.") from error
    return words, matrix


def _read_binary(file: IO[bytes], count: int, width: int, path: Path) -> WordsAndRows:
    words, matrix = [], np.empty((count, width), dtype=np.float32)
    content, at = file.read(), 0
    for number in range(count):
        blank = content.find(b" ", at, at + LONGEST_WORD)
        end = blank + 1 + 4 * width
        if blank < 0 or end > len(content):
            raise DataError(
                f"{path}: expected {count:,} words, and the file ends in number {number + 1:,}. It is "
                "truncated, or not in the word2vec binary format. Fetch or save it again."
            )
        # word2vec ends a row with a newline, gensim does not.
        words.append(_word(content[at:blank].lstrip(b"\n"), path))
        matrix[number] = np.frombuffer(content, dtype="<f4", count=width, offset=blank + 1)
        at = end
    return words, matrix


def _word(field: bytes, path: Path) -> str:
    try:
        return field.decode()
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: the word {field!r} is not UTF-8. Save the file again.") from error
