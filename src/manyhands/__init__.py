"""Distributed training in PyTorch: every strategy is one switch on the same job file.

Names are loaded on first use, so that the coordinator and the command line start without torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from manyhands import data
    from manyhands import word2vec as words
    from manyhands.api import join
    from manyhands.embeddings.from_run import load
    from manyhands.embeddings.modules import RowModel, SparseEmbedding, SparseEmbeddingBag
    from manyhands.embeddings.spec import Table
    from manyhands.errors import JobError, ManyhandsError
    from manyhands.job import Job
    from manyhands.measure import Measure

__version__ = "0.1.0"
__all__ = [
    "Job",
    "JobError",
    "ManyhandsError",
    "Measure",
    "RowModel",
    "SparseEmbedding",
    "SparseEmbeddingBag",
    "Table",
    "__version__",
    "data",
    "join",
    "load",
    "words",
]

_HOMES = {
    "Job": "manyhands.job",
    "JobError": "manyhands.errors",
    "ManyhandsError": "manyhands.errors",
    "Measure": "manyhands.measure",
    "RowModel": "manyhands.embeddings.modules",
    "SparseEmbedding": "manyhands.embeddings.modules",
    "SparseEmbeddingBag": "manyhands.embeddings.modules",
    "Table": "manyhands.embeddings.spec",
    "join": "manyhands.api",
    "load": "manyhands.embeddings.from_run",
}

_PACKAGES = {"data": "manyhands.data", "words": "manyhands.word2vec"}


def __getattr__(name: str) -> Any:
    if name in _PACKAGES:
        return importlib.import_module(_PACKAGES[name])
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'manyhands' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
