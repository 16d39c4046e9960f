"""Rules for every test: it leaves nothing behind, it ends in time, and its examples repeat.

A test that hangs ends the whole run after DEADLINE_S, with the stacks of all threads on the
terminal: results after a hang could not be trusted.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import HealthCheck, settings

# A shell's background job ignores SIGINT, and so do its children. Restore it for tests that interrupt a
# program.
signal.signal(signal.SIGINT, signal.default_int_handler)

DEADLINE_S = 300.0
GRACE_S = 5.0
"""Time for threads and processes to end after a test."""

settings.register_profile(
    "repeatable",
    deadline=None,
    max_examples=60,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
settings.load_profile("repeatable")

_terminal = pytest.StashKey[int]()


def pytest_addoption(parser: pytest.Parser) -> None:
    said = "use one core, the N-th: members that are threads take turns, and moving costs them a third more"
    parser.addoption("--core", type=int, metavar="N", help=said)
    parser.addoption("--part", metavar="K/N", help="run only the K-th of N tests, the K+N-th, ...")


def pytest_configure(config: pytest.Config) -> None:
    if (number := config.getoption("--core")) is not None:
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[number % len(cores)]})
    # Before capturing begins: a stack dump into a captured stream would be lost with the process.
    config.stash[_terminal] = os.dup(2)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if part := config.getoption("--part"):
        first, step = map(int, part.split("/"))
        items[:] = items[first - 1 :: step]


def pytest_unconfigure(config: pytest.Config) -> None:
    os.close(config.stash[_terminal])


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    terminal = item.config.stash[_terminal]
    faulthandler.dump_traceback_later(DEADLINE_S, exit=True, file=terminal)
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()


@pytest.fixture(autouse=True)
def no_leaks() -> Iterator[None]:
    """Fail a test that leaves a thread, process, process group, variable or working folder behind."""
    threads, children = set(threading.enumerate()), set(_children())
    environment, folder = _environment(), os.getcwd()
    yield
    left = [*_new_threads(threads, GRACE_S), *_new_children(children, GRACE_S)]
    if _in_a_process_group():
        left.append("a process group of torch.distributed")
        sys.modules["torch.distributed"].destroy_process_group()
    if os.getcwd() != folder:
        left.append(f"the working folder {os.getcwd()}")
        os.chdir(folder)
    left += [
        f"the variable {name}={os.environ.get(name)}"
        for name in environment.keys() ^ _environment().keys()
        | {n for n, v in environment.items() if os.environ.get(n) != v}
    ]
    assert not left, f"left behind: {', '.join(left)}"


def _new_threads(before: set[threading.Thread], grace_s: float) -> list[str]:
    def left() -> list[str]:
        fresh = [thread for thread in threading.enumerate() if thread not in before]
        return [f"thread {t.name}" for t in fresh if t.is_alive() and not t.daemon]

    return _after(grace_s, left)


def _new_children(before: set[int], grace_s: float) -> list[str]:
    return _after(
        grace_s, lambda: [f"process {p}: {c}" for p, c in _children().items() if p not in before]
    )


def _after(grace_s: float, left: Callable[[], list[str]]) -> list[str]:
    deadline = time.monotonic() + grace_s
    while (found := left()) and time.monotonic() < deadline:
        time.sleep(0.02)
    return found


def _children() -> dict[int, str]:
    """Return the running children of this process, with their command lines."""
    found: dict[int, str] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            state, parent = (folder / "stat").read_text().rpartition(")")[2].split()[:2]
            if int(parent) != os.getpid() or state == "Z":
                continue
            command = (
                (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            )
        except (FileNotFoundError, ProcessLookupError):
            continue
        # Python's own: a process that has spawned another keeps one until it ends.
        if "multiprocessing.resource_tracker" not in command:
            found[int(folder.name)] = command
    return found


def _in_a_process_group() -> bool:
    distributed = sys.modules.get("torch.distributed")
    return distributed is not None and distributed.is_available() and distributed.is_initialized()


def _environment() -> dict[str, str]:
    """Return the environment without variables that pytest and imported libraries set."""
    theirs = ("PYTEST_CURRENT_TEST", "KMP_", "TORCHINDUCTOR_", "TRITON_")
    return {name: value for name, value in os.environ.items() if not name.startswith(theirs)}


@pytest.fixture(params=["threads", pytest.param("processes", marks=pytest.mark.long)])
def members(request: pytest.FixtureRequest) -> ModuleType:
    """What runs commands with their members as threads, or as processes: the latter in `make long`."""
    from manyhands.testing import harness, in_process  # they import torch

    return {"threads": in_process, "processes": harness}[request.param]


@pytest.fixture(scope="session")
def mnist_folder() -> Path:
    given = os.environ.get("MANYHANDS_DATA")
    folders = [Path(given), Path(given) / "mnist"] if given else []
    beside = Path(__file__).parents[2] / "shared" / "data" / "mnist"
    for folder in [*folders, beside]:
        if (folder / "train-images-idx3-ubyte.gz").exists():
            return folder
    pytest.skip("MNIST is not here: put its four files in a folder and set MANYHANDS_DATA to it")
