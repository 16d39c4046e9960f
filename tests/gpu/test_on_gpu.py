"""The checks of on_gpu.py, which need a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from on_gpu import CHECKS

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason=f"torch {torch.__version__} sees no GPU here"
)


@pytest.mark.parametrize("name", CHECKS)
def test_on_a_gpu(name: str, tmp_path: Path) -> None:
    CHECKS[name](tmp_path)
