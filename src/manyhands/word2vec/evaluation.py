"""How good word vectors are: analogies, and pairs of words that people have judged.

Analogies (Mikolov et al., 2013): "a is to b as c is to ?" is right if the nearest word to b - a + c,
the three given ones left out, is the fourth. Counted as gensim counts: among the commonest words only,
in lower case, questions with a word beyond these left out. Sections whose name begins with "gram" are
syntactic, the others semantic.

Pairs (WordSim-353, MEN, SimLex-999, RG-65): Spearman's rank correlation between the cosines and what
people said.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from manyhands.errors import DataError
from manyhands.word2vec.vectors import Vectors

BATCH = 512
"""Questions that are answered by one matrix product."""


@dataclass(frozen=True)
class AnalogyCounts:
    right: int = 0
    asked: int = 0
    """Without those that had an unknown word."""

    @property
    def accuracy(self) -> float:
        return self.right / self.asked if self.asked else 0.0

    def __add__(self, other: AnalogyCounts) -> AnalogyCounts:
        return AnalogyCounts(self.right + other.right, self.asked + other.asked)


@dataclass(frozen=True)
class Score:
    """Answers to the analogies of a file."""

    sections: dict[str, AnalogyCounts] = field(default_factory=dict)
    left_out: int = 0
    """Questions with a word that is not among those looked at."""

    @property
    def total(self) -> AnalogyCounts:
        return sum(self.sections.values(), AnalogyCounts())

    @property
    def semantic(self) -> AnalogyCounts:
        rest = (tally for name, tally in self.sections.items() if not name.startswith("gram"))
        return sum(rest, AnalogyCounts())

    @property
    def syntactic(self) -> AnalogyCounts:
        grammar = (tally for name, tally in self.sections.items() if name.startswith("gram"))
        return sum(grammar, AnalogyCounts())

    @property
    def accuracy(self) -> float:
        return self.total.accuracy


def analogies(vectors: Vectors, file: str | os.PathLike[str], restrict: int = 30_000) -> Score:
    """Accuracy on a file of analogies (as questions-words.txt), among the `restrict` commonest words."""
    words = [word.lower() for word in vectors.words[:restrict]]
    # Of words that differ in their capitals only, the commonest counts.
    ids: dict[str, int] = {}
    for number, word in enumerate(words):
        ids.setdefault(word, number)
    folded = np.array([ids[word] for word in words])
    unit = vectors.unit[: len(words)]
    sections: dict[str, AnalogyCounts] = {}
    left_out = 0
    for name, questions in _questions(Path(file)).items():
        known = [
            [ids[w] for w in question] for question in questions if all(w in ids for w in question)
        ]
        left_out += len(questions) - len(known)
        right = 0
        for start in range(0, len(known), BATCH):
            right += _answered(unit, folded, np.array(known[start : start + BATCH]))
        sections[name] = sections.get(name, AnalogyCounts()) + AnalogyCounts(right, len(known))
    return Score(sections, left_out)


def _answered(
    unit: NDArray[np.float32], folded: NDArray[np.int64], asked: NDArray[np.int64]
) -> int:
    """How many of these questions (ids, four a row) are answered right."""
    a, b, c, d = asked.T
    scores = (unit[b] - unit[a] + unit[c]) @ unit.T
    rows = np.arange(len(asked))
    for given in (a, b, c):
        scores[rows, given] = -np.inf
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
                "Give a file of analogies, as questions-words.txt."
            )
        current.append(fields)
    if not any(sections.values()):
        raise DataError(f"{path} has no analogies in it. Give one such as questions-words.txt.")
    return sections


def pairs(vectors: Vectors, file: str | os.PathLike[str]) -> tuple[float, int, int]:
    """(Spearman's correlation with what people said, pairs with both words known, pairs asked)."""
    path = Path(file)
    ids: dict[str, int] = {}
    for number, word in enumerate(vectors.words):
        ids.setdefault(word.lower(), number)
    asked, said, cosines = 0, [], []
    for number, line in enumerate(_lines(path), 1):
        fields = _fields(line)
        if len(fields) < 3:
            if fields and not line.startswith("#"):
                raise DataError(
                    f"{path}, line {number}: expected two words and a number, and found {line[:60]!r}."
                )
            continue
        try:
            judged = float(fields[2])
        except ValueError:
            if asked == 0:  # a header
                continue
            raise DataError(
                f"{path}, line {number}: expected a number after two words, and found {fields[2]!r}."
            ) from None
        asked += 1
        first, second = ids.get(fields[0].lower()), ids.get(fields[1].lower())
        if first is not None and second is not None:
            said.append(judged)
            cosines.append(float(vectors.unit[first] @ vectors.unit[second]))
    if not asked:
        raise DataError(f"{path} has no pairs in it. Give lines of two words and a number.")
    return spearman(np.array(said), np.array(cosines)), len(said), asked


def spearman(x: NDArray[np.float64], y: NDArray[np.float64]) -> float:
    """Correlation of the ranks; equal values share the mean of theirs. NaN where there is none."""
    if len(x) < 2:
        return float("nan")
    a, b = ranks(x), ranks(y)
    a, b = a - a.mean(), b - b.mean()
    lengths = float(np.sqrt((a @ a) * (b @ b)))
    return float(a @ b) / lengths if lengths else float("nan")


def ranks(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """From 1; equal values get the mean of the places they take."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    means: NDArray[np.float64] = last - (counts - 1) / 2
    return means[inverse]


def _fields(line: str) -> list[str]:
    """By tabs, else by commas or semicolons, else by blanks."""
    for between in ("\t", ";", ","):
        if between in line:
            return [part.strip() for part in line.split(between)]
    return line.split()


def _lines(path: Path) -> list[str]:
    try:
        return path.read_bytes().decode("utf-8-sig").splitlines()
    except OSError as error:
        raise DataError(
            f"{path} can't be read: {error.strerror}. Give a file that is there."
        ) from error
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not text in UTF-8. Give a file of words.") from error
