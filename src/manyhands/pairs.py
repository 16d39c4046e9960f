"""The features that a run can combine with its strategy, and how a strategy refuses them. Pure data.

A `Feature` is what a job, a command line or a cluster adds to a strategy: several hosts, sparse tables, a
codec, a precision. Each strategy declares in its own file what it refuses and why (`Strategy.unsupported`). A
codec or a precision is refused with every strategy that it does not declare to work with. Everything else can
be combined. strategies/pairs.py checks a run against this, and makes the table in the documentation.

A new codec or precision registers its own row; codecs/int8.py does.
"""

from __future__ import annotations

from dataclasses import dataclass

JOB, RUN, CODEC, PRECISION = "job", "run", "codec", "precision"
KINDS = (RUN, JOB, PRECISION, CODEC)


@dataclass(frozen=True)
class Feature:
    name: str
    kind: str
    """One of KINDS."""
    title: str
    """The feature in words, for the table."""
    means: str
    """The flag, field or class that enables it, for the table."""
    without: str = ""
    """What to type to disable it; empty if the user can't choose."""
    works_with: tuple[str, ...] | None = None
    """Names of the strategies that it was tested with; None: all that do not refuse it."""
    unsupported: tuple[Unsupported, ...] = ()
    """Other features that it can't be combined with."""


@dataclass(frozen=True)
class Unsupported:
    """A feature that a strategy, or another feature, can't be combined with."""

    feature: Feature
    why: str
    """Completes the sentence "X does not work with Y: ..."."""
    instead: str = ""
    """The spec to suggest, if it works; otherwise the nearest one that does."""
    along_with: Feature | None = None
    """It is refused only together with this one; None: always."""


_registered: dict[str, Feature] = {}


def register(feature: Feature) -> Feature:
    """Register a feature. Raises ValueError if another one has that name."""
    assert feature.kind in KINDS, feature
    known = _registered.setdefault(feature.name, feature)
    if known != feature:
        raise ValueError(f"there is another feature {feature.name!r}: {known}")
    return feature


def features() -> list[Feature]:
    """Return all features that are registered in this process, by kind."""
    return sorted(_registered.values(), key=lambda feature: KINDS.index(feature.kind))


WORKERS = register(
    Feature("workers", RUN, "several workers", "`--workers 2`", without="--workers 1")
)
HOSTS = register(Feature("hosts", RUN, "several hosts", "`--on env`, `--on ray`"))
GPUS = register(Feature("gpus", RUN, "a GPU for each worker", "NCCL instead of gloo"))
ELASTIC = register(
    Feature(
        "elastic",
        RUN,
        "workers that come and go",
        "a death without a restart, `manyhands scale`, `--chaos`",
    )
)
SHRINKING = register(
    Feature("shrinking", RUN, "fewer workers in a live run", "`manyhands scale` to fewer")
)
SERVERS = register(
    Feature(
        "servers",
        RUN,
        "servers in a cluster description",
        "`TF_CONFIG` with `ps`",
        without="a description without servers",
    )
)
SCALING = register(
    Feature("scaling", RUN, "a batch that follows the workers", "`--scale-batch linear`")
)
TRUST = register(
    Feature(
        "trust",
        RUN,
        "a trusted network",
        "`--trust-network`",
        without="--no-trust-network",
    )
)
OWN_LOOP = register(
    Feature(
        "own loop",
        RUN,
        "your own training loop",
        "`mh.join()`",
        without="a Job, with  manyhands train",
    )
)
ACCUMULATION = register(
    Feature("accumulation", JOB, "micro-batches", "`accumulate=4`", without="--set accumulate=1")
)
TABLES = register(Feature("tables", JOB, "sparse tables", "`mh.SparseEmbedding` in the model"))
ROW_MODEL = register(
    Feature("row model", JOB, "a model that changes rows itself", "`mh.RowModel`, as word2vec")
)
FP32 = register(Feature("fp32", PRECISION, "float32", "always; there is no other precision yet"))
