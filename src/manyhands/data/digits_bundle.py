"""The digits that come with scikit-learn: 1,797 handwritten digits of 8 by 8 pixels. No download.

The split is fixed and uses no random numbers, so it is the same with every version of every library: samples
are sorted by digit (stably) and every fifth one is for testing. That gives 1,437 training and 360 test
samples, with the same proportion of each digit.

Cost: half a megabyte. The file is read from scikit-learn's folder without importing scikit-learn, which takes
a second.
"""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from manyhands.errors import DataError, UsageError, closest

if TYPE_CHECKING:
    from manyhands.data.arrays import Arrays

PIXEL_MAX = 16
"""Maximum pixel value: pixels count dark dots in squares of 4 by 4."""
TEST_EVERY = 5


def digits(split: Literal["train", "test"]) -> Arrays:
    """Return images, float32 in [0, 1] of shape (1, 8, 8), and labels, int64 from 0 to 9."""
    if split not in ("train", "test"):
        near = closest(str(split), ("train", "test"))
        raise UsageError(f'digits({split!r}): the split is "train" or "test"{near}')
    import numpy as np
    import torch

    from manyhands.data.arrays import Arrays

    pixels, digit = _pixels_and_digit()
    by_digit = np.argsort(digit, kind="stable")
    for_testing = np.zeros(len(by_digit), dtype=bool)
    for_testing[by_digit[::TEST_EVERY]] = True
    chosen = for_testing if split == "test" else ~for_testing
    images = (pixels[chosen].reshape(-1, 1, 8, 8) / PIXEL_MAX).astype(np.float32)
    labels = digit[chosen].astype(np.int64)
    return Arrays(torch.from_numpy(images), torch.from_numpy(labels))


@cache
def _pixels_and_digit() -> tuple[Any, Any]:
    import numpy as np

    try:
        spec = find_spec("sklearn")
        folders = (spec and spec.submodule_search_locations) or ()
        for file in (Path(folder) / "datasets" / "data" / "digits.csv.gz" for folder in folders):
            if file.exists():
                table = np.loadtxt(file, delimiter=",")
                return table[:, :-1], table[:, -1]
        from sklearn.datasets import load_digits
    except (ImportError, ValueError) as error:  # ValueError: sys.modules says that there is none
        raise DataError(
            f"The digits data set is part of scikit-learn, which can't be imported here ({error}). "
            "Install it: pip install scikit-learn"
        ) from error
    return load_digits(return_X_y=True)
