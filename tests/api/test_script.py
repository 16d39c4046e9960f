"""mh.train() in a script that has no `if __name__ == "__main__"`, as people run it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from manyhands.testing import harness

SCRIPT = """
import json
import os
import signal
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import manyhands as mh
from beside import scaled

RUN = Path("run")
SCALE = {"factor": 0.5}

with open("imports", "a") as file:
    file.write(f"{__name__}\\n")


def half(value):
    return scaled(value, SCALE["factor"])


@dataclass
class Mine(mh.Job):
    layers: tuple[int, ...] = (4,)
    epochs: int = 1000
    pause_s: float = 0.0

    def model(self):
        from torch import nn

        assert self.layers == (24, 8)
        first, second = self.layers
        return nn.Sequential(nn.Linear(2, first), nn.Linear(first, second), nn.Linear(second, 1))

    def optimizer(self, params):
        import torch

        return torch.optim.SGD(params, lr=0.1)

    def data(self):
        import torch

        x = torch.arange(256.0).view(128, 2) / 256
        return mh.data.Arrays(x, x.sum(1, keepdim=True))

    eval_data = data

    def loss(self, output, batch):
        time.sleep(self.pause_s)
        return half((output - batch[1]).square().mean())


def press_ctrl_c():
    events = RUN / "events.jsonl"
    while not events.exists() or b"StepCommitted" not in events.read_bytes():
        time.sleep(0.02)
    os.kill(os.getpid(), signal.SIGINT)


threading.Thread(target=press_ctrl_c, daemon=True).start()
how = {"strategy": sys.argv[1], "device": "cpu"}
try:
    mh.train(Mine(layers=(24, 8), pause_s=0.02), run_dir=RUN, **how)
except mh.Interrupted as error:
    stopped = mh.Result(error.run)
handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
steps = stopped.summary["steps"]
print(f"{stopped.outcome} after {steps} steps")
result = mh.resume(stopped.path, settings={"steps": steps + 3, "pause_s": 0}, progress=False)
print(json.dumps({
    "restored": handlers == [signal.default_int_handler, signal.SIG_DFL],
    "torch": "torch" in sys.modules,
    "stopped": steps,
    "outcome": result.outcome,
    "curve": result.steps["step"].tolist(),
    "metrics": list(result.metrics),
}))
"""


def run_script(folder: Path, strategy: str) -> tuple[list[str], dict[str, Any]]:
    """Run the script; return the lines that it printed, and what it found."""
    (folder / "beside.py").write_text("def scaled(value, factor):\n    return value * factor\n")
    script = folder / "script.py"
    script.write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, str(script), strategy],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr + harness.logs_of(folder / "run")
    *lines, last = done.stdout.splitlines()
    return lines, json.loads(last)


def test_a_script_is_stopped_by_ctrl_c_and_goes_on(tmp_path: Path) -> None:
    lines, found = run_script(tmp_path, "single")
    steps = found["stopped"]
    assert found == {
        "restored": True,
        "torch": False,  # the workers load it, this program need not
        "stopped": steps,
        "outcome": "finished",
        "curve": list(range(1, steps + 4)),
        "metrics": ["step", "loss"],
    }
    assert lines[-1] == f"interrupted after {steps} steps"  # the second training printed nothing
    assert "  job         Mine of script.py" in lines
    assert (tmp_path / "imports").read_text() == "__main__\n"  # no member ran the script
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert config["job"]["saved"] == "saved_job.py"
    assert config["settings"] == {"layers": "(24, 8)", "steps": str(steps + 3), "pause_s": "0"}


@pytest.mark.long
def test_the_command_continues_it_wherever_the_run_is(tmp_path: Path) -> None:
    steps = run_script(tmp_path, "allreduce")[1]["stopped"] + 3
    moved = tmp_path / "moved"
    (tmp_path / "run").rename(moved)
    (tmp_path / "script.py").unlink()
    shown = subprocess.run(
        [sys.executable, "-m", "manyhands", "show", str(moved)],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert "saved_job.py:Mine (Mine)" in shown.stdout, shown
    more = harness.resume(moved, "--set", f"steps={steps + 1}", "--strategy", "ps:sync")
    assert more.code == 0, more.err
    assert len(more.losses) == steps + 1
