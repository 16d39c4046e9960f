"""Maps ids to shards. Must never change: checkpoints and placements depend on it."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

STEP = 0x9E37_79B9_7F4A_7C15
FIRST, SECOND = 0xBF58_476D_1CE4_E5B9, 0x94D0_49BB_1331_11EB


def hash_ids(ids: NDArray[np.int64]) -> NDArray[np.uint64]:
    """Hash ids to 64 bits (the last step of splitmix64). No two ids have the same hash."""
    x = ids.astype(np.uint64) + np.uint64(STEP)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(FIRST)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(SECOND)
    return x ^ (x >> np.uint64(31))


def shard_of(ids: NDArray[np.int64], of: int) -> NDArray[np.int64]:
    """Return the shard of each id, 0 to of - 1."""
    return (hash_ids(np.asarray(ids, dtype=np.int64)) % np.uint64(of)).astype(np.int64)
