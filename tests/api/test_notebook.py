"""mh.train() in a notebook: the class of one cell, its helpers in others, and what each cell shows."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient
from nbformat.v4 import new_code_cell, new_notebook

from manyhands.testing import harness

CELLS = {
    "imports": """
from dataclasses import dataclass
from torch import nn
import manyhands as mh
from manyhands.testing.jobs import Regression
WIDTH = 3
""",
    "helper": """
def net(width):
    return nn.Sequential(nn.Linear(6, width), nn.Linear(width, 2))
""",
    "job": """
@dataclass
class Mine(Regression):
    epochs: int = 2
    def model(self):
        return net(WIDTH * self.width * Quick.rate)
""",
    "changed": "WIDTH = 5",
    "failing": """
await nothing
def net(width):
    return None
""",
    "quick": """
class Quick:
    rate = 1
await __import__("asyncio").sleep(0)
""",
    "train": """
result = mh.train(Mine(width=2), strategy="single", device="cpu", run_dir="run")
result
""",
    "load": "result.load()[0].out_features, len(result.steps['loss']), list(result.metrics)",
    "plot": "result.plot()",
}
BROKEN = """
@dataclass
class Broken(Mine):
    def loss(self, output, batch):
        raise RuntimeError("no loss today")
mh.train(Broken(), workers=2, device="cpu", run_dir="broken")
"""
Outputs = dict[str, list[Any]]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Outputs]:
    """Return a function that runs cells in a notebook's kernel, and returns the outputs of each."""
    for name in ("IPYTHONDIR", "JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR"):
        monkeypatch.setenv(name, str(tmp_path / name))

    def run_cells(cells: dict[str, str], **hooks: Any) -> Outputs:
        notebook = new_notebook(cells=[new_code_cell(source.strip()) for source in cells.values()])
        client = NotebookClient(
            notebook,
            timeout=100,
            kernel_name="python3",
            allow_errors=True,
            resources={"metadata": {"path": str(tmp_path)}},
            **{name: hook(lambda: client) for name, hook in hooks.items()},
        )
        client.execute()
        nbformat.validate(notebook)
        return {name: cell.outputs for name, cell in zip(cells, notebook.cells, strict=True)}

    return run_cells


def printed(outputs: list[Any]) -> str:
    return "".join(each.text for each in outputs if each.output_type == "stream")


def test_a_notebook_trains_loads_and_plots(run: Callable[..., Outputs]) -> None:
    outputs = run(CELLS)
    for name in ("imports", "helper", "job", "changed", "quick"):
        assert outputs[name] == []
    [error] = outputs["failing"]  # its definition did not run, and does not count
    assert error.ename == "NameError"
    *streams, shown = outputs["train"]
    assert {stream.name for stream in streams} == {"stdout"}
    text = printed(streams)
    assert "\r" not in text
    assert "\x1b" not in text
    assert "  job         Mine of a notebook" in text.splitlines()
    assert re.search(r"^epoch 2/2  step 14  eval loss 0\.\d+", text, re.MULTILINE)
    assert shown.data["text/plain"].startswith("Result('run', finished, 14 steps, loss 0.")
    assert outputs["load"][0].data["text/plain"] == "(10, 14, ['step', 'loss', 'worst'])"
    assert "image/png" in outputs["plot"][0].data


@pytest.mark.long
def test_a_failure_is_shown_once(run: Callable[..., Outputs], tmp_path: Path) -> None:
    """As the exception, with the worker's traceback."""
    cells = {name: CELLS[name] for name in ("imports", "helper", "quick", "job")}
    *streams, error = run({**cells, "broken": BROKEN})["broken"]
    shown = "\n".join(error.traceback)
    assert error.ename == "MemberError"
    assert 'saved_job.py", line' in shown
    assert "RuntimeError: no loss today" in shown
    assert "no loss today" not in printed(streams)
    started = harness.Finished(0, "", "", 0.0, tmp_path / "broken").of("MemberStarted")
    assert len(started) == 2
    assert harness.gone([e["pid"] for e in started], within_s=0)


@pytest.mark.long
def test_interrupting_the_kernel_stops_and_saves(
    run: Callable[..., Outputs], tmp_path: Path
) -> None:
    """As the stop button does; the next cells can go on with the run."""
    cells = {name: CELLS[name] for name in ("imports", "helper", "quick", "job")}
    cells["long"] = (
        'mh.train(Mine(epochs=1000, pause_s=0.02), strategy="single", device="cpu", run_dir="run")'
    )
    cells["rest"] = (
        'stopped = mh.Result("run")\n'
        'steps = stopped.summary["steps"] + 2\n'
        'result = mh.resume("run", settings={"steps": steps}, progress=False)\n'
        "stopped.outcome, result.outcome, len(result.steps['step']) == steps"
    )
    events = tmp_path / "run" / "events.jsonl"

    def stopping(client: Callable[[], NotebookClient]) -> Callable[..., Any]:
        async def stop() -> None:
            while not events.exists() or b"StepCommitted" not in events.read_bytes():
                await asyncio.sleep(0.02)
            manager = client().km
            assert manager is not None
            await manager.interrupt_kernel()

        async def began(cell: Any, cell_index: int) -> None:
            if cell_index == len(cells) - 2:
                tasks.append(asyncio.ensure_future(stop()))

        return began

    tasks: list[Any] = []
    outputs = run(cells, on_cell_execute=stopping)
    assert outputs["long"][-1].ename == "Interrupted"
    assert 'Continue with  mh.resume("run")' in outputs["long"][-1].evalue
    assert "stopping: Ctrl-C" in printed(outputs["long"])
    assert outputs["rest"][-1].data["text/plain"] == "('interrupted', 'finished', True)"
