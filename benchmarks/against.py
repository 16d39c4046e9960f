"""Compare this tree with another commit: `--against COMMIT`, for every benchmark.

The commit is checked out into a temporary git worktree; where git is missing, give a folder that has it.
In every repeat, each of our contenders runs twice, once from this tree and once from the other, in
alternating order, so that other load on the machine affects both. The result is the median of the ratios
within the repeats, with its spread.

The benchmark itself always runs from this tree; `manyhands train` and its job file come from the tree that
is measured. So both trees must know the same flags, and the job files must have the same fields.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAIRS = 7
"""Repeats by default, when two trees are compared."""


@dataclass(frozen=True)
class Tree:
    """A checkout of the project."""

    root: Path
    commit: str = ""
    """Empty: this tree."""

    def label(self, contender: str) -> str:
        return f"{contender} [{self.commit}]" if self.commit else contender

    def environ(self) -> dict[str, str]:
        """Return what makes a Python process import manyhands from here."""
        if not self.commit:
            return {}
        paths = [str(self.root / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
        return {"PYTHONPATH": os.pathsep.join(paths)}

    def benchmark(self, name: str) -> Path:
        return self.root / "benchmarks" / name


THIS = Tree(ROOT)


def add_flag(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--against",
        metavar="COMMIT",
        help=f"run everything of ours from that commit, or from a folder that has it, too, and compare "
        f"(default: {PAIRS} repeats)",
    )


@contextmanager
def trees(commit: str | None) -> Iterator[list[Tree]]:
    """Yield this tree, and that of the commit if there is one; its worktree is removed afterwards."""
    if not commit:
        yield [THIS]
        return
    if (given := Path(commit)).is_dir():
        _compile(ROOT, given)
        yield [THIS, Tree(given.resolve(), given.name)]
        return
    with tempfile.TemporaryDirectory(prefix="against-") as folder:
        root = Path(folder) / "tree"
        git = ["git", "-C", str(ROOT), "worktree"]
        subprocess.run([*git, "add", "--quiet", "--detach", str(root), commit], check=True)
        try:
            _compile(ROOT, root)
            yield [THIS, Tree(root, commit)]
        finally:
            subprocess.run([*git, "remove", "--force", str(root)], check=True)


def _compile(*roots: Path) -> None:
    """Write the bytecode of all trees: otherwise the first run would pay for it, or all runs if Python may
    not write any."""
    sources = [str(root / "src") for root in roots]
    subprocess.run([sys.executable, "-m", "compileall", "-q", *sources], check=True)


def in_turn(contenders: Sequence, repeat: int) -> list:
    """Return all contenders, beginning with another one in each repeat, and backwards in every second."""
    first = repeat % len(contenders)
    order = [*contenders[first:], *contenders[:first]]
    return order[::-1] if repeat % 2 else order


def comparison(ratios: Mapping[str, Sequence[float]], commit: str) -> list[str]:
    """Return lines with the speed of each contender from this tree over its speed from the other one."""
    lines = [f"this tree / {commit}: median (min .. max) of pairs, above 1 is faster"]
    for contender, values in ratios.items():
        if values:
            middle, low, high = statistics.median(values), min(values), max(values)
            lines.append(
                f"  {contender:44} {middle:.3f} ({low:.3f} .. {high:.3f}), {len(values)} pairs"
            )
    return lines
