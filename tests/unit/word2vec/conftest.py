from __future__ import annotations

import numpy as np
import pytest

from manyhands.word2vec.vectors import Vectors

GRID = {
    "man": (1, 0, 0),
    "woman": (1, 0, 1),
    "king": (1, 2, 0.1),
    "queen": (1, 2, 1.1),
    "apple": (-3, 0.2, 0.3),
    "pear": (-3, 0.1, 0.5),
}


@pytest.fixture
def royals() -> Vectors:
    """Six words of three numbers in which king - man + woman is about queen."""
    return Vectors(list(GRID), np.array(list(GRID.values()), np.float32))
