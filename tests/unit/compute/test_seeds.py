"""Seeds depend on the purpose of a draw and nothing else."""

from __future__ import annotations

import random
import subprocess
import sys

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from manyhands.compute.seeds import derive, seed_compute, seed_loading

part = st.one_of(st.integers(-(2**40), 2**40), st.text(max_size=5))


@given(st.lists(part, max_size=4), st.lists(part, max_size=4))
def test_a_seed_depends_on_all_parts(first: list[int | str], second: list[int | str]) -> None:
    assert 0 <= derive(*first) < 2**63
    assert (derive(*first) == derive(*second)) == (first == second)


def test_a_seed_is_the_same_in_every_process() -> None:
    """Unlike Python's own hash() of a string."""
    code = "from manyhands.compute.seeds import derive; print(derive(3, 'epoch', 7))"
    out = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert int(out.stdout) == derive(3, "epoch", 7)


def draws() -> tuple[float, float, float]:
    return random.random(), float(np.random.rand()), float(torch.rand(()))


def test_loading_draws_depend_on_the_parts_alone() -> None:
    seed_loading(0, "load", 1, 2)
    first = draws()
    draws()
    seed_loading(0, "load", 1, 2)
    assert draws() == first
    seed_loading(0, "load", 1, 3)
    assert all(a != b for a, b in zip(draws(), first, strict=True))


def test_compute_draws_are_torchs() -> None:
    seed_compute("cpu", 0, "step", 1, 0)
    first = torch.rand(3)
    seed_compute("cpu", 0, "step", 1, 0)
    assert torch.equal(torch.rand(3), first)
    seed_compute("cpu", 0, "step", 1, 1)
    assert not torch.equal(torch.rand(3), first)
