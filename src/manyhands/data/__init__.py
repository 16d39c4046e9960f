"""Data sets for the examples, and `Arrays`, which makes one of any tensors.

    manyhands.data.Arrays(images, labels)      your own tensors, a whole batch gathered at once
    manyhands.data.digits("train")             1,797 digits of 8 by 8 pixels, part of scikit-learn
    manyhands.data.mnist("train")              70,000 digits of 28 by 28 pixels, downloaded once
    manyhands.data.corpus("text.txt")          any text, as chunks of word ids, with its vocabulary

Names are loaded on first use, so importing this package imports neither torch nor numpy. No module
here is called like a function: importing a submodule binds its name in the package, and a module
`mnist` would hide the function `mnist` from then on.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from manyhands.data.arrays import Arrays
    from manyhands.data.corpus_files import corpus
    from manyhands.data.digits_bundle import digits
    from manyhands.data.mnist_files import mnist

__all__ = ["Arrays", "corpus", "digits", "mnist"]

_HOMES = {
    "Arrays": "manyhands.data.arrays",
    "corpus": "manyhands.data.corpus_files",
    "digits": "manyhands.data.digits_bundle",
    "mnist": "manyhands.data.mnist_files",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'manyhands.data' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
