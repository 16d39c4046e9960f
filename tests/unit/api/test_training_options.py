"""The arguments of mh.train() and mh.resume(): the flags of the commands, with the same checks."""

from __future__ import annotations

import argparse
import inspect
from pathlib import Path
from typing import Any

import pytest

import manyhands as mh
from manyhands.api.training import Options
from manyhands.cli import resume, train
from manyhands.errors import UsageError
from manyhands.testing.jobs import Regression

ONLY_TYPED = {
    *("help", "debug", "quiet", "check", "set"),
    *("cluster", "as", "slots", "key_file"),  # for processes that were started together
}
"""Flags that Python has no use for, or another word."""
ONLY_PYTHON = {"settings", "progress"}


@pytest.mark.parametrize(
    ("command", "function", "positional"),
    [(train, mh.train, "job"), (resume, mh.resume, "run_folder")],
)
def test_every_flag_is_an_argument(command: Any, function: Any, positional: str) -> None:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    flags = {action.dest for action in parser._actions} - {positional} - ONLY_TYPED
    named = [p for p in inspect.signature(function).parameters.values() if p.kind == p.KEYWORD_ONLY]
    assert flags == ({p.name for p in named} - ONLY_PYTHON) | set(Options.__annotations__)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"max_step": 5}, "There is no option max_step; did you mean 'max_steps'"),
        ({"strategy": "alreduce"}, "did you mean 'allreduce'"),
        ({"workers": 0}, "workers"),
        ({"workers": 2.5}, "--workers 2.5: it must be a number"),
        ({"max_time": "50"}, "--max-time 50: it must be a time with its unit"),
        ({"max_time": -3}, "--max-time -3s: it must be a time"),
        ({"keep": 0}, "--keep 0: it must be at least 1"),
        ({"settings": {"learning": 0.1}}, "Regression has no field 'learning'"),
        ({"on": "env"}, "from Python, members run on this machine .*manyhands train .* --on env"),
        ({"run_dir": "."}, "is not empty. Give a new --run-dir"),
        ({"init_from": "nowhere"}, "There is no run nowhere"),
    ],
)
def test_a_wrong_argument_is_refused_before_anything_exists(
    options: dict[str, Any], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a file").touch()
    for name in ("RANK", "WORLD_SIZE", "TF_CONFIG"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(UsageError, match=says):
        mh.train(Regression(), device="cpu", **options)
    assert [path.name for path in tmp_path.iterdir()] == ["a file"]


def test_one_of_several_processes_is_told_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "job.py").touch()
    monkeypatch.chdir(tmp_path)
    variables = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    for name, value in (variables | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UsageError, match=r'manyhands train job.py --on env\n.*on="local"'):
        mh.train("job.py")
