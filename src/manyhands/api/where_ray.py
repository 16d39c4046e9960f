"""`--on ray`: members on a Ray cluster that this machine is a node of."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from manyhands.coordinator.options import LaunchPlan, RunOptions
from manyhands.errors import UsageError, check_choice
from manyhands.hosts.key import fresh_key
from manyhands.hosts.launchers.ray import RayLauncher
from manyhands.hosts.ray.broker_client import BrokerClient, check_installed
from manyhands.hosts.ray.resources import (
    LOCAL,
    PLACEMENTS,
    check_possible,
    in_order,
    slots_for,
)
from manyhands.hosts.timeouts import Timeouts
from manyhands.job import find_job
from manyhands.transport import Address, Authority, parse_address

if TYPE_CHECKING:
    from manyhands.api.options import Resolved


@dataclass(frozen=True)
class RayCluster:
    """A Ray cluster, not connected yet."""

    address: str
    """Empty: RAY_ADDRESS, or the cluster of this machine, or a new one."""
    placement: str
    ship: Path | None
    control: str | None
    wait_s: float | None
    spec: None = None
    """Always None: Ray knows its nodes, so there is no description."""

    def launch_plan(self, options: RunOptions, *, is_range: bool) -> LaunchPlan:
        """Connect to Ray. The caller has to end the launcher, which releases the slots."""
        servers, least = options.servers, options.min_workers if is_range else None
        cpus = options.threads * (options.workers + servers)
        ship = str(self.ship.resolve()) if self.ship else None
        broker = BrokerClient(self.address, cpus=cpus, ship=ship)
        try:
            slots = slots_for(
                workers=options.workers,
                servers=servers,
                threads=options.threads,
                device=options.device,
                gpus=sum(node.gpus for node in broker.cluster.nodes),
            )
            if self.wait_s is None:
                check_possible(in_order(slots, least)[0], broker.cluster.nodes)
            key = fresh_key()
            launcher = RayLauncher(
                broker,
                slots,
                key=key,
                job=self._job(options.job),
                least=least,
                placement=self.placement,
                shipped=self.ship is not None,
                shares_memory=options.config.traits.shares_memory,
            )
        except BaseException:
            broker.close()
            raise
        launcher.shares_cores = self.address == LOCAL  # it gets as many as the run requests
        launcher.again = f"--on ray={self.address}" if self.address else "--on ray"
        return LaunchPlan(
            self.control or str(Address(host=broker.cluster.host, port=0)),
            launcher,
            Authority.from_secret("manyhands run", key),
            None if self.wait_s is None else Timeouts(gather_s=self.wait_s),
        )

    def _job(self, reference: str) -> Path:
        """Return the job's file as members find it: relative to the shipped folder, or its path."""
        path = find_job(reference).path
        if self.ship is None:
            return path
        try:
            return path.relative_to(self.ship.resolve())
        except ValueError:
            raise UsageError(
                f"--ray-ship {self.ship}: the job {path} is not in that folder. Give one that it is in."
            ) from None


def find_ray(resolved: Resolved, address: str) -> RayCluster:
    check_installed()
    placement = resolved.get("ray_placement", "spread")
    check_choice("--ray-placement", placement, PLACEMENTS)
    ship = resolved.get("ray_ship", None, Path)
    if ship is not None and not ship.is_dir():
        raise UsageError(f"--ray-ship {ship}: there is no such folder.")
    control = resolved.get("control", None)
    if control is not None and parse_address(control).path:
        raise UsageError(
            f"--control {control}: with --on ray it is tcp://HOST:PORT, which nodes can reach."
        )
    return RayCluster(address, placement, ship, control, resolved.get("wait", None, float))
