"""Word vectors: the kernels of word2vec, a model of them for a Job, and what is done with the vectors.

    manyhands.word2vec.WordModel(vocabulary, dim=100)   what a Job trains
    manyhands.word2vec.Vectors                          load, save, most_similar
    manyhands.word2vec.analogies, manyhands.word2vec.pairs how good they are

Names are loaded on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from manyhands.word2vec.evaluation import analogies, pairs
    from manyhands.word2vec.model import WordModel
    from manyhands.word2vec.picture import neighbourhood
    from manyhands.word2vec.vectors import Vectors

__all__ = ["Vectors", "WordModel", "analogies", "neighbourhood", "pairs"]

_HOMES = {
    "Vectors": "manyhands.word2vec.vectors",
    "WordModel": "manyhands.word2vec.model",
    "analogies": "manyhands.word2vec.evaluation",
    "neighbourhood": "manyhands.word2vec.picture",
    "pairs": "manyhands.word2vec.evaluation",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'manyhands.word2vec' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
