"""A real Ray cluster of several nodes on this machine, in a process of its own.

The process reads one command a line and answers each with a line. `remove` takes away the node that was added
last, as if its power was cut. It ends with its input, and so do all nodes.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import pytest

STORE_BYTES = 80 << 20
QUICK = {
    "health_check_period_ms": 500,
    "health_check_failure_threshold": 3,
}
"""Ray misses a node after a second and a half."""
PATIENT = {"RAY_gcs_rpc_server_reconnect_timeout_s": "3"}
"""And its head after three."""


class Nodes:
    """The cluster, as tests see it."""

    def __init__(self, *cpus: int) -> None:
        # Short: Ray has unix sockets in it, whose paths can't be long.
        self.folder = Path(tempfile.mkdtemp(prefix="mh-", dir="/tmp"))
        # Ray notes the address of a cluster in its default temp folder, and does not create that folder.
        (self.folder / "ray").mkdir()
        environ = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
        environ["RAY_TMPDIR"] = str(self.folder)
        with open(self.folder / "errors", "w") as errors:
            self._process = subprocess.Popen(
                [sys.executable, __file__, str(self.folder / "ray"), *map(str, cpus)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env=environ | PATIENT,
            )
        try:
            self.address = self._answer()
        except BaseException:
            self.close()
            raise
        """Of the head."""

    def _answer(self) -> str:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("> "):  # else it is Ray that speaks
                return line[2:].strip()
        errors = (self.folder / "errors").read_text()
        raise AssertionError(f"the Ray cluster has ended:\n{errors[-4000:]}")

    def do(self, command: str) -> str:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{command}\n")
        self._process.stdin.flush()
        return self._answer()

    def left(self, within_s: float = 10.0) -> str:
        """The actors and placement groups that there are still after a while; empty if there are none."""
        deadline = time.monotonic() + within_s
        while (left := self.do("left")) and time.monotonic() < deadline:
            time.sleep(0.2)
        return left

    def used(self) -> int:
        """On how many nodes slots are reserved."""
        return int(self.do("used"))

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(60)
        self._process.stdout.close()
        shutil.rmtree(self.folder, ignore_errors=True)


def need_ray() -> None:
    try:
        version("ray")
    except PackageNotFoundError:
        pytest.skip("Ray is not installed: pip install 'manyhands[ray]'")


@contextmanager
def ray_nodes(*cpus: int) -> Iterator[Nodes]:
    """A cluster whose first node, the head, has so many CPUs, and so on."""
    need_ray()
    nodes = Nodes(*cpus)
    try:
        yield nodes
    finally:
        nodes.close()


def main(folder: str, *cpus: str) -> None:
    import ray
    from ray.cluster_utils import Cluster

    common = {"include_dashboard": False, "object_store_memory": STORE_BYTES}
    head = {"num_cpus": int(cpus[0]), "temp_dir": folder, **common}
    cluster = Cluster(initialize_head=True, head_node_args={**head, "_system_config": QUICK})
    nodes = [cluster.add_node(num_cpus=int(number), **common) for number in cpus[1:]]
    ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
    helpers: list[int] = []
    print(f"> {cluster.address}", flush=True)
    for line in sys.stdin:
        answer = "done"
        match line.split():
            case ["add", number]:
                nodes.append(cluster.add_node(num_cpus=int(number), **common))
            case ["remove"]:
                cluster.remove_node(nodes.pop(), allow_graceful=False)
            case ["behead"]:
                ray.shutdown()  # Ray ends whoever is connected
                helpers = children(cluster.head_node)
                cluster.head_node.kill_gcs_server()
            case ["left"]:
                answer = held()
            case ["used"]:
                answer = str(num_used())
        print(f"> {answer}", flush=True)
    if not helpers:
        ray.shutdown()
        cluster.shutdown()
        return
    # Without its head Ray can't be shut down, and leaves some of its own processes.
    for node in cluster.list_all_nodes():
        node.kill_all_processes(check_alive=False, allow_graceful=False)
    for pid in helpers:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    os._exit(0)  # else Ray asks its head for a minute


def children(node: Any) -> list[int]:
    """The processes that a node's raylet has started."""
    (raylet,) = node.all_processes["raylet"]
    threads = Path(f"/proc/{raylet.process.pid}/task").iterdir()
    return [int(pid) for thread in threads for pid in (thread / "children").read_text().split()]


def held() -> str:
    import ray
    from ray._private.state import actors

    groups = ray.util.placement_group_table().values()
    held = [f"a group that is {group['state']}" for group in groups if group["state"] != "REMOVED"]
    living = [actor for actor in actors().values() if actor["State"] != "DEAD"]
    return ", ".join(held + [f"an actor that is {actor['State']}" for actor in living])


def num_used() -> int:
    import ray

    groups = ray.util.placement_group_table().values()
    used = [group["bundles_to_node_id"] for group in groups if group["state"] == "CREATED"]
    return len({node for bundles in used for node in bundles.values()})


if __name__ == "__main__":
    main(*sys.argv[1:])
