"""Distributed training in PyTorch: every strategy is one switch on the same job file.

Names are loaded on first use, so that the coordinator and the command line start without torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from manyhands import data
    from manyhands import word2vec as words
    from manyhands.api.own_loop import join
    from manyhands.api.result import Result
    from manyhands.api.training import resume, train
    from manyhands.embeddings.from_run import load
    from manyhands.embeddings.modules import RowModel, SparseEmbedding, SparseEmbeddingBag
    from manyhands.embeddings.spec import Table
    from manyhands.errors import (
        Diverged,
        Interrupted,
        JobError,
        ManyhandsError,
        MemberError,
        UsageError,
    )
    from manyhands.job import Job
    from manyhands.measure import Measure

__version__ = "0.1.0"
__all__ = [
    "Diverged",
    "Interrupted",
    "Job",
    "JobError",
    "ManyhandsError",
    "Measure",
    "MemberError",
    "Result",
    "RowModel",
    "SparseEmbedding",
    "SparseEmbeddingBag",
    "Table",
    "UsageError",
    "__version__",
    "data",
    "join",
    "load",
    "resume",
    "train",
    "words",
]

_HOMES = {
    "Diverged": "manyhands.errors",
    "Interrupted": "manyhands.errors",
    "Job": "manyhands.job",
    "JobError": "manyhands.errors",
    "ManyhandsError": "manyhands.errors",
    "Measure": "manyhands.measure",
    "MemberError": "manyhands.errors",
    "Result": "manyhands.api.result",
    "RowModel": "manyhands.embeddings.modules",
    "SparseEmbedding": "manyhands.embeddings.modules",
    "SparseEmbeddingBag": "manyhands.embeddings.modules",
    "Table": "manyhands.embeddings.spec",
    "UsageError": "manyhands.errors",
    "join": "manyhands.api.own_loop",
    "load": "manyhands.embeddings.from_run",
    "resume": "manyhands.api.training",
    "train": "manyhands.api.training",
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
