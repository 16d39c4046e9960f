"""Versions, the backends of torch, and optional packages.

The only checks here that cost anything import torch, which proves more than its version: that its
libraries load on this machine.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import platform
import re
import sys
from dataclasses import dataclass

from manyhands import __version__
from manyhands.doctor.finding import Finding, fix, good, note

PYTHONS = ((3, 11), (3, 12))
"""The oldest and the newest Python that manyhands is tested on."""
TORCHES = ((2, 11), (2, 13))
"""The same for torch."""
INSTALL_TORCH = 'pip install "torch>=2.11,<2.14"'


@dataclass(frozen=True)
class Package:
    module: str
    purpose: str
    without: str
    """The fallback if it is absent."""
    oldest: str
    """The oldest version to install."""


PACKAGES = {
    "rich": Package("rich", "colours and a progress bar on a terminal", "plain lines", "13"),
    "tensorboard": Package(
        "tensorboard",
        "curves in the run folder's tb/",
        "no curves, events.jsonl has the numbers",
        "2.16",
    ),
    "cryptography": Package(
        "cryptography", "certificates for links between hosts", "unix sockets only, one host", "42"
    ),
    "scikit-learn": Package(
        "sklearn", "the data of examples/digits.py", "that example does not run", "1.4"
    ),
}


def check_manyhands() -> Finding:
    return good(__version__)


def check_python(version: str = platform.python_version()) -> Finding:
    if not _within(version, PYTHONS):
        return fix(
            f"{version}, and manyhands is made for {_span(PYTHONS)}",
            "Make an environment with one of these:  python3.12 -m venv .venv",
        )
    return good(f"{version} at {sys.executable}")


def check_torch() -> Finding:
    try:
        import torch
    except Exception as error:  # ImportError, or OSError for a library that does not load
        return fix(f"can't be imported: {error}", INSTALL_TORCH)
    return judge_torch(torch.__version__)


def judge_torch(version: str) -> Finding:
    if not _within(version, TORCHES):
        return fix(f"{version}, and manyhands is made for {_span(TORCHES)}", INSTALL_TORCH)
    return good(str(version))


def check_backends() -> Finding:
    """Check which collective libraries torch was built with."""
    import torch
    import torch.distributed as dist

    if not dist.is_available():
        return fix("this torch has no torch.distributed", INSTALL_TORCH)
    has = {
        "gloo": dist.is_gloo_available(),
        "nccl": dist.is_nccl_available(),
        "mpi": dist.is_mpi_available(),
    }
    return judge_backends(has, num_gpus=torch.cuda.device_count())


def judge_backends(has: dict[str, bool], *, num_gpus: int) -> Finding:
    needed = ["gloo", "nccl"] if num_gpus else ["gloo"]
    missing = [name for name in needed if not has[name]]
    there = ", ".join(name for name, is_there in has.items() if is_there) or "none"
    absent = ", ".join(name for name, is_there in has.items() if not is_there)
    detail = f"{there} (not built in: {absent})" if absent else there
    if missing:
        return fix(f"{detail}; {' and '.join(missing)} needed", INSTALL_TORCH)
    return good(detail)


def check_package(name: str) -> Finding:
    package = PACKAGES[name]
    try:
        found = importlib.util.find_spec(package.module) is not None
        version = importlib.metadata.version(name) if found else ""
    except importlib.metadata.PackageNotFoundError:
        version = "of unknown version"
    if not found:
        detail = f"not installed ({package.purpose}); without it: {package.without}"
        return note(detail, f'pip install "{name}>={package.oldest}"')
    return good(f"{version}, for {package.purpose}")


def _within(version: str, span: tuple[tuple[int, int], tuple[int, int]]) -> bool:
    match = re.match(r"(\d+)\.(\d+)", version)
    return match is not None and span[0] <= (int(match[1]), int(match[2])) <= span[1]


def _span(span: tuple[tuple[int, int], tuple[int, int]]) -> str:
    (a, b), (c, d) = span
    return f"{a}.{b} to {c}.{d}"
