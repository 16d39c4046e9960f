"""Run folders that an earlier version wrote can be read, resumed and loaded.

tests/data/old_runs has one for each strategy, from before the packages were renamed: a training of
four epochs, stopped with Ctrl-C in the second. losses.json has what that version got without the stop.
"""

from __future__ import annotations

import json
import shutil
from collections import Counter
from pathlib import Path
from types import ModuleType

import pytest
import torch

import manyhands as mh
from manyhands.testing import harness

OLD = Path(__file__).parents[1] / "data" / "old_runs"
EXACT = json.loads((OLD / "losses.json").read_text())
STRATEGIES = ("single", "allreduce", "ps-sync", "ps-async", "ps-ssp", "ps-backup")


def old_run(strategy: str, folder: Path) -> Path:
    """Copy an old run, with the paths of its config.json where the job file is now."""
    run = folder / "run"
    shutil.copytree(OLD / strategy, run)
    (run / "logs").mkdir()  # git keeps no empty folders
    shutil.copy(OLD / "job.py", folder)
    config = json.loads((run / "config.json").read_text())
    config["job"].update(anywhere=str(folder / "job.py"), file=str(folder / "job.py"))
    (run / "config.json").write_text(json.dumps(config))
    return run


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_an_old_run_resumes(strategy: str, members: ModuleType, tmp_path: Path) -> None:
    run = old_run(strategy, tmp_path)
    done = members.resume(run)
    assert done.code == 0, f"{done.out}\n{done.err}"
    assert done.of("RunFinished")[-1]["outcome"] == "finished"
    for epoch, positions in done.uses_by_epoch().items():
        uses = Counter(positions)
        assert set(uses) == set(range(64)), f"epoch {epoch}"
        assert set(uses.values()) == {1}, f"epoch {epoch}"
    if strategy in EXACT:
        assert done.losses == pytest.approx(EXACT[strategy], rel=1e-5)


def test_the_time_to_a_target_is_not_known_for_an_old_run(
    members: ModuleType, tmp_path: Path
) -> None:
    run = old_run("allreduce", tmp_path)
    refused = members.resume(run, "--target", "loss=0.5")
    assert refused.code == 2
    assert "up to step 13 has reached 0.463993 already" in refused.err
    done = members.resume(run, "--target", "loss=0.463")
    assert done.code == 0, f"{done.out}\n{done.err}"
    summary = done.of("RunFinished")[-1]["summary"]
    assert (summary["outcome"], summary["time_to_target_s"]) == ("target", None)
    (reached,) = done.of("TargetReached")
    assert summary["steps_to_target"] == reached["step"] > 13
    assert reached["samples"] == sum(step["samples"] for step in done.steps)
    assert f"loss=0.463 took {reached['step']} steps, {reached['samples']} samples" in done.out


def test_an_old_run_is_shown_and_loaded(tmp_path: Path) -> None:
    run = old_run("allreduce", tmp_path)
    with harness.command("show", str(run), run=run) as running:
        shown = running.wait()
    assert shown.code == 0, shown.err
    assert "interrupted" in shown.out
    model = mh.load(run, step="last")
    with torch.no_grad():
        error = torch.nn.functional.mse_loss(
            model(torch.arange(64)), torch.sin(torch.arange(64) / 5.0)
        )
    assert float(error) < 0.47  # 0.464 after the first epoch, by its own evaluation
