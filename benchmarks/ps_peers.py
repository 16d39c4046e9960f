"""Other parameter servers, each installed into its own virtual environment.

The environments are in benchmarks/.venvs and are created once. If that fails, the reason is remembered, and
--reinstall tries again. Peers that use torch use the same torch as this benchmark.
"""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import sys
import sysconfig
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ps_watch import Failed, run

HERE = Path(__file__).parent
VENVS = HERE / ".venvs"
INSTALL_S = 1800.0


@dataclass(frozen=True)
class Package:
    """What a peer needs, in one environment."""

    name: str
    requirements: Sequence[str]
    uses_torch: bool
    first: Sequence[str] = ()
    """What must be there before it can be built."""
    flags: Sequence[str] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    cxx_flags: str = ""
    """Given to the compiler after all others: its own build files may be older than torch."""


@dataclass(frozen=True)
class Peer:
    script: str
    mode: str
    package: Package | None
    """None: it needs torch alone."""


RAY = Package("ray", ["ray"], uses_torch=True)
TENSORFLOW = Package("tensorflow", ["tensorflow-cpu"], uses_torch=False)
HOROVOD = Package(
    "horovod",
    ["horovod"],
    uses_torch=True,
    first=["setuptools<81", "wheel", "cloudpickle", "psutil", "pyyaml", "packaging", "numpy"],
    # Built for this very torch: a wheel kept from another build may not fit it.
    flags=["--no-build-isolation", "--no-deps", "--no-cache-dir"],
    environment={
        "HOROVOD_WITH_PYTORCH": "1",
        "HOROVOD_WITHOUT_TENSORFLOW": "1",
        "HOROVOD_WITHOUT_MXNET": "1",
        "HOROVOD_WITHOUT_MPI": "1",
        "HOROVOD_WITH_GLOO": "1",
    },
    cxx_flags="-std=c++17",
)

PEERS = {
    "ray:sync": Peer("ps_peer_ray.py", "sync", RAY),
    "ray:async": Peer("ps_peer_ray.py", "async", RAY),
    "rpc:sync": Peer("ps_peer_rpc.py", "sync", None),
    "rpc:async": Peer("ps_peer_rpc.py", "async", None),
    "tf:async": Peer("ps_peer_tf.py", "async", TENSORFLOW),
    "horovod": Peer("ps_peer_horovod.py", "allreduce", HOROVOD),
}


def python_of(peer: Peer, *, reinstall: bool) -> str:
    """The Python that runs the peer's script. Raises Failed with the reason when there is none."""
    if peer.package is None:
        return sys.executable
    folder = VENVS / peer.package.name
    failed = VENVS / f"{peer.package.name}.failed"
    if reinstall:
        shutil.rmtree(folder, ignore_errors=True)
        failed.unlink(missing_ok=True)
    if failed.exists():
        raise Failed(f"{failed.read_text()} (--reinstall tries again)")
    ready = folder / "ready"
    if not ready.exists() or ready.read_text() != _made_with(peer.package):
        try:
            _install(peer.package, folder)
        except Failed as error:
            failed.write_text(f"can't be installed: {error}")
            raise Failed(failed.read_text()) from error
    return str(folder / "bin" / "python")


def _made_with(package: Package) -> str:
    """An environment holds for one Python and, where it borrows torch, for one torch."""
    torch = importlib.metadata.version("torch") if package.uses_torch else ""
    return f"{sys.prefix} {sys.version} {torch}".strip()


def _install(package: Package, folder: Path) -> None:
    print(f"installing {package.name} into {folder} ...", flush=True)
    began = time.monotonic()
    folder.parent.mkdir(exist_ok=True)
    env = {**os.environ, **package.environment}
    env.pop("PYTHONPATH", None)
    shutil.rmtree(folder, ignore_errors=True)
    run([sys.executable, "-m", "venv", str(folder)], env=env, deadline_s=120.0)
    if package.cxx_flags:
        compiler = folder / "bin" / "cxx"
        compiler.write_text(f'#!/bin/sh\nexec {env.get("CXX", "c++")} "$@" {package.cxx_flags}\n')
        compiler.chmod(0o755)
        env["CXX"] = str(compiler)
    pip = [
        *(str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet"),
        *("--disable-pip-version-check", "--retries", "2"),
    ]
    if package.first:
        run([*pip, *package.first], env=env, deadline_s=INSTALL_S)
    if package.uses_torch:
        site = folder / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}"
        # After the environment's own packages on the path: torch comes from there, and only what
        # the peer itself lacks.
        path = site / "site-packages" / "torch_of_the_benchmark.pth"
        path.write_text(sysconfig.get_path("purelib") + "\n")
    run([*pip, *package.flags, *package.requirements], env=env, deadline_s=INSTALL_S)
    (folder / "ready").write_text(_made_with(package))
    print(f"installed {package.name} in {time.monotonic() - began:.0f} s", flush=True)
