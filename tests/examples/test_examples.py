"""The examples reach what their docstrings promise, with real processes and, if available, real data."""

from __future__ import annotations

from pathlib import Path

import pytest

from manyhands.testing import harness

ROOT = Path(__file__).parents[2]


def final_accuracy(reference: str, run: Path, environ: dict[str, str] | None = None) -> float:
    flags = ["--strategy", "allreduce", "--workers", "2", "--device", "cpu", "--run-dir", str(run)]
    with harness.command("train", reference, *flags, run=run, environ=environ) as running:
        done = running.wait(timeout_s=280)
    assert done.code == 0, done.err
    return float(done.of("Evaluated")[-1]["metrics"]["accuracy"])


def test_digits(tmp_path: Path) -> None:
    assert final_accuracy(str(ROOT / "examples/digits.py"), tmp_path / "run") > 0.95


@pytest.mark.long
def test_mnist_perceptron(mnist_folder: Path, tmp_path: Path) -> None:
    environ = {"MANYHANDS_DATA": str(mnist_folder)}
    assert final_accuracy(str(ROOT / "examples/mnist.py"), tmp_path / "run", environ) > 0.98


@pytest.mark.long
def test_mnist_convolutional(mnist_folder: Path, tmp_path: Path) -> None:
    environ = {"MANYHANDS_DATA": str(mnist_folder)}
    reference = f"{ROOT / 'examples/mnist.py'}:MnistConv"
    assert final_accuracy(reference, tmp_path / "run", environ) > 0.99
