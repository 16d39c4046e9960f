"""The contenders: their names on the command line, and how each is run and measured.

    limit, lockstep, shared, threads, ddp    hand-written loops (ps_bare.py)
    ray:sync, rpc:async, tf:async, ...       the peers (ps_peers.py)
    anything else                            a spec of manyhands, optionally followed by flags of
                                             `manyhands train`: "ps:sync(transport=tcp) --trust-network"

NAME@N runs with N workers, whatever the number for the others.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ps_ours
from against import THIS, Tree
from ps_load import Load
from ps_peers import PEERS, python_of
from ps_watch import Failed, Ran, Sample, run

from manyhands.strategies.registry import make_strategy

HERE = Path(__file__).parent
BARE = ("limit", "lockstep", "shared", "threads", "ddp")
DEFAULT = (
    "limit",
    "lockstep",
    "shared",
    "threads",
    "ddp",
    "allreduce",
    "ps:sync",
    "ps:sync(replicas=0)",
    "ps:sync(placement=dedicated)",
    "ps:sync(transport=tcp)",
    "ps:sync(transport=tcp) --trust-network",
    "ps:backup(spares=1)",
    "ps:ssp(staleness=4)",
    "ps:async",
    "ps:async@1",
    *PEERS,
)


@dataclass(frozen=True)
class Measured:
    samples_per_s: float
    window_s: float
    memory: Sample | None


@dataclass(frozen=True)
class Contender:
    label: str
    tree: Tree = THIS

    @property
    def title(self) -> str:
        return self.tree.label(self.label)

    @property
    def name(self) -> str:
        """Without flags and without @N: a spec, or one of the other names."""
        return self.label.split(" ")[0].partition("@")[0]

    @property
    def flags(self) -> list[str]:
        return self.label.split(" ")[1:]

    @property
    def is_ours(self) -> bool:
        return self.name not in BARE and self.name not in PEERS

    def load(self, common: Load) -> Load:
        _, _, workers = self.label.split(" ")[0].partition("@")
        return replace(common, workers=int(workers)) if workers else common

    def prepare(self, common: Load, *, reinstall: bool) -> None:
        """Install, or check the spec. Raises Failed with the reason why it can't take part."""
        if self.name in PEERS:
            python_of(PEERS[self.name], reinstall=reinstall)
        elif self.is_ours:
            ps_ours.check(self.name, self.load(common))

    def measure(self, common: Load, *, deadline_s: float, sample: bool) -> Measured:
        load = self.load(common)
        if self.is_ours:
            said, ran = ps_ours.measure(
                self.name,
                self.flags,
                load,
                env=environment(),
                deadline_s=deadline_s,
                sample=sample,
                tree=self.tree,
            )
        else:
            command = self._command(load)
            said, ran = run_script(command, deadline_s=deadline_s, sample=sample)
        return Measured(
            said["samples_per_s"],
            said["ended"] - said["began"],
            ran.memory(said["began"], said["ended"]),
        )

    def _command(self, load: Load) -> list[str]:
        if self.name in PEERS:
            peer = PEERS[self.name]
            return [
                *(python_of(peer, reinstall=False), str(HERE / peer.script)),
                *(peer.mode, load.to_json()),
            ]
        return [sys.executable, str(HERE / "ps_bare.py"), self.name, load.to_json()]

    def expected_bytes(self, common: Load) -> int | None:
        """What parameters, gradients and the momentum must take, or None where nobody has said.

        Of a parameter server: parameters once a host, gradients once a worker, the optimizer's state
        once and once more for each replica. By TCP every worker counts as a host of its own, and the
        servers hold the parameters besides.
        """
        load = self.load(common)
        workers = load.workers
        if self.name in PEERS:
            return None
        if not self.name.startswith("ps:"):
            copies = 3 if self.name == "threads" else 3 * workers
            return copies * load.parameter_bytes
        config = make_strategy(self.name)
        replicas = getattr(config, "replicas", 0)
        if not isinstance(replicas, int):  # auto: where there is a second server
            replicas = 1
        replicas = min(replicas, workers - 1)
        hosts = workers + 1 if getattr(config, "transport", "") == "tcp" else 1
        return (hosts + workers + 1 + replicas) * load.parameter_bytes


def split_names(text: str) -> list[str]:
    """Cut at commas that are not inside brackets."""
    return [name.strip() for name in re.split(r",(?![^(]*\))", text) if name.strip()]


def base_memory(load: Load, *, deadline_s: float) -> Sample | None:
    """What as many processes take that have loaded torch and the data, and no model."""
    command = [sys.executable, str(HERE / "ps_bare.py"), "base", load.to_json()]
    said, ran = run_script(command, deadline_s=deadline_s, sample=True)
    return ran.memory(said["began"], said["ended"])


def run_script(
    command: list[str], *, deadline_s: float, sample: bool
) -> tuple[dict[str, Any], Ran]:
    """Run a script whose last line of output is a JSON object."""
    ran = run(command, env=environment(), deadline_s=deadline_s, sample=sample)
    for line in reversed(ran.output.splitlines()):
        if line.startswith("{"):
            return json.loads(line), ran
    raise Failed("it ended well and gave no result")


def environment() -> Mapping[str, str]:
    """This process's, with paths that hold wherever a member works, and nobody's thread count."""
    env = dict(os.environ)
    env.pop("OMP_NUM_THREADS", None)
    if path := env.get("PYTHONPATH"):
        env["PYTHONPATH"] = os.pathsep.join(str(Path(p).resolve()) for p in path.split(os.pathsep))
    return env | {"RAY_USAGE_STATS_ENABLED": "0", "PYTHONWARNINGS": "ignore"}
