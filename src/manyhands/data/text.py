"""Text for word vectors: counting words, the vocabulary, and the corpus as a file of word ids.

    vocabulary = Vocabulary.of(count_words("text8.gz"), min_count=5)
    encode("text8.gz", vocabulary, "ids.int32")
    corpus = Corpus("ids.int32")     # sample i: about 1,000 ids, -1 where a sentence ends

Words are separated by spaces; a newline ends a sentence, if there is more than one line. Files may be plain
or end in .gz, .bz2 or .xz. Plain files can be counted in ranges; compressed ones can't be read from the
middle. corpus_files.py does all of it, with several processes and a cache.

Cost: two passes over the text (count, encode) at about 30 MB a second, and 4 bytes per word on the disk.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from manyhands.data.text_files import decoded, is_compressed, pieces, unpacking, written_beside
from manyhands.errors import DataError, UsageError

SENTENCE_END = -1


def count_words(
    path: str | os.PathLike[str], start: int = 0, stop: int | None = None
) -> Counter[str]:
    """Count the words that begin in bytes [start, stop) of the file (None: to its end)."""
    from manyhands.data.text_scan import WordTable

    path = Path(path)
    if (start, stop) != (0, None) and is_compressed(path):
        raise UsageError(
            f"Bytes {start} to {stop} of {path}: a compressed file can't be read from the middle. "
            f"Leave start and stop out, or unpack it first: {unpacking(path)}"
        )
    table = WordTable()
    for text, at, limit, ended in pieces(path, start, stop):
        text.done = table.count(text.bytes, at, limit, ended=ended)
    total: Counter[str] = Counter()
    for word, count in zip(table.words(), table.entries.counts.tolist(), strict=False):
        total[decoded(word, path)] = count
    return total


@dataclass(frozen=True, eq=False)
class Vocabulary:
    """Words by id, the most frequent first; equally frequent ones in alphabetical order."""

    words: tuple[str, ...]
    counts: NDArray[np.int64]

    @classmethod
    def of(
        cls, counts: Mapping[str, int], *, min_count: int = 5, max_words: int | None = None
    ) -> Vocabulary:
        """Select the words that occur `min_count` times or more; of these the `max_words` most frequent."""
        if min_count < 1 or (max_words is not None and max_words < 2):
            raise UsageError(
                f"A vocabulary with min_count={min_count} and max_words={max_words} is not possible: "
                "min_count is at least 1, and max_words at least 2 or None for all."
            )
        if len(counts) < 2:
            raise DataError(
                f"The text has {len(counts)} distinct word(s) ({', '.join(map(repr, counts))}), and "
                "word vectors need at least 2. Is it the right file, with spaces between its words?"
            )
        common = sorted((-count, word) for word, count in counts.items() if count >= min_count)
        if len(common) < 2:
            usable = sorted(counts.values())[-2]
            raise UsageError(
                f"min_count={min_count} leaves {len(common)} of {len(counts):,} distinct words: the most "
                f"frequent occurs {max(counts.values()):,} times, the second {usable:,} times. "
                f"Use a smaller one: --set min_count={max(1, min(usable, 5))}"
            )
        common = common[:max_words]
        return cls(
            words=tuple(word for _, word in common),
            counts=np.array([-count for count, _ in common], dtype=np.int64),
        )

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Vocabulary:
        words, counts = [], []
        for number, line in enumerate(Path(path).read_bytes().decode().split("\n"), 1):
            if not line:
                continue
            word, _, count = line.rpartition(" ")
            if not word or not count.isdigit():
                raise DataError(
                    f"{path}, line {number}: expected a word, a blank and a count, and found {line!r}."
                )
            words.append(word)
            counts.append(int(count))
        return cls(tuple(words), np.array(counts, dtype=np.int64))

    def save(self, path: str | os.PathLike[str]) -> None:
        with written_beside(Path(path)) as file:
            for word, count in zip(self.words, self.counts.tolist(), strict=True):
                file.write(f"{word} {count}\n".encode())

    def __len__(self) -> int:
        return len(self.words)

    @cached_property
    def ids(self) -> dict[str, int]:
        return {word: number for number, word in enumerate(self.words)}

    @property
    def total(self) -> int:
        """Number of words of the corpus that are in the vocabulary."""
        return int(self.counts.sum())

    def keep_probability(self, sample: float) -> NDArray[np.float32]:
        """Return the probability that each word stays when frequent ones are subsampled; sample=0: 1.

        (sqrt(f / sample) + 1) * sample / f for a word that makes up f of the text, at most 1.
        """
        if sample < 0:
            raise UsageError(
                f"sample={sample} is not valid: give 0 (keep all) or a small fraction, as 1e-4."
            )
        if sample == 0:
            return np.ones(len(self), dtype=np.float32)
        ratio = self.counts / (sample * self.total)
        return np.minimum((np.sqrt(ratio) + 1.0) / ratio, 1.0).astype(np.float32)

    def noise(self, power: float = 0.75) -> NDArray[np.uint64]:
        """Return the alias table for negative samples: words in proportion to count ** power."""
        from manyhands.data.text_scan import alias_table

        table: NDArray[np.uint64] = alias_table(self.counts.astype(np.float64) ** power)
        return table


def encode(
    path: str | os.PathLike[str], vocabulary: Vocabulary, target: str | os.PathLike[str]
) -> int:
    """Write the text as int32 ids, without unknown words, -1 between sentences. Returns the number of
    words."""
    from manyhands.data.text_scan import WordTable, encode_block

    table = WordTable.of(vocabulary.words)
    line = np.zeros(2, dtype=np.int64)
    num_words = 0
    with written_beside(Path(target)) as file:
        for text, at, _, ended in pieces(Path(path), 0, None):
            # A word takes at least one byte and a space; a sentence end has a newline.
            ids = np.empty(len(text.bytes) + 2, dtype=np.int32)
            text.done, count = encode_block(text.bytes, at, ended, table.entries, ids, line)
            num_words += int(np.count_nonzero(ids[:count] >= 0))
            file.write(ids[:count].tobytes())
    return num_words


class Corpus(Dataset[Tensor]):
    """The file that `encode` wrote, in samples of about `chunk` ids each (int32, -1: sentence end).

    Samples are cut after a sentence end, if one follows within a quarter of a chunk. A pickled corpus is only
    its path; unpickling maps the file again.
    """

    def __init__(self, path: str | os.PathLike[str], *, chunk: int = 1_000) -> None:
        if chunk < 4:
            raise UsageError(
                f"Corpus: chunk={chunk} is too small: give 4 words or more, as chunk=1000."
            )
        self.path, self.chunk = Path(path), chunk
        try:
            num_bytes = self.path.stat().st_size
        except OSError as error:
            raise DataError(
                f"{path} can't be read: {error.strerror}. Make it with encode()."
            ) from error
        if num_bytes == 0 or num_bytes % 4:
            raise DataError(
                f"{path} has {num_bytes:,} bytes, and a file of int32 ids has a multiple of 4, not 0. "
                f"Delete it, and it is made again: rm {path}"
            )
        self._size = num_bytes // 4
        self._length = max(1, round(self._size / chunk))

    @cached_property
    def ids(self) -> NDArray[np.int32]:
        # A plain array of the same memory: slicing a memmap costs microseconds.
        return np.asarray(np.memmap(self.path, dtype=np.int32, mode="r"))

    @cached_property
    def num_words(self) -> int:
        return int(np.count_nonzero(self.ids >= 0))

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Tensor:
        if not 0 <= index < self._length:
            raise IndexError(f"sample {index} of a corpus of {self._length}")
        return torch.from_numpy(np.array(self.ids[self._cut(index) : self._cut(index + 1)]))

    def __getitems__(self, indices: Sequence[int]) -> list[Tensor]:
        return [self[index] for index in indices]

    def _cut(self, index: int) -> int:
        if index == 0:
            return 0
        if index == self._length:
            return self._size
        place = index * self.chunk
        ends = np.flatnonzero(self.ids[place : place + self.chunk // 4] == SENTENCE_END)
        return place + int(ends[0]) + 1 if len(ends) else place

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in vars(self).items() if key != "ids"}

    def __repr__(self) -> str:
        return f"Corpus({str(self.path)!r}: {len(self):,} samples of about {self.chunk:,} words)"
