from __future__ import annotations

import hashlib
import subprocess
import sys

import pytest
import torch

from manyhands.data import digits
from manyhands.errors import UsageError


def test_sizes_types_and_range():
    for split, count in (("train", 1437), ("test", 360)):
        images, labels = digits(split).tensors
        assert images.shape == (count, 1, 8, 8)
        assert images.dtype == torch.float32
        assert (images.min(), images.max()) == (0.0, 1.0)
        assert labels.dtype == torch.int64
        assert set(labels.tolist()) == set(range(10))


def test_every_digit_is_a_fifth_in_the_test_split():
    train, test = (digits(split).tensors[1].bincount() for split in ("train", "test"))
    assert (test / (train + test)).sub(0.2).abs().max() < 0.01


def test_the_splits_share_no_sample_and_together_are_the_bundle():
    from sklearn.datasets import load_digits

    ours = [
        image.mul(16).flatten().int() for split in ("train", "test") for image, _ in digits(split)
    ]
    theirs = torch.from_numpy(load_digits().data).int()
    assert sorted(image.tolist() for image in ours) == sorted(theirs.tolist())


def test_the_split_never_changes():
    pixels = digits("test").tensors[0].mul(16).to(torch.uint8)
    digest = hashlib.sha256(pixels.numpy().tobytes()).hexdigest()
    assert digest == "3c05733c55d710109b9a1878ea98f552bb9d33485cd2bddb57cbade1c3c55d6d"


def test_a_wrong_split_says_what_is_allowed():
    with pytest.raises(UsageError, match=r"digits\('tests'\).*\"train\" or \"test\".*'test'\?"):
        digits("tests")


def test_without_scikit_learn_the_error_says_what_to_install():
    # None in sys.modules is how Python itself marks a module that must not be found.
    code = (
        "import sys; sys.modules['sklearn'] = None\n"
        "import manyhands.data, manyhands.errors\n"
        "try: manyhands.data.digits('train')\n"
        "except manyhands.errors.DataError as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30)
    assert done.returncode == 0, done.stderr
    assert "pip install scikit-learn" in done.stdout
