"""torch's compiler is loaded on first use, and works as usual."""

from __future__ import annotations

import subprocess
import sys

SETUP = """
import sys, inspect, torch
from manyhands.compute.lazy_dynamo import compile_late

compile_late()
model = torch.nn.Linear(3, 3)
optimizer = torch.optim.Adam(model.parameters())

def loaded():
    return "torch._dynamo.eval_frame" in sys.modules

def train(step=optimizer.step):
    optimizer.zero_grad()
    model(torch.ones(2, 3)).sum().backward()
    step()

train()
optimizer.load_state_dict(optimizer.state_dict())
inspect.getmodule(train)
"""


def say(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", SETUP + code],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_optimizers_do_not_load_dynamo() -> None:
    assert say("print(loaded())") == "False"


def test_compiling_loads_the_real_dynamo() -> None:
    code = """
compiled = torch.compile(model, backend="eager")
assert torch.equal(compiled(torch.ones(2, 3)), model(torch.ones(2, 3)))
assert loaded()
import torch._dynamo
from torch._dynamo.utils import counters
assert type(torch._dynamo).__name__ == "module" and counters["frames"]["ok"] == 1
before = model.weight.clone()
train()
train(torch.compile(optimizer.step, backend="eager"))
torch.optim.SGD(model.parameters(), lr=0.1).step()
print((model.weight != before).all().item())
"""
    assert say(code) == "True"


def test_a_loaded_dynamo_is_kept() -> None:
    code = """
import torch._dynamo
real = torch._dynamo.config and sys.modules["torch._dynamo"]
compile_late()
print(sys.modules["torch._dynamo"] is real)
"""
    assert say(code) == "True"
