"""The system programs that make a lab, and whether they work here."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence

from manyhands.errors import LabError

PACKAGES = {
    "ip": "iproute2",
    "tc": "iproute2",
    "bridge": "iproute2",
    "nsenter": "util-linux",
    "setpriv": "util-linux",
    "unshare": "util-linux",
    "umount": "mount",
}
"""Program to the package that contains it."""
DEADLINE_S = 30.0
TRIAL = """
ip link add switch type bridge &&
ip link add port-0 type veth peer name eth0 &&
ip link set port-0 master switch &&
tc qdisc add dev eth0 root tbf rate 1mbit burst 5000b limit 50000b
"""


def find(tool: str) -> str | None:
    """Find a program. They are for root, whose folders may not be in PATH."""
    folders = [os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"]
    return shutil.which(tool, path=os.pathsep.join(folders))


def call(tool: str, *words: str, stdin: str = "") -> str:
    """Run a program and return its output; LabError if it fails."""
    path = find(tool)
    if path is None:
        raise LabError(f"There is no {tool} here: install the package {PACKAGES[tool]}.")
    try:
        done = subprocess.run(
            [path, *words],
            input=stdin,
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
            process_group=0,  # Ctrl-C must not interrupt it
        )
    except subprocess.TimeoutExpired:
        raise LabError(f"{tool} {' '.join(words)}: timed out after {DEADLINE_S:.0f} s") from None
    if done.returncode != 0:
        why = " ".join(done.stderr.split()) or f"exit code {done.returncode}"
        raise LabError(f"{tool} {' '.join(words)}: {why}")
    return done.stdout


def batch(tool: str, namespace: str, lines: Sequence[str]) -> None:
    """Run several commands of `ip`, `tc` or `bridge` in one namespace, in one process."""
    if lines:
        call(tool, "-n", namespace, "-batch", "-", stdin="\n".join(lines) + "\n")


def unavailable() -> str | None:
    """Return why labs can't be made here, in a sentence; None if they can."""
    if not sys.platform.startswith("linux"):
        return "A lab needs network namespaces, which only Linux has."
    if os.geteuid() != 0:
        return "A lab needs root to make network namespaces: try sudo."
    missing = [tool for tool in PACKAGES if find(tool) is None]
    if missing:
        packages = " ".join(sorted({PACKAGES[tool] for tool in missing}))
        return f"A lab needs {', '.join(missing)}: install {packages}."
    try:  # in namespaces that end with the process
        call("unshare", "--net", "--uts", "--mount", "sh", "-c", TRIAL)
    except LabError as error:
        why = str(error).split(": ")[-1].rstrip(".")
        return f"A lab needs bridges, cables and tbf in namespaces, which don't work here: {why}."
    return None
