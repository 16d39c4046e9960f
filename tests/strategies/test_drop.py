"""A deadline for synchronous steps: the mean is over what was computed, and nothing is lost."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from manyhands.compute.seeds import derive
from manyhands.compute.train_state import TrainState
from manyhands.job import load_job
from manyhands.testing import harness


@pytest.mark.parametrize("kill", [False, pytest.param(True, marks=pytest.mark.long)])
def test_what_is_late_is_left_out_and_comes_again(kill: bool, tmp_path: Path) -> None:
    """One of three computes four times slower; each update is that of the mean over what was in it."""
    settings = {"batch_size": 48, "samples": 960, "pause_s": 0.0, "sample_s": 0.001, "slow_by": 4.0}
    fields = {**settings, "diary": tmp_path / "diary", "epochs": 2}
    run, flags = tmp_path / "run", ("--equal-shares", "--checkpoint-every", "7")
    arguments = harness.train_arguments(
        "Straggling", run, *flags, strategy="allreduce(drop=1.5)", workers=3, **fields
    )
    with harness.command(*arguments, run=run) as running:
        if kill:
            running.wait_for_step(12)
            running.kill("worker-2")
        done = running.wait()
    assert done.code == 0, f"{done.out}\n{done.err}"
    uses = done.uses_by_epoch()
    assert [sorted(uses[epoch]) for epoch in (0, 1)] == [list(range(960))] * 2
    left_out = sum(step["left_out"] for step in done.steps)
    assert left_out > 0, "the slow one can't have done all"
    assert all(step["samples"] + step["left_out"] <= 48 for step in done.steps)

    job = load_job(f"{harness.JOBS}:Straggling", {k: str(v) for k, v in fields.items()})
    train_state = TrainState.of(job, device="cpu", num_steps=40)
    train_state.scheduler = (
        None  # by samples, so that it ends with the training: a step says its own rate
    )
    assert done.steps[-1]["lr"] == pytest.approx(0.0, abs=1e-3)
    inputs, targets = job.data().tensors
    for step in done.steps:
        train_state.optimizer.param_groups[0]["lr"] = step["lr"]
        generator = torch.Generator().manual_seed(derive(job.seed, "epoch", step["epoch"]))
        order = torch.randperm(960, generator=generator)
        ranges = sorted(tuple(piece) for held in step["shares"].values() for piece in held)
        used = torch.cat([order[start:stop] for start, stop in ranges])
        loss = torch.nn.functional.mse_loss(train_state.model(inputs[used]), targets[used])
        loss.backward()
        train_state.update()
        assert step["loss"] == pytest.approx(loss.item(), rel=1e-4)
    for name, value in train_state.model.state_dict().items():
        torch.testing.assert_close(done.state()["model"][name], value, rtol=1e-4, atol=1e-6)
