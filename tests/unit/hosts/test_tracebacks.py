"""Tracebacks begin at the user's line."""

from __future__ import annotations

import types
from concurrent.futures.process import _RemoteTraceback
from pathlib import Path

import torch
from torch import nn

import manyhands
from manyhands.hosts import tracebacks

JOB = Path("/home/ada/work/job.py")
OURS = str(Path(manyhands.__file__).parent / "train" / "loop.py")


def called(source: str, file: str, **names: object) -> types.FunctionType:
    """The function `f` of a source that claims to be in a file."""
    space = dict(names)
    exec(compile(source, file, "exec"), space)
    function = space["f"]
    assert isinstance(function, types.FunctionType)
    return function


def failure(function: types.FunctionType) -> Exception:
    try:
        called("def f():\n    return g()\n", OURS, g=function)()
    except Exception as error:
        own = error.__traceback__  # this test's own frame
        return error.with_traceback(own.tb_next if own else None)
    raise AssertionError


def files(text: str) -> list[str]:
    return [line.split('"')[1] for line in text.splitlines() if line.startswith('  File "')]


def test_it_begins_at_the_job_and_leaves_out_the_hooks_of_modules() -> None:
    net = nn.Sequential(nn.Linear(3, 2), nn.Linear(3, 2))
    inside = called("def f(x):\n    return net(x)\n", str(JOB), net=net)
    users = nn.Module()
    users.forward = inside  # type: ignore[assignment]
    call = called("def f():\n    return users(x)\n", OURS, users=users, x=torch.ones(1, 3))
    text = tracebacks.shown(failure(call), JOB)
    assert files(text)[0] == str(JOB)
    assert "module.py" not in text
    assert files(text)[-1].endswith("linear.py")
    assert text.splitlines()[0] == "Traceback (most recent call last):"
    assert text.splitlines()[-1].startswith("RuntimeError: mat1 and mat2")
    assert OURS not in text


def test_without_user_code_it_begins_at_our_call() -> None:
    linear = nn.Linear(3, 2)
    call = called("def f():\n    return linear(x)\n", OURS, linear=linear, x=torch.ones(1, 5))
    text = tracebacks.shown(failure(call), JOB)
    assert files(text)[0] == OURS
    assert len(files(text)) == 2
    ours = called("def f():\n    return 1 / 0\n", OURS)
    assert len(files(tracebacks.shown(failure(ours), JOB))) == 2, "a fault of ours is shown whole"


def test_of_a_loader_process_only_its_own_traceback_is_shown() -> None:
    error = KeyError(7)
    error.__cause__ = _RemoteTraceback(
        f'\n"""\nTraceback (most recent call last):\n  File "{OURS}", line 3, in load\n    go()\n'
        f'  File "{JOB}", line 9, in __getitem__\n    return self.rows[at]\nKeyError: 7\n"""'
    )
    assert tracebacks.shown(error, JOB) == (
        f'Traceback (most recent call last):\n  File "{JOB}", line 9, in __getitem__\n'
        "    return self.rows[at]\nKeyError: 7\n"
    )


def test_each_traceback_of_a_chain_is_cut() -> None:
    first = called("def f():\n    raise KeyError('first')\n", str(JOB))
    second = called(
        "def f():\n    try:\n        g()\n    except KeyError as error:\n"
        "        raise ValueError('second') from error\n",
        str(JOB),
        g=called("def f():\n    return g()\n", OURS, g=first),
    )
    text = tracebacks.shown(failure(second), JOB)
    assert files(text) == [str(JOB), OURS, str(JOB), str(JOB)]
    assert "The above exception was the direct cause" in text


def test_files_of_the_user() -> None:
    users = tracebacks.is_users(Path("/v/lib/python3.11/site-packages/mine/jobs/a.py"))
    assert users("/v/lib/python3.11/site-packages/mine/nets.py"), "an installed job's own package"
    assert not users("/v/lib/python3.11/site-packages/numpy/core.py")
    assert not users("/v/lib/python3.11/site-packages/torch/nn/modules/linear.py")
    assert not users("<frozen importlib._bootstrap>")
    assert not users(tracebacks.STDLIB + "threading.py")
    assert not users(OURS)
    assert tracebacks.is_users(Path(OURS))(OURS), "a job of ours is a job"
