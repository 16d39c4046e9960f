"""Evaluates word vectors: analogies, and human ratings of the similarity of words.

Analogies (Mikolov et al., 2013): "a is to b as c is to ?" is correct if the word nearest to b - a + c,
excluding the three given ones, is the fourth. Counted as in gensim: among the most frequent words only, in
lower case, skipping questions with other words. Sections whose name begins with "gram" are syntactic, the
others semantic.

Pairs (WordSim-353, MEN, SimLex-999, RG-65): Spearman's rank correlation between cosines and human ratings.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from manyhands.errors import DataError
from manyhands.word2vec.vectors import Vectors

BATCH = 512
"""Questions per matrix product."""


@dataclass(frozen=True)
class AnalogyCounts:
    right: int = 0
    asked: int = 0
    """Without questions that have an unknown word."""

    @property
    def accuracy(self) -> float:
        return self.right / self.asked if self.asked else 0.0

    def __add__(self, other: AnalogyCounts) -> AnalogyCounts:
        return AnalogyCounts(self.right + other.right, self.asked + other.asked)


@dataclass(frozen=True)
class Score:
    """Results on a file of analogies."""

    sections: dict[str, AnalogyCounts] = field(default_factory=dict)
    left_out: int = 0
    """Questions with a word that is not among the most frequent."""

    @property
    def total(self) -> AnalogyCounts:
        return sum(self.sections.values(), AnalogyCounts())

    @property
    def semantic(self) -> AnalogyCounts:
        rest = (counts for name, counts in self.sections.items() if not name.startswith("gram"))
        return sum(rest, AnalogyCounts())

    @property
    def syntactic(self) -> AnalogyCounts:
        grammar = (counts for name, counts in self.sections.items() if name.startswith("gram"))
        return sum(grammar, AnalogyCounts())

    @property
    def accuracy(self) -> float:
        return self.total.accuracy


def analogies(vectors: Vectors, file: str | os.PathLike[str], restrict: int = 30_000) -> Score:
    """Return the accuracy on a file of analogies (like questions-words.txt), among the `restrict` most
    frequent words."""
    words = vectors.words[:restrict]
    ids = _folded_ids(words)
    folded = np.array([ids[word.lower()] for word in words])
    unit = vectors.unit[: len(words)]
    sections: dict[str, AnalogyCounts] = {}
    left_out = 0
    for name, questions in _questions(Path(file)).items():
        known = [
            [ids[w] for w in question] for question in questions if all(w in ids for w in question)
        ]
        left_out += len(questions) - len(known)
        parts = [known[start : start + BATCH] for start in range(0, len(known), BATCH)]
        right = sum(_answered(unit, folded, np.array(part)) for part in parts)
        sections[name] = sections.get(name, AnalogyCounts()) + AnalogyCounts(right, len(known))
    return Score(sections, left_out)


def _answered(
    unit: NDArray[np.float32], folded: NDArray[np.int64], asked: NDArray[np.int64]
) -> int:
    """Count the questions (four ids per row) that are answered correctly."""
    a, b, c, d = asked.T
    scores = (unit[b] - unit[a] + unit[c]) @ unit.T
    rows = np.arange(len(asked))
    for word in (a, b, c):
        scores[rows, word] = -np.inf
    return int(np.count_nonzero(folded[scores.argmax(axis=1)] == d))


def _questions(path: Path) -> dict[str, list[list[str]]]:
    sections: dict[str, list[list[str]]] = {}
    current: list[list[str]] | None = None
    for number, line in enumerate(_lines(path), 1):
        if line.startswith(":"):
            current = sections.setdefault(line[1:].strip(), [])
            continue
        fields = line.lower().split()
        if not fields:
            continue
        if current is None or len(fields) != 4:
            raise DataError(
                f"{path}, line {number}: expected ': section' or four words, and found {line[:60]!r}. "
                "Give a file of analogies, like questions-words.txt."
            )
        current.append(fields)
    if not any(sections.values()):
        raise DataError(f"{path} has no analogies. Give a file like questions-words.txt.")
    return sections


def pairs(vectors: Vectors, file: str | os.PathLike[str]) -> tuple[float, int, int]:
    """Return (Spearman's correlation with human ratings, pairs with both words known, all pairs)."""
    path = Path(file)
    ids = _folded_ids(vectors.words)
    asked, ratings, cosines = 0, [], []
    for number, line in enumerate(_lines(path), 1):
        fields = _fields(line)
        if len(fields) < 3:
            if fields and not line.startswith("#"):
                raise DataError(
                    f"{path}, line {number}: expected two words and a number, and found {line[:60]!r}."
                )
            continue
        try:
            rating = float(fields[2])
        except ValueError:
            if asked == 0:  # a header
                continue
            raise DataError(
                f"{path}, line {number}: expected a number after two words, and found {fields[2]!r}."
            ) from None
        asked += 1
        first, second = ids.get(fields[0].lower()), ids.get(fields[1].lower())
        if first is not None and second is not None:
            ratings.append(rating)
            cosines.append(float(vectors.unit[first] @ vectors.unit[second]))
    if not asked:
        raise DataError(f"{path} has no pairs. Give lines of two words and a number.")
    return spearman(np.array(ratings), np.array(cosines)), len(ratings), asked


def _folded_ids(words: Sequence[str]) -> dict[str, int]:
    """Return ids by word in lower case. Of words that differ only in case, the most frequent counts."""
    return {words[number].lower(): number for number in reversed(range(len(words)))}


def spearman(x: NDArray[np.float64], y: NDArray[np.float64]) -> float:
    """Return the correlation of ranks; equal values get the mean of their ranks. NaN if it is undefined."""
    if len(x) < 2:
        return float("nan")
    a, b = ranks(x), ranks(y)
    a, b = a - a.mean(), b - b.mean()
    lengths = float(np.sqrt((a @ a) * (b @ b)))
    return float(a @ b) / lengths if lengths else float("nan")


def ranks(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return ranks from 1; equal values get the mean of their ranks."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    means: NDArray[np.float64] = last - (counts - 1) / 2
    return means[inverse]


def _fields(line: str) -> list[str]:
    """Split at tabs, else at semicolons or commas, else at spaces."""
    for between in ("\t", ";", ","):
        if between in line:
            return [part.strip() for part in line.split(between)]
    return line.split()


def _lines(path: Path) -> list[str]:
    try:
        return path.read_bytes().decode("utf-8-sig").splitlines()
    except OSError as error:
        raise DataError(
            f"{path} can't be read: {error.strerror}. Give an existing file."
        ) from error
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not text in UTF-8. Give a file of words.") from error
