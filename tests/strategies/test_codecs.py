"""Codecs in whole runs: bytes as the kernel counts them, and resuming with another codec."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType

import pytest

from manyhands.testing.conformance import Case

WIDE = {"width": 40_000, "epochs": 2}
"""360,002 parameters, of which the codec compresses the gradients."""


def bytes_of_a_step(strategy: str, workers: int, run: Path) -> float:
    done = Case(strategy, workers=workers, fields=WIDE).train("Regression", run)
    steps = [record["bytes_sent"] for record in done.steps]
    return sum(steps) / len(steps)


@pytest.mark.parametrize("workers", [2, pytest.param(3, marks=pytest.mark.long)])
def test_int8_sends_about_a_quarter_of_the_bytes(workers: int, tmp_path: Path) -> None:
    plain = bytes_of_a_step("allreduce(transport=tcp)", workers, tmp_path / "plain")
    coded = bytes_of_a_step("allreduce + int8", workers, tmp_path / "coded")
    assert 0.25 < coded / plain < 0.27


def test_a_run_keeps_its_codec_and_resumes_with_another_one(
    members: ModuleType, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    coded = "allreduce + int8(chunk=64)"
    members.train("Regression", run, "--max-steps", "4", strategy=coded, workers=2)
    options = json.loads((run / "config.json").read_text())["options"]
    assert options["strategy"]["value"] == coded
    for flags in [("--max-steps", "4"), ("--max-steps", "4", "--strategy", "allreduce"), ()]:
        resumed = members.resume(run, *flags)
        assert resumed.code == 0, f"{resumed.out}\n{resumed.err}"
    started = [event["strategy"] for event in resumed.of("RunStarted")]
    assert started == [coded, coded, "allreduce", "allreduce"]
