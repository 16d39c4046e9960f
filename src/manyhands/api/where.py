"""Flags that choose where members run: this machine, hosts where this command was started too, or Ray.

With `--on env` every process runs the same command line. The first becomes the coordinator; each of the
others serves it as an agent, and ends with its exit code.
"""

from __future__ import annotations

import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from manyhands.api.where_ray import RayCluster, find_ray
from manyhands.contract import Strategy
from manyhands.coordinator.options import LaunchPlan, RunOptions
from manyhands.errors import ManyhandsError, UsageError, check_choice
from manyhands.events.units import plural
from manyhands.hosts.connect import check_only_coordinator
from manyhands.hosts.discovery import detect, one_of_several
from manyhands.hosts.key import no_key, read_key
from manyhands.hosts.launchers.agents import AgentLauncher
from manyhands.hosts.launchers.local import LocalLauncher
from manyhands.hosts.ray.resources import parse_place
from manyhands.hosts.rendezvous import connect_address, listening_address, one_host
from manyhands.hosts.spec import COORDINATOR, EVALUATOR, ClusterSpec
from manyhands.hosts.timeouts import Timeouts
from manyhands.hosts.view import WORKER
from manyhands.pairs import SERVERS
from manyhands.strategies.pairs import check_pairs
from manyhands.strategies.registry import make_strategy
from manyhands.strategies.spec import Spec, SpecPart, Value, parse_spec
from manyhands.transport import Authority, parse_address

if TYPE_CHECKING:
    from manyhands.api.options import Resolved

PLACES = ("local", "env", "ray")


MEANT_FOR = {
    "cluster": ("env",),
    "as": ("env",),
    "slots": ("env",),
    "wait": ("env", "ray"),
    "key_file": ("env",),
    "ray_placement": ("ray",),
    "ray_ship": ("ray",),
}
"""The values of `--on` for which a flag is valid."""


@dataclass(frozen=True)
class ResolvedCluster:
    """The cluster of this run, and how its processes find and authenticate each other."""

    spec: ClusterSpec
    authority: Authority | None
    """From the run's key; None: all are on one host, where the user id authenticates."""
    control: str | None
    """The coordinator's address, if the user has given one."""
    timeouts: Timeouts

    @property
    def is_coordinator(self) -> bool:
        return self.spec.me.rank == 0

    def serve(self, *, doctor: bool = False) -> int:
        """Run as an agent until the coordinator ends; return its exit code. `doctor`: answer probes only."""
        if self.spec.me.role == EVALUATOR:
            print(
                f"{self.spec.me.name} exits: the workers evaluate between epochs, so "
                f"{self.spec.source} needs no evaluator."
            )
            return 0
        from manyhands.hosts.agent import Agent

        address = connect_address(self.spec, self.control, keyed=self.authority is not None)
        agent = Agent(
            self.spec,
            address,
            authority=self.authority,
            timeouts=self.timeouts,
            doctor=doctor,
        )
        return agent.run()

    def listening_address(self) -> str:
        """Return where rank 0 listens; an error if another process is rank 0, too."""
        if self.authority is not None and self.control is None:
            check_only_coordinator(self.spec, authority=self.authority, host=socket.gethostname())
        return listening_address(self.spec, self.control, keyed=self.authority is not None)

    def launch_plan(self, options: RunOptions, *, is_range: bool) -> LaunchPlan:
        launcher = AgentLauncher(
            self.spec,
            least=options.min_workers if is_range else None,
            shares_memory=options.config.traits.shares_memory,
        )
        return LaunchPlan(self.listening_address(), launcher, self.authority, self.timeouts)


def find_cluster(
    resolved: Resolved, *, argv: Sequence[str] | None = None
) -> ResolvedCluster | RayCluster | None:
    """Find the cluster of this process; None: members are processes of this machine. `argv`: the command that
    does the same, for errors; by default that of this process."""
    file = resolved.get("cluster", None, Path)
    name = resolved.get("as", None)
    place = resolved.get("on", "local" if file is None else "env")
    address = parse_place(place)
    kind = place if address is None else "ray"
    check_choice("--on", kind, [*PLACES, "ray=HOST:PORT"])
    slots = resolved.get("slots", None, int)
    wait_s = resolved.get("wait", None, float)
    key_file = resolved.get("key_file", None, Path)
    given = {"cluster": file, "as": name, "slots": slots, "wait": wait_s, "key_file": key_file}
    given |= {flag: resolved.get(flag, None) for flag in ("ray_placement", "ray_ship")}
    for flag, value in given.items():
        kinds = MEANT_FOR[flag]
        if value is not None and kind not in kinds:
            raise UsageError(
                f"--{flag.replace('_', '-')} {value} is for  --on {' or '.join(kinds)}. Leave it out, "
                "or add that."
            )
    if kind == "local":
        if resolved.sources["on"]["from"] == "default":
            _refuse_several(sys.argv if argv is None else argv)
        return None
    if address is not None:
        return find_ray(resolved, address)
    spec = with_slots(detect(cluster=file, name=name), slots)
    control = resolved.get("control", None)
    authority = run_authority(spec, control, key_file)
    timeouts = Timeouts() if wait_s is None else Timeouts(gather_s=wait_s)
    return ResolvedCluster(spec, authority, control, timeouts)


def _refuse_several(argv: Sequence[str]) -> None:
    """Refuse to run as one of several processes: each would train alone, in its own folder."""
    several = one_of_several()
    if several is None:
        return
    line = several.line(argv)
    lines = [line]
    if several.spec is not None and not one_host(several.spec) and read_key(None) is None:
        lines = ["(umask 077; manyhands key > run.key)", f"{line} --key-file run.key"]
    typed = "".join(f"\n    {each}" for each in lines)
    raise UsageError(
        f"According to {several.source}, this is one of {several.size} processes, and nothing says that they "
        f"train together: each would train by itself, in a folder of its own. Type:{typed}\n"
        'If each is meant to train by itself, add  --on local  instead (in Python: on="local").'
    )


def run_authority(
    spec: ClusterSpec,
    control: str | None,
    key_file: Path | None,
    *,
    command: str = "train ... --on env",
) -> Authority | None:
    """Return the authority of the run's key; None: all processes are on one host and need none."""
    if control is not None and parse_address(control).path:
        raise UsageError(f"--control {control}: between processes it is tcp://HOST:PORT.")
    key = read_key(key_file)
    if key is None and (control is not None or not one_host(spec)):
        raise no_key(spec.source, command)
    return Authority.from_secret("manyhands run", key) if key else None


def with_slots(spec: ClusterSpec, slots: int | None) -> ClusterSpec:
    if slots is None:
        return spec
    if slots < 1:
        raise UsageError(f"--slots {slots}: at least 1.")
    entries = tuple(
        replace(entry, slots=slots) if entry.role in (COORDINATOR, WORKER) else entry
        for entry in spec.entries
    )
    return replace(spec, entries=entries, mine=entries[spec.me.rank])


@contextmanager
def launching(
    cluster: ResolvedCluster | RayCluster | None,
    resolved: Resolved,
    options: RunOptions,
    plan: LaunchPlan | None = None,
) -> Iterator[tuple[LaunchPlan, Callable[[int], int]]]:
    """Yield the launch plan, and a function to call with the exit code, with which the agents end.

    `plan`: given by the caller of the command, instead of by its flags.
    """
    if plan is not None:
        assert cluster is None, "either the command line says where members run, or its caller"
    elif cluster is None:
        launcher = LocalLauncher(terminal=options.debug)
        timeouts = Timeouts.endless() if options.debug else None
        plan = LaunchPlan(resolved.get("control", "unix"), launcher, timeouts=timeouts)
    else:
        plan = cluster.launch_plan(
            options, is_range=":" in str(resolved.sources["workers"]["value"])
        )
    codes = [1]

    def done(code: int) -> int:
        codes.append(code)
        return code

    try:
        yield plan, done
    except ManyhandsError as error:
        done(error.exit_code)
        raise
    except KeyboardInterrupt:
        done(130)
        raise
    finally:
        plan.launcher.end(codes[-1])


# Members and slots --------------------------------------------------------------------------------


def fit_strategy(text: str, cluster: ClusterSpec) -> str:
    """Add the servers of the cluster description to the spec."""
    number = cluster.num_servers
    if not number:
        return text
    spec, named = parse_spec(text), f"{plural(number, 'parameter server')} in {cluster.source}"
    check_pairs(make_strategy(text), {SERVERS: named}, workers=1)
    given = spec.strategy.options
    wanted: dict[str, Value] = {"placement": "dedicated", "servers": number}
    for name, value in wanted.items():
        if given.get(name, value) != value:
            raise UsageError(
                f"--strategy {text} says {name}={given[name]}, and {cluster.source} names {number} "
                f"parameter servers: {name}={value}. Leave {name} out."
            )
    return str(Spec(SpecPart(spec.strategy.name, {**given, **wanted}), spec.codecs))


def default_workers(config: Strategy, cluster: ClusterSpec) -> int:
    """Return one worker per slot, without the slots that servers take."""
    if config.traits.default_workers == 1:
        return 1
    servers = 0 if cluster.servers else config.servers_for(cluster.num_workers)
    return max(1, cluster.num_workers - servers)


def check_room(config: Strategy, cluster: ClusterSpec, workers: int, *, is_range: bool) -> None:
    """Refuse more members than there are slots; with MIN:MAX more slots may come later."""
    servers = 0 if cluster.servers else config.servers_for(workers)
    if is_range or workers + servers <= cluster.num_workers:
        return
    beside = f" and {servers} servers" if servers else ""
    raise UsageError(
        f"--workers {workers}{beside}: {cluster.source} has {cluster.num_workers} slots. Start more "
        "processes, or let each have more members with  --slots N, or give a range, as "
        f"--workers {max(1, cluster.num_workers - servers)}:{workers}, for processes that come later."
    )
