"""word2vec as a model that changes the rows of its tables itself.

Two tables by the number of a word: `inputs` are the vectors that are kept, `outputs` what they are
compared with. A batch is a stretch of text. Where all rows are in reach it is one call of a kernel on
the tables themselves; where rows have to be fetched first, negatives are drawn from a few thousand
words that are drawn anew for each batch, so that a batch touches few rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from manyhands.embeddings.modules import RowModel, Rows
from manyhands.embeddings.spec import Table

if TYPE_CHECKING:
    from numpy.typing import NDArray

POOL = 4096
"""Words that the negatives of a batch are drawn from, where rows have to be fetched."""
COPIED = 1_000
"""Words that a worker has copies of the rows of, where others write them too: they stay in the cache of
its core, and are four tenths of what a text touches."""
CROWD = 3
"""Workers from which on copies pay everywhere; for two it depends on the machine."""
WORTH = 16
"""Words of a batch for each word that is copied: else copying is too much of the work."""


class HasCounts(Protocol):
    """As of manyhands.data.corpus()."""

    @property
    def words(self) -> Sequence[str]: ...
    def keep_probability(self, sample: float) -> NDArray[np.float32]: ...
    def noise(self) -> NDArray[np.uint64]: ...


class WordModel(RowModel):
    def __init__(
        self,
        vocabulary: HasCounts,
        *,
        dim: int = 100,
        window: int = 5,
        negative: int = 5,
        sample: float = 1e-4,
        cbow: bool = False,
    ) -> None:
        super().__init__()
        self.vocabulary = vocabulary
        count = len(vocabulary.words)
        self.tables = {
            "inputs": Table(dim=dim, rows=count, optimizer="sgd", init="uniform"),
            "outputs": Table(dim=dim, rows=count, optimizer="sgd", init="zeros"),
        }
        self._window, self._negative, self._cbow = window, negative, cbow
        self._keep = vocabulary.keep_probability(sample)
        self._noise = vocabulary.noise()
        self._found: dict[str, tuple[Rows, NDArray[np.int64]]] = {}
        self._own: NDArray[np.float32] | None = None
        """Room for copies of rows."""

    def ids(self, batch: Any, *, seed: int) -> Mapping[str, NDArray[np.int64]]:
        there = np.zeros(len(self._keep) + 1, bool)
        there[batch.numpy()] = True
        there[-1] = False  # where the end of a sentence, -1, was noted
        words = np.flatnonzero(there)
        there[self._pool(seed)] = True
        return {"inputs": words, "outputs": np.flatnonzero(there)}

    def _pool(self, seed: int) -> NDArray[np.int64]:
        """The words that the negatives of a batch are drawn from, each as often as it was drawn."""
        draw = np.random.default_rng(seed)
        places = draw.integers(len(self._noise), size=POOL)
        entries = self._noise[places]
        alias = draw.integers(1 << 32, size=POOL, dtype=np.uint64) >= entries >> np.uint64(32)
        return np.where(alias, entries & np.uint64(0xFFFFFFFF), places).astype(np.int64)

    def touch(
        self, batch: Any, rows: Mapping[str, Rows], *, lr: float, seed: int
    ) -> tuple[float, float]:
        from manyhands.word2vec import kernels

        train = kernels.cbow if self._cbow else kernels.skip_gram
        tokens = np.ascontiguousarray(batch.numpy(), np.int32)
        inputs, outputs = rows["inputs"], rows["outputs"]
        if outputs.ids is None:
            in_rows, out_rows = self._rows_of("inputs", inputs), self._rows_of("outputs", outputs)
            keep, noise = self._keep, self._noise
        else:
            # The words in reach are all the words there are, and numbered anew.
            known = outputs.ids
            number = np.full(len(self._keep) + 1, -1, np.int32)
            number[known] = np.arange(len(known), dtype=np.int32)
            tokens = number[tokens]  # the end of a sentence, -1, stays
            in_rows = np.minimum(inputs.find(known), len(inputs.matrix) - 1)
            out_rows = np.arange(len(known), dtype=np.int64)
            keep = self._keep[known]
            noise = number[self._pool(seed)].astype(np.uint64)
        loss, pairs, _ = train(
            *(tokens, inputs.matrix, outputs.matrix, in_rows, out_rows, keep, noise),
            *(self._window, self._negative, lr, seed, self._copies(len(tokens), inputs.writers)),
        )
        return float(loss), float(pairs)

    def _copies(self, words: int, writers: int) -> NDArray[np.float32]:
        """Room for copies of the commonest words' rows; for none, where few write them."""
        from manyhands.word2vec import copies

        count = min(len(self._keep), COPIED, words // WORTH) if writers >= CROWD else 0
        if self._own is None or self._own.shape[2] != count:
            self._own = copies.room(count, self.tables["inputs"].dim)
        return self._own

    def _rows_of(self, name: str, rows: Rows) -> NDArray[np.int64]:
        """Where each word's row is. Rows never move: looked up once."""
        known = self._found.get(name)
        if known is None or known[0] != rows:
            every = np.arange(len(self.vocabulary.words), dtype=np.int64)
            known = self._found[name] = (rows, rows.find(every))
        return known[1]
