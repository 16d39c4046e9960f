"""Tracebacks for people: they begin at the first line of the user's own code. Pure.

Above it are our loop and torch's internals, which say nothing about the mistake. The member's log has all
frames.
"""

from __future__ import annotations

import re
import sysconfig
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import manyhands

HEADER = "Traceback (most recent call last):"
_FRAME = re.compile(r'  File "(.*)", line \d+, in (.*)')
OURS = str(Path(manyhands.__file__).parent) + "/"
STDLIB = sysconfig.get_paths()["stdlib"] + "/"
INSTALLED = ("/site-packages/", "/dist-packages/")
HOOKS = ("_wrapped_call_impl", "_call_impl")
"""Of torch.nn.Module: two frames between every two modules."""


def shown(error: BaseException, job: Path | None = None) -> str:
    """Format the traceback of an exception for the user. `job`: the job's file."""
    cause = error.__cause__
    # A process of a pool sends its traceback as text; what is above it here is how it was fetched.
    remote = getattr(cause, "tb", None) if type(cause).__name__ == "_RemoteTraceback" else None
    if isinstance(remote, str):
        return cut(remote.strip('\n"') + "\n", is_users(job))
    return cut("".join(traceback.format_exception(error)), is_users(job))


def is_users(job: Path | None) -> Callable[[str], bool]:
    """Return whether a file is the user's: the job, or anything that is not installed, torch's or ours."""
    package = _package_of(str(job)) if job is not None else None

    def judge(file: str) -> bool:
        if job is not None and file == str(job):
            return True
        if file.startswith((OURS, "<")) or "/torch/" in file:
            return False
        if any(place in file for place in INSTALLED):
            return package is not None and _package_of(file) == package
        return not file.startswith(STDLIB)

    return judge


def _package_of(file: str) -> str | None:
    """Return the folder of the package of an installed file."""
    for place in INSTALLED:
        before, found, inside = file.rpartition(place)
        if found:
            return f"{before}{found}{inside.partition('/')[0]}"
    return None


@dataclass
class _Frame:
    file: str
    function: str
    lines: list[str] = field(default_factory=list)


def cut(text: str, is_users: Callable[[str], bool]) -> str:
    """Remove the frames above the user's first one from each traceback in the text."""
    kept: list[str] = []
    frames: list[_Frame] | None = None
    for line in text.splitlines():
        frame = _FRAME.fullmatch(line)
        if frames is not None and frame is not None:
            frames.append(_Frame(frame[1], frame[2], [line]))
        elif frames and line.startswith("  "):
            frames[-1].lines.append(line)
        else:
            kept.extend(_lines(frames or [], is_users))
            kept.append(line)
            frames = [] if line.endswith(HEADER) else None
    kept.extend(_lines(frames or [], is_users))
    return "\n".join(kept) + "\n"


def _lines(frames: list[_Frame], is_users: Callable[[str], bool]) -> Iterator[str]:
    first = next((at for at, frame in enumerate(frames) if is_users(frame.file)), None)
    if first is None:
        # Nothing of the user's, as with a model of torch's modules alone: from where we called it. All of
        # it if it ends in our code.
        ours = [at for at, frame in enumerate(frames) if frame.file.startswith(OURS)]
        last = ours[-1] if ours else 0
        first = 0 if last == len(frames) - 1 else last
    for frame in frames[first:]:
        if not (frame.function in HOOKS and frame.file.endswith("/torch/nn/modules/module.py")):
            yield from frame.lines
