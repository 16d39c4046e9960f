"""Word vectors: the kernels of word2vec, a model of them for a Job, and what is done with the vectors.

    manyhands.words.WordModel(vocabulary, dim=100)   what a Job trains
    manyhands.words.Vectors                          load, save, most_similar
    manyhands.words.analogies, manyhands.words.pairs how good they are

Names are loaded on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from manyhands.words.judge import analogies, pairs
    from manyhands.words.model import WordModel
    from manyhands.words.picture import neighbourhood
    from manyhands.words.vectors import Vectors

__all__ = ["Vectors", "WordModel", "analogies", "neighbourhood", "pairs"]

_HOMES = {
    "Vectors": "manyhands.words.vectors",
    "WordModel": "manyhands.words.model",
    "analogies": "manyhands.words.judge",
    "neighbourhood": "manyhands.words.picture",
    "pairs": "manyhands.words.judge",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'manyhands.words' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
