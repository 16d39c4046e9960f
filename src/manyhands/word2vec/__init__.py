"""Word vectors: the kernels of word2vec, a model for a Job, and tools for the vectors.

    manyhands.word2vec.WordModel(vocabulary, dim=100)        the model of a Job
    manyhands.word2vec.Vectors                               load, save, most_similar
    manyhands.word2vec.analogies, manyhands.word2vec.pairs   evaluation

Names are imported on first use.
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

_MODULES = {
    "Vectors": "manyhands.word2vec.vectors",
    "WordModel": "manyhands.word2vec.model",
    "analogies": "manyhands.word2vec.evaluation",
    "neighbourhood": "manyhands.word2vec.picture",
    "pairs": "manyhands.word2vec.evaluation",
}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(importlib.import_module(_MODULES[name]), name)
    raise AttributeError(f"module 'manyhands.word2vec' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
