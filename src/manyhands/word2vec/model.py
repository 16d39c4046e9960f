"""word2vec as a model that changes the rows of its tables itself.

Two tables by word id: `inputs` are the vectors that are kept, `outputs` those that they are compared with. A
batch is a piece of text. If all rows are on this host, a batch is one call of a kernel on the tables. If rows
must be fetched first, negatives are drawn from a few thousand words, chosen anew for each batch, so that a
batch needs few rows.
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
"""Words from which the negatives of a batch are drawn, if rows must be fetched."""
MAX_COPIES = 1_000
"""Words whose rows a worker copies if others write them too: the copies stay in the cache of its core, and
are four tenths of what a text uses."""
MIN_WRITERS = 3
"""Number of workers from which copies pay on every machine; with two it depends."""
WORDS_PER_COPY = 16
"""Minimum words of a batch per copied word, to keep the cost of copying small."""


class HasCounts(Protocol):
    """A vocabulary, such as that of manyhands.data.corpus()."""

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
        """Memory for copies of rows."""

    def ids(self, batch: Any, *, seed: int) -> Mapping[str, NDArray[np.int64]]:
        needed = np.zeros(len(self._keep) + 1, bool)
        needed[batch.numpy()] = True
        needed[-1] = False  # was set by -1, the end of a sentence
        words = np.flatnonzero(needed)
        needed[self._pool(seed)] = True
        return {"inputs": words, "outputs": np.flatnonzero(needed)}

    def _pool(self, seed: int) -> NDArray[np.int64]:
        """Draw the words from which the negatives of a batch are drawn, with repetition."""
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
            # Only the fetched words exist, renumbered from 0.
            known = outputs.ids
            number = np.full(len(self._keep) + 1, -1, np.int32)
            number[known] = np.arange(len(known), dtype=np.int32)
            tokens = number[tokens]  # -1, the end of a sentence, stays
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
        """Return memory for copies of the rows of the most frequent words; none if few workers write them."""
        from manyhands.word2vec import copies

        count = 0
        if writers >= MIN_WRITERS:
            count = min(len(self._keep), MAX_COPIES, words // WORDS_PER_COPY)
        if self._own is None or self._own.shape[2] != count:
            self._own = copies.allocate(count, self.tables["inputs"].dim)
        return self._own

    def _rows_of(self, name: str, rows: Rows) -> NDArray[np.int64]:
        """Return the row index of each word. Rows never move, so they are looked up once."""
        known = self._found.get(name)
        if known is None or known[0] != rows:
            all_ids = np.arange(len(self.vocabulary.words), dtype=np.int64)
            known = self._found[name] = (rows, rows.find(all_ids))
        return known[1]
